"""The `llm` model: Triton's life cycle around `LLMService`."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

from naiad.config import EngineConfig
from naiad.config.engine_config import field_names
from naiad.config.model_location import model_directory
from naiad.engine_process import (
    AckReceiver,
    EngineClient,
    claim_instance,
    remove_runtime_directory,
)
from naiad.errors import NaiadError
from naiad.frontend.limits import ModelLimits
from naiad.frontend.parameter_keys import parameter_keys, refuse_unknown_keys
from naiad.outputs import EngineStats, RequestOutput
from naiad.parent_watch import end_with_parent
from naiad.triton_server.metrics.engine_metrics import Metrics
from naiad.triton_server.models import pb
from naiad.triton_server.models.parameters import read_bool
from naiad.triton_server.models.telemetry import make_telemetry
from naiad.triton_server.requests.llm import read_request
from naiad.triton_server.requests.tensors import TritonRequest
from naiad.triton_server.responses.llm import probe_tensors, response_tensors
from naiad.triton_server.service.ack_reader import AckReader
from naiad.triton_server.service.housekeeper import Housekeeper
from naiad.triton_server.service.llm_service import LLMService, RequestShape, Telemetry
from naiad.triton_server.service.retirement import Retirement

# Time for requests of the engine's other clients to finish; the server does not wait for them.
_DRAIN_S = 30.0


class LLMModel:
    """Owns the engine process, the service and the housekeeping thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine; the model is ready when the engine is."""
        try:
            self._start(args)
        except NaiadError as error:
            raise pb.start_failure(error) from None

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; responses go through their response senders. Never raises."""
        for request in requests:
            sender = pb.TritonSender(request, self._is_decoupled, self._output_order)
            self._service.accept(TritonRequest(request), sender, self._limits)

    def is_ready(self) -> bool:
        """Whether the engine serves (servers from 2026-03 on ask)."""
        return self._client.is_ready

    def finalize(self) -> None:
        """Stop everything: free the blocks, end the processes, remove files and metrics."""
        self._housekeeper.stop()
        self._service.close()
        self._retirement.leave()
        with contextlib.suppress(OSError):  # others' sockets may be in it
            self._instance.directory.rmdir()

    def _leave(self) -> None:
        """End the engine and remove its files and the metrics; requests are refused from now on."""
        self._housekeeper.stop()
        self._client.close(_DRAIN_S)
        self._acks.close()
        self._housekeeper.delete_metrics()
        self._number_lock.release()

    def _start(self, args: dict[str, str]) -> None:
        pb.prepare_process()
        parameters = pb.model_parameters(args)
        refuse_unknown_keys(parameters, parameter_keys("llm"))
        config = _engine_config(parameters)
        self._is_decoupled = pb.is_decoupled(args)
        self._output_order = pb.output_order(args)
        name = args["model_name"]
        self._instance, self._number_lock = claim_instance(os.getppid(), name)
        end_with_parent(lambda: remove_runtime_directory(self._instance.directory))
        try:
            self._start_engine(config, make_telemetry(parameters, name, self._served_name))
        except NaiadError:
            self._number_lock.release()
            raise
        info = self._client.info
        self._service.take_outputs([], info.stats)
        self._limits = ModelLimits(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=tuple(info.eos_token_ids),
            exclude_input_in_output=read_bool(parameters, "exclude_input_in_output", default=False),
            forwarded_headers=parameters.get("forwarded_headers", ""),
            is_decoupled=self._is_decoupled,
        )
        version = args["model_version"]
        self._retirement = Retirement(
            self._instance.place(version) if pb.is_single(args) else None,
            self._leave,
            pb.log_warning,
        )
        self._housekeeper = Housekeeper(
            self._service,
            self._instance.metrics_lock(version),
            lambda: Metrics(
                pb.metric_family,
                name,
                version,
                info.max_model_len,
                self._service.forwarded.take,
                self._service.fates,
                self._service.usage.now,
            ),
            self._retirement,
        )

    def _served_name(self) -> str:
        return self._client.info.checkpoint.served_name

    def _start_engine(self, config: EngineConfig, telemetry: Telemetry) -> None:
        instance = self._instance
        self._client = EngineClient(config, instance.engine_socket, self._take_outputs, self._engine_lost)
        # A model with one response for each request cannot send probes: its rows end without
        # acknowledgements.
        shape = RequestShape(
            read=read_request,
            build=response_tensors,
            build_probe=probe_tensors if self._is_decoupled else None,
        )
        self._service = LLMService(
            self._client, pb.log_error, instance.draw_first_id, shape, telemetry=telemetry
        )
        self._client.on_stop = self._service.cancel_requests
        self._client.on_observed = self._service.forwarded.add
        self._client.on_usage = self._service.usage.take
        self._client.start()
        self._acks = AckReader(AckReceiver(instance.ack_socket), self._service)

    def _take_outputs(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        self._service.take_outputs(outputs, stats)

    def _engine_lost(self) -> None:
        self._service.engine_lost()


def _engine_config(parameters: dict[str, str]) -> EngineConfig:
    chosen = {key: value for key, value in parameters.items() if key in field_names()}
    chosen["model_dir"] = str(model_directory(parameters.get("model_dir", "")))
    config = EngineConfig.from_parameters(chosen)
    if not config.draft_model:
        return config
    return replace(config, draft_model=str(model_directory(config.draft_model, "draft_model")))
