"""A model with the vLLM backend's interface that uses the engine of an `llm` model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from naiad.errors import CancelledError, EngineAwayError, NaiadError, error_with_status
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.parameter_keys import VLLM_KEYS
from naiad.frontend.prompt import PromptEncoder
from naiad.triton_server.models import pb
from naiad.triton_server.models.parameters import read_bool
from naiad.triton_server.models.text_frontend import TextFrontend
from naiad.triton_server.requests.vllm import VLLMRequestReader
from naiad.triton_server.responses.stream import Sender
from naiad.triton_server.responses.vllm import VLLMWriter
from naiad.triton_server.service.llm_service import RequestShape


class VLLMModel(TextFrontend):
    """Has the fields, outputs and error texts of the vLLM backend.

    The backend's parameters `REPORT_CUSTOM_METRICS` and `ENABLE_VLLM_HEALTH_CHECK` are accepted but have no
    effect: metrics and the health check are always on.
    """

    KIND = "vllm"

    def make_shape(self, encoder: PromptEncoder, parameters: Mapping[str, str]) -> RequestShape:
        """See `TextFrontend.make_shape`."""
        for key in VLLM_KEYS:
            read_bool(parameters, key, default=True)
        texts = ChunkTexts(encoder.tokenizer.table)
        return RequestShape(
            read=VLLMRequestReader(encoder).read,
            build=VLLMWriter(texts, encoder.tokenizer.table).write,
            cancel_message="Request was cancelled",
        )

    def make_sender(self, request: Any) -> Sender:
        """Make the sender of this request's responses."""
        return VLLMSender(request, is_decoupled=True, order=self._output_order)


class VLLMSender(pb.TritonSender):
    """Words errors, and logs cancelled requests, as the vLLM backend does."""

    _is_logged = False

    def send_error(self, error: NaiadError) -> None:
        """Send the error and FINAL in one message."""
        if isinstance(error, CancelledError):
            pb.log_info("[vllm] Successfully cancelled the request")
        elif isinstance(error, EngineAwayError):
            error = EngineAwayError("Model is unavailable due to unhealthy vLLM engine")
        else:
            error = error_with_status(error.status, f"Error generating stream: {error}")
        super().send_error(error)

    def is_cancelled(self) -> bool:
        """Whether the client is known to be gone; false once FINAL has been sent."""
        is_cancelled = super().is_cancelled()
        if is_cancelled and not self._is_logged:
            self._is_logged = True
            pb.log_info("[vllm] Cancelling the request")
        return is_cancelled
