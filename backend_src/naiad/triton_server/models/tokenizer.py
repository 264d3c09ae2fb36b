"""The `tokenizer` model: turns text into token ids."""

from __future__ import annotations

import time
from typing import Any

from naiad.config import ModelConfig
from naiad.config.model_location import model_directory
from naiad.errors import InternalError, NaiadError, place_of
from naiad.frontend.parameter_keys import parameter_keys, refuse_unknown_keys
from naiad.frontend.prompt import PromptEncoder
from naiad.parent_watch import end_with_parent
from naiad.tokenization import Tokenizer
from naiad.triton_server.models import pb
from naiad.triton_server.models.parameters import read_bool, read_count
from naiad.triton_server.requests.tensors import TritonRequest
from naiad.triton_server.requests.tokenizer import TokenizerReader


class TokenizerModel:
    """Sends one response for each request; a bad request does not affect the others."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        try:
            pb.prepare_process()
            parameters = pb.model_parameters(args)
            self._output_order = pb.output_order(args)
            refuse_unknown_keys(parameters, parameter_keys("tokenizer"))
            end_with_parent(lambda: None)
            directory = model_directory(parameters.get("model_dir", ""))
            skip_special_tokens = read_bool(parameters, "skip_special_tokens", default=True)
            model_config = ModelConfig.from_directory(directory)
            encoder = PromptEncoder(
                Tokenizer.from_directory(directory),
                read_count(parameters, "max_model_len") or model_config.max_position_embeddings,
                model_config.vocab_size,
                add_special_tokens=read_bool(parameters, "add_special_tokens", default=True),
                skip_special_tokens=skip_special_tokens,
            )
            self._reader = TokenizerReader(encoder, parameters.get("forwarded_headers", ""))
        except NaiadError as error:
            raise pb.start_failure(error) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        """Tokenize each request, or answer it with its own error. Never raises."""
        received_s = time.monotonic()
        return [self._answer(request, received_s) for request in requests]

    def _answer(self, request: Any, received_s: float) -> Any:
        try:
            return pb.response(self._reader.read(TritonRequest(request), received_s), self._output_order)
        except NaiadError as error:
            return pb.error_response(error)
        except Exception as error:  # noqa: BLE001 — only this request fails
            pb.log_error(f"naiad: a request failed with {place_of(error)}")
            return pb.error_response(InternalError("internal error while tokenizing the request"))
