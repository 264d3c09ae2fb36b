"""Triton's Python API as small typed functions. The only module that imports `pb_utils`.

It can be imported only inside a stub of tritonserver's Python backend.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from naiad.errors import NaiadError
from naiad.inherited_sockets import close_inherited_sockets
from naiad.triton_server.responses.room import check_room

Tensors = dict[str, npt.NDArray[Any]]


def response(tensors: Mapping[str, npt.NDArray[Any]], order: Mapping[str, int]) -> Any:
    """Make a response of these output tensors, in the order given by `output_order`."""
    names = sorted(tensors, key=order.__getitem__)
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, tensors[name]) for name in names])


def error_response(error: NaiadError) -> Any:
    """Make a response that carries the error and its status."""
    # Triton's codes are named like our statuses; they do not exist yet while this module is imported.
    code = getattr(pb_utils.TritonError, error.status)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


class TritonSender:
    """Sends one request's responses; see `responses.stream.Sender`.

    Asking for cancellation after FINAL crashes the whole server (seen on 2.51: the request's
    response factory is gone), so a lock keeps the two apart.
    """

    def __init__(self, request: Any, is_decoupled: bool, order: Mapping[str, int]) -> None:
        """Get the request's response sender.

        Args:
            request: a `pb_utils.InferenceRequest`.
            is_decoupled: whether the model is decoupled; one that is not needs a response even for a bare
                FINAL.
            order: the result of `output_order`; clients of TensorRT-LLM's backend read the first output by
                position.
        """
        self._order = order
        self._sender = request.get_response_sender()
        self._is_decoupled = is_decoupled
        self._lock = threading.Lock()
        self._is_finished = False

    def send(self, tensors: Tensors | None, *, final: bool) -> None:
        """Send a response, or a bare FINAL when `tensors` is None.

        Raises:
            UnavailableError: the response does not fit into the server's shared memory; an error would.
        """
        check_room(tensors or {})
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._lock:
            self._is_finished = final
            if tensors is None and self._is_decoupled:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response(tensors or {}, self._order), flags=flags)

    def send_error(self, error: NaiadError) -> None:
        """Send the error and FINAL in one message."""
        with self._lock:
            self._is_finished = True
            self._sender.send(error_response(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Whether the client is known to be gone (an IPC round trip); false once FINAL has been sent."""
        with self._lock:
            return not self._is_finished and bool(self._sender.is_cancelled())


def model_parameters(arguments: dict[str, str]) -> dict[str, str]:
    """The `parameters` of the model's config.pbtxt; an unfilled "${…}" counts as empty."""
    parameters = json.loads(arguments["model_config"]).get("parameters", {})
    values = {key: str(value["string_value"]) for key, value in parameters.items()}
    return {key: "" if value.startswith("${") else value for key, value in values.items()}


def output_order(arguments: dict[str, str]) -> dict[str, int]:
    """The position of each output in the model's config.pbtxt."""
    outputs = json.loads(arguments["model_config"]).get("output", [])
    return {output["name"]: place for place, output in enumerate(outputs)}


def is_decoupled(arguments: dict[str, str]) -> bool:
    """Whether a request to the model may have any number of responses."""
    policy = json.loads(arguments["model_config"]).get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


def is_single(arguments: Mapping[str, str]) -> bool:
    """Whether the model has one instance only, as its config.pbtxt was when this process was started."""
    groups = json.loads(arguments["model_config"]).get("instance_group", [])
    return len(groups) == 1 and int(groups[0].get("count", 1)) == 1 and len(groups[0].get("gpus", [])) < 2


def prepare_process() -> None:
    """Close what this process has got from the server, and let its lines say their level; call it first."""
    close_inherited_sockets()
    logging.basicConfig(level=logging.WARNING, format="naiad model: %(levelname)s: %(message)s")


def start_failure(error: Exception) -> Exception:
    """Make the exception that `initialize` must raise for the server to show the message."""
    return pb_utils.TritonModelException(str(error))  # type: ignore[no-any-return]


def log_error(message: str) -> None:
    """Write to the server's log."""
    pb_utils.Logger.log_error(message)


def log_info(message: str) -> None:
    """Write to the server's log."""
    pb_utils.Logger.log_info(message)


def log_warning(message: str) -> None:
    """Write to the server's log."""
    pb_utils.Logger.log_warn(message)


def metric_family(name: str, description: str, kind: str) -> Any:
    """A custom metric family of kind "counter", "gauge" or "histogram"."""
    kinds = {
        "counter": pb_utils.MetricFamily.COUNTER,
        "gauge": pb_utils.MetricFamily.GAUGE,
        "histogram": pb_utils.MetricFamily.HISTOGRAM,
    }
    return pb_utils.MetricFamily(name=name, description=description, kind=kinds[kind])
