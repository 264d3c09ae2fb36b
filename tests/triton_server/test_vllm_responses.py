"""Responses of the vLLM backend's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import FakeSender
from helpers.vllm_requests import make_reader, read
from naiad.frontend.chunks import ChunkTexts
from naiad.outputs import RequestOutput, TokenLogProbs
from naiad.sequence import FinishReason
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.vllm import VLLMRequest, VLLMRequestReader
from naiad.triton_server.responses.stream import JoinedRow, ResponseStream, StreamRow
from naiad.triton_server.responses.vllm import VLLMWriter


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_tokenizer(tmp_path, tiny_tokenizer("byte_level")))


@pytest.fixture
def reader(tokenizer: Tokenizer) -> VLLMRequestReader:
    return make_reader(tokenizer)


@pytest.fixture
def writer(tokenizer: Tokenizer) -> VLLMWriter:
    return VLLMWriter(ChunkTexts(tokenizer.table), tokenizer.table)


def sent(writer: VLLMWriter, request: VLLMRequest, row: StreamRow, *outputs: RequestOutput) -> dict[str, Any]:
    """The one response to the engine's outputs of a row."""
    sender = FakeSender()
    stream = ResponseStream(request, sender, [row], has_detokenizer=False)
    for each in outputs:
        stream.push(row, each, None)
    stream.flush(writer.write, None)
    (response,) = sender.responses
    return response


ALL = dict.fromkeys(
    (
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_num_cached_tokens",
    ),
    True,
)


def output(tokenizer: Tokenizer, sequence_id: int, text: str, reason: FinishReason | None) -> RequestOutput:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return RequestOutput(
        sequence_id,
        ids,
        tokenizer.prompt_tail(tokenizer.encode("The quick", add_special_tokens=True)),
        finish_reason=reason,
        log_probs=[TokenLogProbs(-0.5, [each + 1, each], [-0.25, -0.5], 2) for each in ids],
        cum_log_prob=-0.5 * len(ids),
    )


def test_a_response_has_vllms_outputs(
    reader: VLLMRequestReader, writer: VLLMWriter, tokenizer: Tokenizer
) -> None:
    request, row = read(reader, {"logprobs": 2}, stream=True, **ALL), StreamRow(0, 1)
    made = sent(writer, request, row, output(tokenizer, 1, " fox", None))
    (token_id, *_) = ids = tokenizer.encode(" fox", add_special_tokens=False)
    assert {name: (str(value.dtype), value.shape) for name, value in made.items()} == {
        "text_output": ("object", (1,)),
        "finish_reason": ("object", (1,)),
        "stop_reason": ("object", (1,)),
        "cumulative_logprob": ("float32", (1,)),
        "logprobs": ("object", (1,)),
        "num_input_tokens": ("uint32", (1,)),
        "num_output_tokens": ("uint32", (1,)),
        "num_cached_tokens": ("int32", (1,)),
    }
    assert (made["text_output"].item(), made["finish_reason"].item()) == (b" fox", b"None")
    assert made["num_output_tokens"].item() == len(ids)
    assert made["cumulative_logprob"].item() == -0.5 * len(ids)
    shown = json.loads(made["logprobs"].item())
    assert len(shown) == len(ids)
    assert list(shown[0]) == [str(token_id), str(token_id + 1)]
    text = tokenizer.table.visible_bytes(token_id, skip_special_tokens=False).decode()
    assert shown[0][str(token_id)] == {"logprob": -0.5, "rank": 2, "decoded_token": text}
    assert shown[0][str(token_id + 1)]["rank"] == 1


def test_log_probs_that_nobody_asked_for_are_null(
    reader: VLLMRequestReader, writer: VLLMWriter, tokenizer: Tokenizer
) -> None:
    request, row = read(reader, return_logprobs=True), StreamRow(0, 1)
    made = sent(writer, request, row, output(tokenizer, 1, " fox", FinishReason.STOP))
    assert made["logprobs"].item() == b"null"
    assert made["text_output"].item() == b"The quick fox"


def test_all_sequences_have_one_response(
    reader: VLLMRequestReader, writer: VLLMWriter, tokenizer: Tokenizer
) -> None:
    request = read(reader, {"n": 2}, return_finish_reason=True, return_num_output_tokens=True)
    row = JoinedRow(0, 1, sibling_ids=(2,))
    for sequence_id, text, reason in (
        (2, " dog", FinishReason.STOP),
        (1, " brown", None),
        (1, " fox", FinishReason.LENGTH),
    ):
        assert not row.may_send(is_streaming=False)
        row.add(output(tokenizer, sequence_id, text, reason))
    assert row.may_send(is_streaming=False)
    assert row.pending is not None
    made = sent(writer, request, row)
    assert made["text_output"].tolist() == [b"The quick brown fox", b"The quick dog"]
    assert made["finish_reason"].tolist() == [b"length", b"stop"]
    assert made["num_output_tokens"].shape == (2,)
