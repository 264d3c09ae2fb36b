"""Triton's life cycle of a model that takes and returns text and uses the engine of an `llm` model."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from naiad.config import ModelConfig
from naiad.config.model_location import model_directory
from naiad.engine_process import AttachedClient, claim_instance, remove_runtime_directory
from naiad.errors import NaiadError
from naiad.frontend.limits import ModelLimits
from naiad.frontend.parameter_keys import parameter_keys, refuse_unknown_keys
from naiad.frontend.prompt import PromptEncoder
from naiad.outputs import EngineStats, RequestOutput
from naiad.parent_watch import end_with_parent
from naiad.tokenization import Tokenizer
from naiad.triton_server.metrics.request_metrics import RequestMetrics
from naiad.triton_server.models import pb
from naiad.triton_server.models.parameters import read_bool, read_count
from naiad.triton_server.models.telemetry import make_telemetry
from naiad.triton_server.requests.tensors import TritonRequest
from naiad.triton_server.responses.stream import Sender
from naiad.triton_server.service.housekeeper import Housekeeper
from naiad.triton_server.service.llm_service import LLMService, RequestShape, Telemetry
from naiad.triton_server.service.retirement import Retirement

_PATIENCE_S = 0.5


class TextFrontend(ABC):
    """Owns a connection to the engine, the service and the housekeeping thread; tokenizes and detokenizes.

    Attributes:
        KIND: the name of the shipped model of this kind.
    """

    KIND: ClassVar[str]

    @abstractmethod
    def make_shape(self, encoder: PromptEncoder, parameters: Mapping[str, str]) -> RequestShape:
        """Make the readers and writers of this model's requests and responses.

        Args:
            encoder: turns prompts into token ids.
            parameters: the parameters in config.pbtxt.
        """

    def make_sender(self, request: Any) -> Sender:
        """Make the sender of this request's responses."""
        return pb.TritonSender(request, self._own_limits.is_decoupled, self._output_order)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer and start looking for the engine, which may start later and may be restarted."""
        try:
            pb.prepare_process()
            self._start(args)
        except NaiadError as error:
            raise pb.start_failure(error) from None

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; responses go through their response senders. Never raises."""
        for request in requests:
            self._service.accept(TritonRequest(request), self.make_sender(request), self._limits())

    def is_ready(self) -> bool:
        """Whether the engine serves (servers from 2026-03 on ask)."""
        return self._client.info is not None

    def finalize(self) -> None:
        """Stop everything: end the sequences, remove files and metrics."""
        self._housekeeper.stop()
        self._service.close()
        self._retirement.leave()
        with contextlib.suppress(OSError):  # others' sockets may be in it
            self._instance.directory.rmdir()

    def _leave(self) -> None:
        """Hang up and remove the metrics; requests are refused from now on."""
        self._housekeeper.stop()
        self._client.close()
        self._housekeeper.delete_metrics()
        self._number_lock.release()

    def _start(self, args: dict[str, str]) -> None:
        parameters = pb.model_parameters(args)
        self._output_order = pb.output_order(args)
        refuse_unknown_keys(parameters, parameter_keys(self.KIND))
        directory = model_directory(parameters.get("model_dir", ""))
        config = ModelConfig.from_directory(directory)
        self._own_limits = ModelLimits(
            max_model_len=read_count(parameters, "max_model_len") or config.max_position_embeddings,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            exclude_input_in_output=read_bool(parameters, "exclude_input_in_output", default=False),
            forwarded_headers=parameters.get("forwarded_headers", ""),
            is_decoupled=pb.is_decoupled(args),
        )
        skip_special_tokens = read_bool(parameters, "skip_special_tokens", default=True)
        tokenizer = Tokenizer.from_directory(directory)
        encoder = PromptEncoder(
            tokenizer,
            self._own_limits.max_model_len,
            self._own_limits.vocab_size,
            add_special_tokens=read_bool(parameters, "add_special_tokens", default=True),
            skip_special_tokens=skip_special_tokens,
        )
        shape = self.make_shape(encoder, parameters)
        llm_name = parameters.get("llm_model_name") or "llm"
        name = args["model_name"]
        telemetry = make_telemetry(parameters, name, self._served_name)
        self._open(args, llm_name, shape, telemetry)

    def _served_name(self) -> str | None:
        info = self._client.info
        return None if info is None else info.checkpoint.served_name

    def _open(
        self, args: Mapping[str, str], llm_name: str, shape: RequestShape, telemetry: Telemetry
    ) -> None:
        name, version = args["model_name"], args["model_version"]
        self._instance, self._number_lock = claim_instance(os.getppid(), name)
        end_with_parent(lambda: remove_runtime_directory(self._instance.directory))
        self._client = AttachedClient(
            self._instance.directory, llm_name, self._take_outputs, self._lost, self._cancel
        )
        self._num_drawn_ids = 0
        self._service = LLMService(
            self._client,
            pb.log_error,
            self._draw_first_id,
            shape,
            owns_engine=False,
            telemetry=telemetry,
        )
        # If the engine is already serving, it is found before the first request.
        self._client.start(_PATIENCE_S)
        self._retirement = Retirement(
            self._instance.place(version) if pb.is_single(args) else None,
            self._leave,
            pb.log_warning,
        )
        self._housekeeper = Housekeeper(
            self._service,
            self._instance.metrics_lock(version),
            lambda: RequestMetrics(
                pb.metric_family, name, version, self._own_limits.max_model_len, fates=self._service.fates
            ),
            self._retirement,
        )

    def _draw_first_id(self, num_sequences: int) -> int:
        """Draw a request's ids, which only this client uses. Called by the one thread that takes requests."""
        first_id = self._num_drawn_ids + 1
        self._num_drawn_ids += num_sequences
        return first_id

    def _limits(self) -> ModelLimits:
        """The engine's limits; while there is no engine, those of the checkpoint.

        Without an engine, requests within these limits are refused with UNAVAILABLE.
        """
        info = self._client.info
        if info is None:
            return self._own_limits
        return replace(
            self._own_limits,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=tuple(info.eos_token_ids),
        )

    def _take_outputs(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        self._service.take_outputs(outputs, stats)

    def _lost(self, sequence_ids: list[int]) -> None:
        self._service.engine_lost(sequence_ids)

    def _cancel(self, request_id: str) -> None:
        self._service.cancel_requests(request_id)
