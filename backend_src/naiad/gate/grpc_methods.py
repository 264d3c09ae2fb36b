"""Which gRPC methods pass. What is not in this table is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

# plain: sent on as it came; infer: the message, a ModelInferRequest, is checked; stream: each of them is.
MethodKind = Literal["plain", "infer", "stream"]

_SERVICE = "inference.GRPCInferenceService"
INFERENCE: Mapping[str, MethodKind] = {
    "/grpc.health.v1.Health/Check": "plain",
    **{
        f"/{_SERVICE}/{name}": "plain"
        for name in (
            "ServerLive",
            "ServerReady",
            "ModelReady",
            "ServerMetadata",
            "ModelMetadata",
            "ModelConfig",
            "ModelStatistics",
        )
    },
    f"/{_SERVICE}/ModelInfer": "infer",
    f"/{_SERVICE}/ModelStreamInfer": "stream",
}
MODEL_CONTROL: Mapping[str, MethodKind] = {
    f"/{_SERVICE}/{name}": "plain"
    for name in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")
}
# It makes release 24.10 use a stream's memory after it was freed.
REFUSED_METADATA = "triton_grpc_error"
_CLOSED = {
    "SharedMemory": "shared memory",
    "TraceSetting": "settings of traces",
    "LogSettings": "settings of the log",
    "Repository": "model control (--model-control-mode explicit opens it)",
}


def refusal_of(method: str) -> str:
    """Return why a method that is not in the table does not pass."""
    for word, name in _CLOSED.items():
        if word in method:
            return f"the gate does not let through {name}"
    return "the gate knows no such method"
