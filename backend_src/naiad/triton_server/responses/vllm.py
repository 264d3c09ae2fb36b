"""Responses of the vLLM backend's shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.outputs import RequestOutput, TokenLogProbs
from naiad.tokenization import TokenTable
from naiad.triton_server.requests.vllm import VLLMRequest
from naiad.triton_server.responses.stream import JoinedRow, ResponseStream, StreamRow, Tensors
from naiad.triton_server.responses.text import TextResponses

# What a text has that goes on.
_NO_REASON = "None"


class VLLMResponses:
    """Makes responses without rows: each output has one entry a sequence."""

    def __init__(self, texts: TextResponses, table: TokenTable) -> None:
        """Take what makes the text level's responses, and the checkpoint's tokens."""
        self._texts = texts
        self._table = table

    def build(self, stream: ResponseStream, row: StreamRow, chunk: RequestOutput) -> Tensors:
        """The response; see `ResponseBuilder`."""
        request = stream.request
        assert isinstance(request, VLLMRequest), "a request of another shape"
        outputs = request.outputs
        parts = row.in_order(outputs.num_return_sequences) if isinstance(row, JoinedRow) else [chunk]
        texts = [self._texts.text_of(stream, row, part) for part in parts]
        tensors: Tensors = {"text_output": _strings([request.prompt_text + text for text in texts])}
        if outputs.finish_reason:
            reasons = [part.finish_reason.value if part.finish_reason else _NO_REASON for part in parts]
            tensors["finish_reason"] = _strings(reasons)
            tensors["stop_reason"] = _strings([part.stop_reason for part in parts])
        if request.returns_cum_log_prob:
            tensors["cumulative_logprob"] = np.array([part.cum_log_prob for part in parts], dtype=np.float32)
        if request.returns_log_probs:
            tensors["logprobs"] = _strings([self._log_probs(request, part) for part in parts])
        if outputs.num_input_tokens:
            tensors["num_input_tokens"] = np.array([len(request.rows[0].prompt_token_ids)], dtype=np.uint32)
        if outputs.num_output_tokens:
            tensors["num_output_tokens"] = np.array([len(part.token_ids) for part in parts], dtype=np.uint32)
        if outputs.num_cached_tokens:
            tensors["num_cached_tokens"] = np.array([parts[0].num_cached_tokens], dtype=np.int32)
        return tensors

    def _log_probs(self, request: VLLMRequest, part: RequestOutput) -> str:
        """JSON: of each new token a map from token ids to what is known of them; "null": not asked for."""
        if request.num_log_probs is None:
            return "null"
        pairs = zip(part.token_ids, part.log_probs, strict=True)
        return json.dumps([self._entries(token_id, log_probs) for token_id, log_probs in pairs])

    def _entries(self, token_id: int, log_probs: TokenLogProbs) -> dict[int, dict[str, Any]]:
        best = list(zip(log_probs.top_token_ids, log_probs.top_log_probs, strict=True))
        # The new token goes first.
        entries = {token_id: self._entry(token_id, log_probs.log_prob, log_probs.rank)}
        for rank, (each, log_prob) in enumerate(best, 1):
            entries[each] = self._entry(each, log_prob, rank)
        return entries

    def _entry(self, token_id: int, log_prob: float, rank: int) -> dict[str, Any]:
        text = self._table.visible_bytes(token_id, skip_special_tokens=False).decode(errors="replace")
        return {"logprob": log_prob, "rank": rank, "decoded_token": text}


def _strings(texts: Sequence[str]) -> npt.NDArray[Any]:
    return np.array([text.encode() for text in texts], dtype=np.object_)
