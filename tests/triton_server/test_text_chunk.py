"""`text_chunk` says the same as the tensors that it stands for, and what is none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    let_senders_finish,
    llm_source,
)
from naiad.errors import InvalidRequestError
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import FinishReason
from naiad.tokenization import TextStream, Tokenizer
from naiad.triton_server.responses.detokenizer import chunk_outputs, is_probe, read_short_chunk
from naiad.triton_server.responses.llm import probe_tensors
from naiad.triton_server.responses.short_chunk import ShortChunk
from naiad.triton_server.responses.stream import StreamRow, Tensors
from naiad.triton_server.service.llm_service import LLMService

TEXT = b'{"prompt_tail_ids": [], "num_prompt_chars": 0}'
ANSWER = " brown 你好 fox e\u0301 🙂"
# The outputs that an ensemble takes of `llm`, as it was first and as it is.
OLDER = (
    "output_ids",
    "sequence_length",
    "sequence_id",
    "window_ids",
    "is_last",
    "max_chars",
    "num_emitted_tokens",
)
OUTPUTS = (*OLDER, "text_chunk")


@given(
    st.integers(0, 2**62 - 1),
    st.lists(st.integers(0, 2**31 - 1), max_size=9),
    st.lists(st.integers(0, 2**31 - 1), max_size=9),
)
def test_what_is_written_is_read(sequence_id: int, window: list[int], new: list[int]) -> None:
    chunk = ShortChunk(sequence_id, window + new, len(new))
    assert ShortChunk.read(chunk.tensor()) == chunk
    assert chunk.num_before == len(window)


@pytest.mark.parametrize(
    "values",
    [[], [[]], [[1]], [[-1, 0]], [[1, -1]], [[1, 1]], [[1, 3, 5, 5]], [[1, 0], [1, 0]], [[2**63 - 1, 2**62]]],
)
def test_what_is_no_chunk_is_refused(values: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="text_chunk has shape"):
        ShortChunk.read(np.array(values, dtype=np.int64))


@pytest.mark.parametrize("name", ["TOKENS_BATCH", "SEQUENCE_LENGTH", "sequence_id", "window_ids", "is_last"])
def test_it_stands_alone(name: str) -> None:
    chunk = ShortChunk(1, [5], 1).tensor()
    with pytest.raises(InvalidRequestError, match=f"text_chunk does not go with {name}"):
        read_short_chunk({"text_chunk": chunk, name: np.array([[1]])})


def test_a_negative_id_is_refused(tokenizer: Tokenizer) -> None:
    tensors = {"text_chunk": ShortChunk(1, [-5], 1).tensor()}
    with pytest.raises(InvalidRequestError, match="-5"):
        chunk_outputs(tokenizer.table, tensors, read_short_chunk(tensors), True)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_texts_and_details_are_those_of_the_tensors_it_stands_for(tokenizer: Tokenizer, step: int) -> None:
    said = {outputs: answer(tokenizer, outputs, step) for outputs in (OLDER, OUTPUTS)}
    long, short = ([decoded(tokenizer, each) for each in tensors] for tensors in said.values())
    assert long == short
    assert "".join(each["OUTPUT"][0] for each in short) == ANSWER
    assert not any("text_chunk" in each for each in said[OLDER])
    names = [set(each) for each in said[OUTPUTS]]
    assert names[:-1] == [{"text_chunk", "num_output_tokens"}] * (len(names) - 1)
    assert "text_chunk" not in names[-1]


def test_a_client_of_llm_gets_its_ids() -> None:
    (first, last) = responses(llm_source(streaming=True), [[5], [6]])
    assert first["output_ids"].tolist() == [[[5]]]
    assert "text_chunk" not in first | last


@pytest.mark.parametrize(("outputs", "name"), [(OLDER, "window_ids"), (OUTPUTS, "text_chunk")])
def test_a_probe_has_the_form_that_is_taken(outputs: tuple[str, ...], name: str) -> None:
    row = StreamRow(0, 7, takes_text_chunks=outputs is OUTPUTS)
    tensors = probe_tensors(row)
    assert name in tensors
    assert set(tensors) <= set(outputs)
    if outputs is OUTPUTS:
        assert ShortChunk.read(tensors[name]).is_probe
    else:
        assert is_probe(tensors)


def answer(tokenizer: Tokenizer, outputs: tuple[str, ...], step: int) -> list[Tensors]:
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    parts = [ids[begin : begin + step] for begin in range(0, len(ids), step)]
    source = llm_source(text_context=TEXT, streaming=True, return_num_output_tokens=True)
    source.outputs = outputs
    return responses(source, parts, tokenizer)


def responses(source: Any, parts: list[list[int]], tokenizer: Tokenizer | None = None) -> list[Tensors]:
    """What is sent of an answer in these parts."""
    engine = FakeEngineClient()
    service = LLMService(engine, pytest.fail, CountedIds(), LLM_SHAPE)
    sender = FakeSender()
    service.accept(source, sender, LIMITS)
    text = engine.submitted[0].text
    stream = TextStream(tokenizer.table, text) if tokenizer is not None and text is not None else None
    for part in parts:
        is_last = part is parts[-1]
        window = stream.push(part, is_last).window_ids if stream is not None else []
        reason = FinishReason.LENGTH if is_last else None
        service.take_outputs([RequestOutput(1, part, window, finish_reason=reason)], EngineStats())
        let_senders_finish(service)
        for stream_of in service.open_streams():
            for row in stream_of.rows:
                row.outstanding = 0
    service.close()
    assert sender.errors == []
    return sender.responses


def decoded(tokenizer: Tokenizer, tensors: Tensors) -> dict[str, Any]:
    """The detokenizer's outputs for what `llm` sends."""
    names = {"output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH"}
    inputs = {names.get(name, name): each for name, each in tensors.items()}
    made = chunk_outputs(tokenizer.table, inputs, read_short_chunk(inputs), True)
    assert made is not None
    texts = [each.decode() for each in made.pop("OUTPUT")]
    return {name: each.tolist() for name, each in made.items()} | {"OUTPUT": texts}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_tokenizer(tmp_path, tiny_tokenizer("byte_level")))
