"""Requests to play, read from a file of records or from a trace in another format."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from naiad.errors import ConfigError
from naiad.recording.record import BLOCK_TOKENS, FORMAT, RecordedOutput, RequestRecord
from naiad.sequence import EngineRequest, FinishReason, SamplingParams

# Tokens for which a trace of Mooncake or aiperf has a hash.
_TRACE_BLOCK_TOKENS = 512
_EXPECTED = "records of naiad serve --record, or a trace of Mooncake's or aiperf's format"


class _TraceLine(msgspec.Struct):
    """A request of Mooncake's traces, which aiperf's fixed schedules have too; times in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A prompt that is made up.

    Attributes:
        num_tokens: its length.
        blocks: what the blocks are drawn from: prompts that begin with the same ones begin with the same
            tokens.
        block_tokens: tokens of a block.
        rest: what the tokens after them are drawn from.
    """

    num_tokens: int
    blocks: Sequence[str]
    block_tokens: int
    rest: str

    def draw(self, vocab_size: int) -> list[int]:
        """Make the prompt."""
        ids: list[int] = []
        for block in self.blocks:
            draw = random.Random(block)
            ids += [draw.randrange(vocab_size) for _ in range(self.block_tokens)]
        draw = random.Random(self.rest)
        ids += [draw.randrange(vocab_size) for _ in range(self.num_tokens - len(ids))]
        return ids[: self.num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRequest:
    """A request to play.

    Attributes:
        line: its line in the file.
        due_s: seconds after the first request.
        request: without ids of sequences; if `lengths` is there, without a prompt.
        num_sequences: sequences of it.
        lengths: makes the prompt; None: it was recorded.
        expected: what each sequence gave; empty: nothing to compare with.
    """

    line: int
    due_s: float
    request: EngineRequest
    num_sequences: int = 1
    lengths: Lengths | None = None
    expected: Sequence[RecordedOutput] = ()


def read_requests(path: Path) -> list[PlayedRequest]:
    """Read a file, in the order in which its requests came.

    Raises:
        ConfigError: it can not be read, or a line is none of the formats; the message names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError("FILE", str(path), f"a file that can be read ({error.strerror})") from None
    made = [_read(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not made:
        raise ConfigError("FILE", str(path), "at least one request")
    first_s = min(each.due_s for each in made)
    made.sort(key=lambda each: each.due_s)
    return [_at(each, each.due_s - first_s) for each in made]


def _at(played: PlayedRequest, due_s: float) -> PlayedRequest:
    return PlayedRequest(
        line=played.line,
        due_s=due_s,
        request=played.request,
        num_sequences=played.num_sequences,
        lengths=played.lengths,
        expected=played.expected,
    )


def _read(path: Path, number: int, line: bytes) -> PlayedRequest:
    try:
        fields: Any = msgspec.json.decode(line)
        if isinstance(fields, dict) and fields.get("format") == FORMAT:
            return _of_record(number, msgspec.convert(fields, RequestRecord))
        traced = msgspec.convert(fields, _TraceLine)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError("FILE", f"{path} line {number}", f"{_EXPECTED} ({error})") from None
    if traced.input_length < 1 or traced.output_length < 1:
        raise ConfigError("FILE", f"{path} line {number}", "input_length and output_length ≥ 1")
    lengths = Lengths(
        num_tokens=traced.input_length,
        blocks=[str(each) for each in traced.hash_ids],
        block_tokens=_TRACE_BLOCK_TOKENS,
        rest=f"line {number}",
    )
    params = _of_length(SamplingParams(max_tokens=1), traced.output_length)
    request = EngineRequest(sequence_id=0, prompt_token_ids=[], params=params)
    return PlayedRequest(line=number, due_s=traced.timestamp / 1000, request=request, lengths=lengths)


def _of_record(number: int, record: RequestRecord) -> PlayedRequest:
    prompt, outputs = record.prompt, record.outputs
    longest = max((each.num_tokens for each in outputs), default=0)
    params, lengths = record.params, None
    if prompt.token_ids is None:
        params = _of_length(params, longest)
        lengths = Lengths(
            num_tokens=prompt.num_tokens,
            blocks=prompt.block_hashes,
            block_tokens=BLOCK_TOKENS,
            rest=prompt.hash,
        )
    elif any(each.finish_reason is not FinishReason.STOP for each in outputs) and longest:
        # Nobody cancels it this time, and no deadline ends it.
        params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, longest))
    request = EngineRequest(
        sequence_id=0,
        prompt_token_ids=prompt.token_ids or [],
        params=params,
        text=record.text,
        cache_salt=record.cache_salt,
        tenant=record.tenant,
        beam=record.beam,
        draft_token_ids=record.draft_token_ids,
    )
    return PlayedRequest(
        line=number,
        due_s=record.arrival_s,
        request=request,
        num_sequences=len(outputs),
        lengths=lengths,
        expected=outputs if lengths is None else (),
    )


def _of_length(params: SamplingParams, num_tokens: int) -> SamplingParams:
    """Ask for so many tokens, whatever they are."""
    num_tokens = max(1, num_tokens)
    return msgspec.structs.replace(
        params, max_tokens=num_tokens, min_tokens=num_tokens, stop_token_ids=(), stop_sequences=()
    )
