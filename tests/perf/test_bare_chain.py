from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from perf.server.bare_chain import SinkModel, source_model, write_bare_chain
from tritonclient.grpc.model_config_pb2 import ModelConfig

FINAL = 1


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        Tensor=lambda name, values: (name, values.tolist()),
        InferenceResponse=lambda tensors: tensors,
        get_input_tensor_by_name=lambda request, name: SimpleNamespace(as_numpy=lambda: request[name]),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)


class Request(dict[str, Any]):
    def __init__(self, num_tokens: int) -> None:
        super().__init__(max_tokens=np.array([num_tokens], dtype=np.int32))
        self.sent: list[tuple[Any, int]] = []
        self.is_done = threading.Event()

    def get_response_sender(self) -> Any:
        return self

    def send(self, response: Any, flags: int) -> None:
        self.sent.append((response, flags))
        if flags:
            self.is_done.set()


def test_each_token_is_a_response_and_the_last_is_final() -> None:
    requests = [Request(3), Request(1)]
    source_model(1000)().execute(requests)
    for request in requests:
        assert request.is_done.wait(10)
    assert requests[0].sent == [
        ([("token_id", [0])], 0),
        ([("token_id", [1])], 0),
        ([("token_id", [2])], FINAL),
    ]
    assert requests[1].sent == [([("token_id", [0])], FINAL)]


def test_each_token_gets_a_text() -> None:
    requests = [Request(1), Request(1)]
    SinkModel().execute(requests)
    assert [request.sent for request in requests] == [[([("text_output", [b" word"])], FINAL)]] * 2


def test_the_chain_passes_two_models(tmp_path: Path) -> None:
    write_bare_chain(tmp_path, 100)
    configs = {
        path.parent.name: text_format.Parse(path.read_text(), ModelConfig())
        for path in tmp_path.glob("*/config.pbtxt")
    }
    assert {name: config.name for name, config in configs.items()} == {name: name for name in configs}
    chain = configs.pop("bare_ensemble")
    assert {step.model_name for step in chain.ensemble_scheduling.step} == set(configs)
    assert all(config.model_transaction_policy.decoupled for config in configs.values())
    assert all((tmp_path / name / "1" / "model.py").is_file() for name in configs)
