"""Two Python models and an ensemble that do nothing but stream: what Triton itself takes for a token.

`write_bare_chain` adds them to a repository; `bare_generate` asks them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from perf.server.load import PROTOCOLS
from perf.server.serve_process import Served

from naiad.cli.bench.throughput import Prompts, check_counts

_SOURCE, _SINK, CHAIN = "bare_llm", "bare_detokenizer", "bare_ensemble"
_CONFIG_OF_PYTHON = """name: "{name}"
backend: "python"
model_transaction_policy {{ decoupled: true }}
input [ {{ name: "{taken}", data_type: TYPE_INT32, dims: [1] }} ]
output [ {{ name: "{given}", data_type: {datatype}, dims: [1] }} ]
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
"""
_CONFIG_OF_CHAIN = f"""name: "{CHAIN}"
platform: "ensemble"
input [ {{ name: "max_tokens", data_type: TYPE_INT32, dims: [1] }} ]
output [ {{ name: "text_output", data_type: TYPE_STRING, dims: [1] }} ]
ensemble_scheduling {{
  step [
    {{
      model_name: "{_SOURCE}"
      model_version: -1
      input_map {{ key: "max_tokens" value: "max_tokens" }}
      output_map {{ key: "token_id" value: "token_id" }}
    }},
    {{
      model_name: "{_SINK}"
      model_version: -1
      input_map {{ key: "token_id" value: "token_id" }}
      output_map {{ key: "text_output" value: "text_output" }}
    }}
  ]
}}
"""
_MODEL_OF_SOURCE = """from perf.server.bare_chain import source_model

TritonPythonModel = source_model({tokens_per_s})
"""
_MODEL_OF_SINK = "from perf.server.bare_chain import SinkModel as TritonPythonModel\n"


def write_bare_chain(repository: Path, tokens_per_s: float) -> None:
    """Add the models to a repository whose server imports `perf`.

    Args:
        repository: its folder.
        tokens_per_s: the rate of each stream.
    """
    source = _CONFIG_OF_PYTHON.format(
        name=_SOURCE, taken="max_tokens", given="token_id", datatype="TYPE_INT32"
    )
    sink = _CONFIG_OF_PYTHON.format(name=_SINK, taken="token_id", given="text_output", datatype="TYPE_STRING")
    _write(repository / _SOURCE, source, _MODEL_OF_SOURCE.format(tokens_per_s=tokens_per_s))
    _write(repository / _SINK, sink, _MODEL_OF_SINK)
    _write(repository / CHAIN, _CONFIG_OF_CHAIN, "")


def bare_generate(server: Served, protocol: str) -> Callable[[Prompts, int], object]:
    """Make a function (prompts, number of new tokens) that streams as many tokens for each prompt.

    Args:
        server: of a repository with the models.
        protocol: one of `PROTOCOLS`.
    """
    answers = PROTOCOLS[protocol]

    def generate(prompts: Prompts, num_tokens: int) -> None:
        asked = [{"max_tokens": np.array([num_tokens], dtype=np.int32)} for _ in prompts]
        check_counts(answers(server, CHAIN, asked, "text_output"), num_tokens)

    return generate


def source_model(tokens_per_s: float) -> type:
    """Make a decoupled model that answers a request by so many responses, evenly spaced."""

    class SourceModel:
        """One thread for each request."""

        def execute(self, requests: list[Any]) -> None:
            """Begin to answer."""
            import triton_python_backend_utils as triton

            for request in requests:
                num_tokens = int(triton.get_input_tensor_by_name(request, "max_tokens").as_numpy()[0])
                sender = request.get_response_sender()
                threading.Thread(target=self._answer, args=(triton, sender, num_tokens)).start()

        def _answer(self, triton: Any, sender: Any, num_tokens: int) -> None:
            due_s = time.monotonic()
            for number in range(num_tokens):
                due_s += 1 / tokens_per_s
                time.sleep(max(0.0, due_s - time.monotonic()))
                tensor = triton.Tensor("token_id", np.array([number], dtype=np.int32))
                is_last = number + 1 == num_tokens
                flags = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
                sender.send(triton.InferenceResponse([tensor]), flags=flags)

    return SourceModel


class SinkModel:
    """A decoupled model, as the detokenizer is, that answers each token by the same text."""

    def execute(self, requests: list[Any]) -> None:
        """Answer."""
        import triton_python_backend_utils as triton

        for request in requests:
            text = triton.Tensor("text_output", np.array([b" word"], dtype=np.object_))
            sender = request.get_response_sender()
            sender.send(triton.InferenceResponse([text]), flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _write(model: Path, config: str, code: str) -> None:
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config)
    if code:
        (model / "1" / "model.py").write_text(code)
