"""The `detokenizer` model: turns token ids into text, chunk by chunk, without state.

Each chunk carries the ids that its text depends on, so any chunking gives the same text. The model
acknowledges each chunk to the `llm` model and reports whether the client is still there, because Triton
does not notify a running `llm` step when an ensemble's client is gone.
"""

from __future__ import annotations

import os
from typing import Any

from naiad.config.model_location import model_directory
from naiad.engine_process import AckRouter, runtime_directory
from naiad.errors import InternalError, InvalidRequestError, NaiadError, place_of
from naiad.frontend.field import Frontend
from naiad.frontend.parameter_keys import parameter_keys, refuse_unknown_keys
from naiad.frontend.request import required
from naiad.parent_watch import end_with_parent
from naiad.tokenization import TokenTable
from naiad.triton_server.models import pb
from naiad.triton_server.models.parameters import read_bool
from naiad.triton_server.requests.tensors import TritonRequest, refuse_unknown_parameters
from naiad.triton_server.responses.detokenizer import chunk_outputs, is_probe, read_short_chunk
from naiad.triton_server.service.check_rounds import CheckRounds

_REQUIRED_OF_A_CHUNK = ("sequence_id", "window_ids")
_OPTIONAL_OF_A_CHUNK = ("num_emitted_tokens", "max_chars", "is_last")
_OF_A_CHUNK = (*_REQUIRED_OF_A_CHUNK, *_OPTIONAL_OF_A_CHUNK)


class DetokenizerModel:
    """Sends one response for each chunk, and none for a probe."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the token table and find the acknowledgement socket of the `llm` model."""
        try:
            pb.prepare_process()
            parameters = pb.model_parameters(args)
            refuse_unknown_keys(parameters, parameter_keys("detokenizer"))
            end_with_parent(lambda: None)
            self._table = TokenTable.from_directory(model_directory(parameters.get("model_dir", "")))
            self._skip_special = read_bool(parameters, "skip_special_tokens", default=True)
            self._is_decoupled = pb.is_decoupled(args)
            self._output_order = pb.output_order(args)
            self._forwarded_headers = parameters.get("forwarded_headers", "")
            llm_name = parameters.get("llm_model_name") or "llm"
            self._check_rounds = CheckRounds()
            self._acks = AckRouter(runtime_directory(os.getppid()), llm_name)
        except NaiadError as error:
            raise pb.start_failure(error) from None

    def execute(self, requests: list[Any]) -> None:
        """Answer each chunk. Never raises."""
        for request in requests:
            self._answer(request)

    def finalize(self) -> None:
        """Close the sockets."""
        self._acks.close()

    def _answer(self, request: Any) -> None:
        sender = pb.TritonSender(request, self._is_decoupled, self._output_order)
        sequence_id: int | None = None
        is_cancelled = False
        try:
            source = TritonRequest(request)
            tensors = source.tensors()
            chunk = read_short_chunk(tensors)
            sequence_id = _sequence_id(tensors) if chunk is None else chunk.sequence_id
            if chunk is None:
                _check(tensors)
            asks = is_probe(tensors) if chunk is None else chunk.is_probe
            # After FINAL the client can not be asked for.
            if sequence_id is not None and (self._check_rounds.is_due(sequence_id) or asks):
                is_cancelled = sender.is_cancelled()
            if sequence_id is None:
                # Chunks of a sequence come from llm, which has checked their parameters already.
                refuse_unknown_parameters(source.parameters(), Frontend.LLM, self._forwarded_headers)
            sender.send(chunk_outputs(self._table, tensors, chunk, self._skip_special), final=True)
        except NaiadError as error:
            sender.send_error(error)
        except Exception as error:  # noqa: BLE001 — only this chunk fails
            pb.log_error(f"naiad: a chunk failed with {place_of(error)}")
            sender.send_error(InternalError("internal error while detokenizing"))
        if sequence_id is not None:
            self._acks.send(sequence_id, 1, is_cancelled)


def _sequence_id(tensors: pb.Tensors) -> int | None:
    """The sequence that the tokens belong to, if they have one."""
    sent = tensors.get("sequence_id")
    return int(sent.item()) if sent is not None and sent.size == 1 else None


def _check(tensors: pb.Tensors) -> None:
    """Check the tensors: Triton's core does not require them, and any client may send the internal ones.

    Raises:
        InvalidRequestError: a tensor is missing, or an internal one has several rows or values.
    """
    for name in ("TOKENS_BATCH", "SEQUENCE_LENGTH"):
        required(tensors, name)
    sent = [name for name in _OF_A_CHUNK if name in tensors]
    if not sent:
        return
    for name in _REQUIRED_OF_A_CHUNK:
        required(tensors, name)
    for name in sent:
        num_rows = tensors[name].shape[0]
        if num_rows != 1:
            raise InvalidRequestError(f"{name} has {num_rows} rows: expected 1")
        if name != "window_ids" and tensors[name].size != 1:
            raise InvalidRequestError(f"{name} has {tensors[name].size} values: expected one")
