"""Refuses requests that could never be served, no matter how long they waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from naiad.errors import InvalidRequestError
from naiad.kv_cache.kv_group import KVGroup
from naiad.sequence import MAX_LENGTH_PENALTY, BeamParams, EngineRequest, SamplingParams, TextContext


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds on one request.

    Attributes:
        max_model_len: maximum prompt + output tokens of a sequence; that many fit the KV cache.
        vocab_size: ids are in [0, vocab_size).
        max_num_seqs: maximum number of sequences that run at the same time.
        kv_groups: the groups of the KV cache.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    kv_groups: tuple[KVGroup, ...]

    def check(self, request: EngineRequest) -> None:
        """Refuse a request that can never be served.

        Raises:
            InvalidRequestError: names the field, its value and what is allowed.
        """
        token_ids = request.prompt_token_ids
        if not token_ids:
            raise InvalidRequestError("input_ids is empty: expected at least one token")
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"input_ids has {len(token_ids)} tokens: expected at most {self.max_model_len - 1}, "
                f"as prompt and output together may have {self.max_model_len}"
            )
        self._check_ids("input_ids", token_ids)
        self._check_ids("draft_input_ids", request.draft_token_ids)
        self._check_params(request.params)
        if request.text is not None:
            self._check_text(request.text)
        if request.beam is not None:
            _check_beam_params(request.beam)
            self._check_beams(request)

    def clamp(self, request: EngineRequest) -> EngineRequest:
        """Return the request with `max_tokens` reduced to what `max_model_len` leaves."""
        room = self.max_model_len - len(request.prompt_token_ids)
        if request.params.max_tokens <= room:
            return request
        return replace(request, params=replace(request.params, max_tokens=room))

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what would fail a step; ids that are only compared, such as stop ids, may be unknown."""
        self._check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        self._check_ids("allowed_token_ids", params.allowed_token_ids)
        if params.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens = {params.max_tokens}: expected at least 1")
        if params.top_k < 0:
            raise InvalidRequestError(f"top_k = {params.top_k}: expected at least 0")
        if () in params.bad_words:
            raise InvalidRequestError("bad_words has an empty entry: expected at least one token each")
        if params.num_candidates:
            raise InvalidRequestError(f"num_candidates = {params.num_candidates}: expected 0")
        decay = params.top_p_decay
        if decay is not None and not 0 < decay.factor < 1:
            raise InvalidRequestError(f"top_p_decay = {decay.factor}: expected a number > 0 and < 1")

    def _check_text(self, text: TextContext) -> None:
        if "" in text.stop_strings:
            raise InvalidRequestError("stop_strings has an empty entry: expected at least one character each")
        self._check_ids("prompt_tail_ids", text.prompt_tail_ids)

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Refuse ids that the model does not have."""
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{field} contains the token id {token_id}: expected ids in [0, {self.vocab_size})"
                )

    def _check_beams(self, request: EngineRequest) -> None:
        """Refuse a search whose beams, which all run at the same time, would not fit an empty cache."""
        check_beam_width(request, self.max_num_seqs)
        width = len(request.sequence_ids)
        num_tokens = len(request.prompt_token_ids) + self.clamp(request).params.max_tokens
        for group in self.kv_groups:
            num_blocks = width * group.num_blocks_for_all(num_tokens)
            if num_blocks > group.pool.num_blocks:
                raise InvalidRequestError(
                    f"beam_width = {width}: {width} beams of {num_tokens} tokens may need {num_blocks} "
                    f"blocks of the KV cache, expected at most {group.pool.num_blocks}"
                )


def _check_beam_params(beam: BeamParams) -> None:
    """Refuse a penalty with which scores would overflow."""
    if not abs(beam.length_penalty) <= MAX_LENGTH_PENALTY:
        raise InvalidRequestError(
            f"length_penalty = {beam.length_penalty}: expected {-MAX_LENGTH_PENALTY} … {MAX_LENGTH_PENALTY}"
        )


def check_beam_width(request: EngineRequest, max_num_seqs: int) -> None:
    """Refuse a search whose beams cannot all run at the same time.

    Raises:
        InvalidRequestError: names the field, its value and what is allowed.
    """
    width = len(request.sequence_ids)
    if request.beam is not None and width > max_num_seqs:
        raise InvalidRequestError(f"beam_width = {width}: expected at most max_num_seqs = {max_num_seqs}")
