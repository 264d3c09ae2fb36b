"""How bodies become the engine's request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.tiny_tokenizers import byte_level_tokenizer, sentence_piece_tokenizer, write_tokenizer
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.frontend.request import GenerateRequest
from naiad.openai_server.api import reading
from naiad.openai_server.api.bodies import ChatBody, CompletionBody
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.messages import plain_messages
from naiad.openai_server.api.reading import RequestReader
from naiad.tokenization import Tokenizer

WINDOW = 64
LONG = "one two three four five six seven eight nine ten " * 10


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return Tokenizer.from_directory(write_tokenizer(folder, byte_level_tokenizer()))


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> RequestReader:
    limits = ModelLimits(
        max_model_len=WINDOW, vocab_size=400, eos_token_ids=(1,), exclude_input_in_output=True
    )
    return RequestReader(PromptEncoder(tokenizer, WINDOW, 400), limits)


def completion(reader: RequestReader, **fields: Any) -> GenerateRequest:
    body = msgspec.convert({"model": "m", "prompt": "Hello", **fields}, CompletionBody)
    return reader.completion(body, "id").request


def chat(reader: RequestReader, content: str, **fields: Any) -> GenerateRequest:
    sent = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return reader.chat(msgspec.convert(sent, ChatBody), "id").request


def refusal(reader: RequestReader, **fields: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        completion(reader, **fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("sent", "seed"), [(-5, 2**64 - 5), (2**64 - 1, 2**64 - 1), (2**63, 2**63)])
def test_a_seed_is_any_whole_number_whose_lowest_64_bits_count(
    reader: RequestReader, sent: int, seed: int
) -> None:
    assert completion(reader, seed=sent).rows[0].params.seed == seed


def test_a_chat_is_cut_to_the_window_if_it_says_nothing_of_its_output(reader: RequestReader) -> None:
    (row,) = chat(reader, LONG, truncate_prompt_tokens=-1).rows
    assert len(row.prompt_token_ids) == WINDOW - 1
    assert row.params.max_tokens == 1


@pytest.mark.parametrize(("max_tokens", "kept"), [(1, 63), (10, 54), (63, 1), (64, 63), (1000, 63)])
def test_a_prompt_is_cut_so_that_its_output_has_room(
    reader: RequestReader, max_tokens: int, kept: int
) -> None:
    (row,) = completion(reader, prompt=LONG, truncate_prompt_tokens=-1, max_tokens=max_tokens).rows
    assert len(row.prompt_token_ids) == kept


@pytest.mark.parametrize("key", ["9" * 5000, "9" * 20, "01", "-1", "+1", "1_0", " 1", "1e2", "²", "٣", ""])
def test_keys_of_biases_are_token_ids(reader: RequestReader, key: str) -> None:
    error = refusal(reader, logit_bias={key: 1.0})
    assert error.param == "logit_bias"
    assert len(error.message) < 200


def test_every_prompt_has_the_bad_words(reader: RequestReader) -> None:
    request = completion(reader, prompt=["Hello", "other", [5, 6]], bad_words=["the", "fox"])
    first, *others = [row.params.bad_words for row in request.rows]
    assert len(first) == 4
    assert others == [first, first]


def test_long_lists_are_not_repeated_for_many_prompts(reader: RequestReader) -> None:
    words = [f"{number:04} " + "x" * 200 for number in range(1000)]
    assert len(completion(reader, bad_words=words).rows) == 1
    error = refusal(reader, prompt=["a"] * 1000, bad_words=words)
    assert error.param == "prompt"
    ids = list(range(400)) * 20
    assert "allowed_token_ids" in refusal(reader, prompt=["a"] * 1000, allowed_token_ids=ids).message


@pytest.mark.parametrize("name", [None, ""])
def test_no_name_is_no_name(name: str | None) -> None:
    assert plain_messages([{"role": "user", "content": "Hi", "name": name}]) == [
        {"role": "user", "content": "Hi"}
    ]


def test_parts_hold_what_clients_send_and_nothing_else() -> None:
    text = {
        "type": "text",
        "text": "Hi",
        "annotations": [],
        "cache_control": {"type": "ephemeral"},
        "id": None,
    }
    assert plain_messages([{"role": "user", "content": [text, {"type": "refusal", "refusal": "!"}]}]) == [
        {"role": "user", "content": "Hi!"}
    ]
    for part, name in (({"foo": 1}, "foo"), ({"image_url": {"url": "x"}}, "image_url")):
        with pytest.raises(APIError, match=rf"messages\[0\]\.content\[1\]\.{name} = .* type and text"):
            plain_messages([{"role": "user", "content": ["Hi", {"type": "text", "text": "!", **part}]}])


def test_a_name_is_part_of_a_message(reader: RequestReader) -> None:
    named = {"role": "user", "content": "Hi", "name": "Ann"}
    assert plain_messages([named]) == [named]
    with pytest.raises(APIError) as caught:
        reader.chat(ChatBody(model="m", messages=[{**named, "name": "a b"}]), "id")
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "messages[0].name = 'a b'" in caught.value.message


def test_a_chat_has_the_special_tokens_of_a_text_if_it_asks_for_them(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, sentence_piece_tokenizer())
    encoder = PromptEncoder(Tokenizer.from_directory(folder), WINDOW, 400)
    limits = ModelLimits(
        max_model_len=WINDOW, vocab_size=400, eos_token_ids=(2,), exclude_input_in_output=True
    )
    begun, *others = (
        chat(RequestReader(encoder, limits), "Hi", add_special_tokens=adds).rows[0].prompt_token_ids
        for adds in (True, False, None)
    )
    assert others == [begun[1:]] * 2
    assert begun[0] == encoder.tokenizer.bos_id


def test_what_is_wrong_with_a_prompt_names_the_field(reader: RequestReader) -> None:
    with pytest.raises(APIError) as caught:
        chat(reader, "\ufdd0")
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert refusal(reader, prompt="a" * 100_000).param == "prompt"


def test_prompts_come_back_only_so_often(reader: RequestReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_ECHOED_CHARS", 4 * len("Hello"))
    assert completion(reader, echo=True, n=4).num_sequences == 4
    error = refusal(reader, echo=True, n=5)
    assert error.param == "n"
    assert "25 characters" in error.message
    assert refusal(reader, echo=True, n=2, prompt=["Hello"] * 3).param == "n"
    assert refusal(reader, return_token_ids=True, n=4).param == "n"
    # What does not come back is not counted.
    assert completion(reader, n=16).num_sequences == 16
