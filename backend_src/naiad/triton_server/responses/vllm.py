"""The writer of responses as the vLLM backend sends them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.frontend.chunks import Chunk, ChunkTexts
from naiad.outputs import RequestOutput, TokenLogProbs
from naiad.tokenization import TokenTable
from naiad.triton_server.requests.vllm import VLLMRequest
from naiad.triton_server.responses.stream import StreamRow, Tensors

# The finish reason of a sequence that has not ended.
_NO_REASON = "None"


class VLLMWriter:
    """Turns chunks into responses without a batch dimension; each output has one entry for each sequence."""

    def __init__(self, texts: ChunkTexts, table: TokenTable) -> None:
        """Use `texts` to turn tokens into text; `table` holds the checkpoint's tokens."""
        self._texts = texts
        self._table = table

    def write(self, _row: StreamRow, chunk: Chunk) -> Tensors:
        """Return the response; see `ResponseBuilder`."""
        request, outputs = chunk.request, chunk.outputs
        assert isinstance(request, VLLMRequest), "a request of another frontend"
        requested = request.outputs
        texts = [request.prompt_text + text for text in self._texts.of(chunk)]
        tensors: Tensors = {"text_output": _strings(texts)}
        if requested.finish_reason:
            reasons = [each.finish_reason.value if each.finish_reason else _NO_REASON for each in outputs]
            tensors["finish_reason"] = _strings(reasons)
            tensors["stop_reason"] = _strings([each.stop_reason for each in outputs])
        if request.returns_cum_log_prob:
            sums = [each.cum_log_prob for each in outputs]
            tensors["cumulative_logprob"] = np.array(sums, dtype=np.float32)
        if request.returns_log_probs:
            tensors["logprobs"] = _strings([self._log_probs(request, each) for each in outputs])
        if requested.num_input_tokens:
            tensors["num_input_tokens"] = np.array([len(chunk.prompt_token_ids)], dtype=np.uint32)
        if requested.num_output_tokens:
            counts = [len(each.token_ids) for each in outputs]
            tensors["num_output_tokens"] = np.array(counts, dtype=np.uint32)
        if requested.num_cached_tokens:
            tensors["num_cached_tokens"] = np.array([chunk.first.num_cached_tokens], dtype=np.int32)
        return tensors

    def _log_probs(self, request: VLLMRequest, output: RequestOutput) -> str:
        """JSON with a map for each new token, from token ids to their details; "null" if not requested."""
        if request.num_log_probs is None:
            return "null"
        pairs = zip(output.token_ids, output.log_probs, strict=True)
        return json.dumps([self._entries(token_id, log_probs) for token_id, log_probs in pairs])

    def _entries(self, token_id: int, log_probs: TokenLogProbs) -> dict[int, dict[str, Any]]:
        best = list(zip(log_probs.top_token_ids, log_probs.top_log_probs, strict=True))
        # The new token comes first.
        entries = {token_id: self._entry(token_id, log_probs.log_prob, log_probs.rank)}
        for rank, (each, log_prob) in enumerate(best, 1):
            entries[each] = self._entry(each, log_prob, rank)
        return entries

    def _entry(self, token_id: int, log_prob: float, rank: int) -> dict[str, Any]:
        text = self._table.visible_bytes(token_id, skip_special_tokens=False).decode(errors="replace")
        return {"logprob": log_prob, "rank": rank, "decoded_token": text}


def _strings(texts: Sequence[str]) -> npt.NDArray[Any]:
    return np.array([text.encode() for text in texts], dtype=np.object_)
