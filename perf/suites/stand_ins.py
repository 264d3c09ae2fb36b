"""What takes the place of the modules with which suites start their own servers.

Tests and their conftest files stay as they are; they import these modules under the names that they know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import openai
from perf.suites.served import ServedModel, options_of_vllm

_TIMEOUT_S = 600.0
# What vLLM's tests expect of their clients.
_PATIENT = {"max_retries": 0, "timeout": _TIMEOUT_S}
# Of Triton's suite: the model that its tests expect in a repository of this name.
_MODELS_OF_REPOSITORIES = {"test_models": "mock_llm"}

_shared: dict[tuple[str, str], ServedModel] = {}
# The checkpoint that the file whose tests run now is served with, and options of that.
checkpoint = ""
more_options: tuple[str, ...] = ()


class RemoteServer:
    """Naiad in place of the server that a test starts in a process of its own."""

    _client_settings: Mapping[str, Any] = _PATIENT

    def __init__(self, model: str, arguments: Sequence[str], **_settings: Any) -> None:
        """Start it; what only the suite's own server can be told is left out."""
        self._served = ServedModel(str(model), checkpoint, [*options_of_vllm(arguments), *more_options])

    def __enter__(self) -> RemoteServer:
        """Give the server."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop it."""
        self._served.stop()

    @property
    def url_root(self) -> str:
        """The address without a path."""
        return self._served.root

    def url_for(self, *parts: str) -> str:
        """The address of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **settings: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(**self._settings(settings))

    def get_async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        """The official client, asynchronous."""
        return openai.AsyncOpenAI(**self._settings(settings))

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        base = {"base_url": self.url_for("v1"), "api_key": "none"}
        return {**base, **self._client_settings, **settings}


class SharedServer(RemoteServer):
    """One Naiad for all tests that use the same model; it ends with the tests."""

    _client_settings: Mapping[str, Any] = {}

    def __init__(self, name: str) -> None:
        """Start it, unless it runs."""
        if (name, checkpoint) not in _shared:
            _shared[name, checkpoint] = ServedModel(name, checkpoint, more_options)
        self._served = _shared[name, checkpoint]

    def __exit__(self, *_error: object) -> None:
        """Leave it to the next test."""

    def stop(self) -> None:
        """Leave it to the next test."""


def stop_shared_servers() -> None:
    """Stop the servers that tests shared."""
    for served in _shared.values():
        served.stop()
    _shared.clear()


def stand_in_for_vllm() -> None:
    """Put Naiad in the place of `vllm serve`."""
    utils = _module("tests.utils")
    utils.RemoteOpenAIServer = RemoteServer
    utils.ROCM_EXTRA_ARGS = []


def stand_in_for_triton() -> None:
    """Put Naiad in the place of Triton's frontend, in its process and in the test's own."""
    tritonserver = _module("tritonserver")
    tritonserver.Server = SharedServer
    tritonserver.ModelControlMode = _ModelControlMode
    utils = _module("tests.utils")
    utils.OpenAIServer = lambda _arguments, **_settings: SharedServer(os.environ["TEST_MODEL"])
    utils.setup_server = _setup_server
    utils.setup_fastapi_app = lambda server, **_settings: server
    _module("fastapi.testclient").TestClient = _test_client


class _ModelControlMode:
    NONE = "none"
    EXPLICIT = "explicit"


def _setup_server(model_repository: str, *_settings: object, **_more: object) -> SharedServer:
    directory = Path(model_repository).name
    return SharedServer(_MODELS_OF_REPOSITORIES.get(directory, os.environ["TEST_MODEL"]))


def _test_client(app: SharedServer) -> httpx2.Client:
    return httpx2.Client(base_url=app.url_root, timeout=_TIMEOUT_S)


def _module(name: str) -> Any:
    made = ModuleType(name)
    sys.modules[name] = made
    return made
