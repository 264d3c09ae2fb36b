"""Texts of token ids, and token ids of texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny_tokenizers import sentence_piece_tokenizer, write_tokenizer
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server import model_routes
from naiad.openai_server.api.bodies import DetokenizeBody, TokenizeBody
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.reading import RequestReader
from naiad.tokenization import Tokenizer

WINDOW = 16
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), sentence_piece_tokenizer())
    tokenizer = Tokenizer.from_directory(directory)
    info = SimpleNamespace(vocab_size=300, max_model_len=WINDOW)
    limits = ModelLimits(
        max_model_len=WINDOW, vocab_size=300, eos_token_ids=(2,), exclude_input_in_output=True
    )
    reader = RequestReader(PromptEncoder(tokenizer, 4 * WINDOW, 300), limits)
    return SimpleNamespace(info=info, tokenizer=tokenizer, reader=reader)


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


@pytest.mark.parametrize("prompt", [{"prompt": "Hello"}, {"messages": HELLO}])
def test_special_tokens_are_added_if_they_are_asked_for(loaded: Any, prompt: dict[str, Any]) -> None:
    plain, begun = (
        model_routes._token_ids(TokenizeBody(**prompt, add_special_tokens=adds), loaded)
        for adds in (False, True)
    )
    assert begun == [loaded.tokenizer.bos_id, *plain]
    default = model_routes._token_ids(TokenizeBody(**prompt), loaded)
    assert default == (begun if "prompt" in prompt else plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("add_generation_prompt", True),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"a": 1}),
    ],
)
def test_a_prompt_is_not_rendered(loaded: Any, name: str, value: Any) -> None:
    with pytest.raises(APIError) as caught:
        model_routes._token_ids(TokenizeBody(prompt="Hello", **{name: value}), loaded)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert caught.value.message.startswith(f"{name} = ")
    assert caught.value.message.endswith(": expected messages with it, not a prompt.")
    nothing = TokenizeBody(prompt="Hello", **{name: type(value)()})
    assert model_routes._token_ids(nothing, loaded) == model_routes._token_ids(
        TokenizeBody(prompt="Hello"), loaded
    )
