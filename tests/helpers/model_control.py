"""A client that has the key of model control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tritonclient.grpc as triton
from tritonclient._plugin import InferenceServerClientPlugin

from naiad.cli.control_key import GRPC_HEADER


class _Key(InferenceServerClientPlugin):  # type: ignore[misc]
    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request: Any) -> None:
        request.headers[GRPC_HEADER] = self._key


def control_client(address: str, key_file: Path) -> triton.InferenceServerClient:
    """Connect with the key in this file."""
    client = triton.InferenceServerClient(address)
    client.register_plugin(_Key(key_file.read_text().strip()))
    return client
