"""A recorded request: one line of JSON."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from naiad.sequence import BeamParams, EngineRequest, FinishReason, SamplingParams, TextContext

FORMAT: Literal["naiad-record-1"] = "naiad-record-1"
# Prompts that begin with the same blocks of so many tokens have the same hashes there.
BLOCK_TOKENS = 64
_HASH_BYTES = 16


class RecordedPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt.

    Attributes:
        num_tokens: its length.
        hash: of all its ids.
        block_hashes: for each full block, the hash of the prompt up to its end.
        token_ids: the ids; None: they are not recorded.
    """

    num_tokens: int
    hash: str
    block_hashes: list[str] = []
    token_ids: list[int] | None = None


class RecordedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one sequence gave.

    Attributes:
        num_tokens: ids that were sent.
        hash: of all of them.
        finish_reason: why it ended.
        token_ids: the ids; None: they are not recorded.
    """

    num_tokens: int
    hash: str
    finish_reason: FinishReason
    token_ids: list[int] | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt of a request, as the engine got it.

    Attributes:
        format: marks the file.
        arrival_s: Unix time.
        door: by which server it came.
        model: the name of the model that answered.
        prompt: the prompt.
        params: how tokens were drawn; `seed` is the one that was used, drawn or not.
        text: how tokens became text; None without prompts, as it has stop strings.
        timeout_s: seconds until the deadline; None = none.
        cache_salt, tenant: hashes of the request's own; they are equal where those are.
        beam: of a beam search.
        draft_token_ids: the client's guess at the output; none without prompts.
        outputs: one for each sequence.
    """

    format: Literal["naiad-record-1"]
    arrival_s: float
    door: str
    model: str
    prompt: RecordedPrompt
    params: SamplingParams
    text: TextContext | None = None
    timeout_s: float | None = None
    cache_salt: str = ""
    tenant: str | None = None
    beam: BeamParams | None = None
    draft_token_ids: tuple[int, ...] = ()
    outputs: list[RecordedOutput]


def hash_of(token_ids: Sequence[int]) -> str:
    """The hash of ids."""
    return _digest(_packed(token_ids))


def recorded_prompt(token_ids: list[int], *, with_ids: bool) -> RecordedPrompt:
    """Describe a prompt."""
    hashes, so_far = [], hashlib.blake2b(digest_size=_HASH_BYTES)
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        so_far.update(_packed(token_ids[end - BLOCK_TOKENS : end]))
        hashes.append(so_far.hexdigest())
    return RecordedPrompt(len(token_ids), hash_of(token_ids), hashes, token_ids if with_ids else None)


def recorded_output(token_ids: list[int], reason: FinishReason, *, with_ids: bool) -> RecordedOutput:
    """Describe what a sequence gave."""
    return RecordedOutput(len(token_ids), hash_of(token_ids), reason, token_ids if with_ids else None)


def make_record(
    request: EngineRequest,
    outputs: list[RecordedOutput],
    *,
    arrival_s: float,
    door: str,
    model: str,
    with_prompts: bool,
) -> RequestRecord:
    """Make the record of a request that has ended.

    Args:
        request: as the engine got it.
        outputs: one for each of its sequences.
        arrival_s: Unix time.
        door: by which server it came.
        model: the name of the model that answered.
        with_prompts: record ids, and what else says something of the texts: stop strings, words, grammars.
    """
    params = request.params
    if not with_prompts:
        params = msgspec.structs.replace(
            params, stop_sequences=(), bad_words=(), logit_bias=(), allowed_token_ids=(), grammar=None
        )
    return RequestRecord(
        format=FORMAT,
        arrival_s=arrival_s,
        door=door,
        model=model,
        prompt=recorded_prompt(request.prompt_token_ids, with_ids=with_prompts),
        params=params,
        text=request.text if with_prompts else None,
        timeout_s=request.timeout_s,
        cache_salt=_anonymous(request.cache_salt),
        tenant=None if request.tenant is None else _anonymous(request.tenant),
        beam=request.beam,
        draft_token_ids=request.draft_token_ids if with_prompts else (),
        outputs=outputs,
    )


def _anonymous(name: str) -> str:
    return name and _digest(name.encode())


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).hexdigest()
