"""Texts of token ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.openai_server import model_routes
from naiad.openai_server.api.bodies import DetokenizeBody
from naiad.openai_server.api.errors import APIError
from naiad.tokenization import Tokenizer

WINDOW = 16


@pytest.fixture
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())
    info = SimpleNamespace(vocab_size=300, max_model_len=WINDOW)
    return SimpleNamespace(info=info, tokenizer=Tokenizer.from_directory(directory))


def refusal(loaded: Any, tokens: list[int]) -> APIError:
    with pytest.raises(APIError) as caught:
        model_routes._detokenized(DetokenizeBody(tokens=tokens), loaded)
    assert (caught.value.status, caught.value.param) == (400, "tokens")
    return caught.value


def test_so_many_windows_of_ids_become_text(loaded: Any) -> None:
    most = 4 * WINDOW
    assert len(model_routes._detokenized(DetokenizeBody(tokens=[70] * most), loaded).prompt) == most
    assert f"at most {most} are allowed" in refusal(loaded, [70] * (most + 1)).message


@pytest.mark.parametrize("token_id", [-1, 300])
def test_ids_that_the_model_does_not_have_are_named(loaded: Any, token_id: int) -> None:
    assert (
        f"tokens holds {token_id}: expected token ids in [0, 300)" in refusal(loaded, [70, token_id]).message
    )
