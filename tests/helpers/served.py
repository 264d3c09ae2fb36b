"""Sends a request by any of the clients' protocols, and returns its answer in one form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.raw_grpc import Outcome, ask
from helpers.server import Server

# A gRPC stream, and the two HTTP endpoints; `generate` has one answer, the others stream.
WAYS = ("grpc", "generate", "generate_stream")

_NAMES_OF_LLM = {
    "max_tokens": "request_output_len",
    "stream": "streaming",
    "top_k": "runtime_top_k",
    **{name: f"runtime_{name}" for name in ("top_p", "top_p_decay", "top_p_min", "top_p_reset_ids")},
    "length_penalty": "len_penalty",
}


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        pieces: for each response, output name → its values, flattened; text as str.
        error: the error message; "" if there was no error.
    """

    pieces: list[dict[str, list[Any]]]
    error: str = ""

    def all(self, name: str) -> list[Any]:
        """The values of all responses, in order."""
        return [value for piece in self.pieces for value in piece.get(name, [])]

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self.all("text_output"))

    @property
    def token_ids(self) -> list[int]:
        """All `output_ids`."""
        return self.all("output_ids")

    def end(self, name: str) -> Any:
        """The last value of an output."""
        return self.all(name)[-1]


def served(server: Server, way: str, prompt: str | list[int], timeout: int = 0, **fields: Any) -> Answer:
    """Send a request that must succeed; return its answer.

    Args:
        server: the server.
        way: one of `WAYS`.
        prompt: a text for `ensemble`, or ids for `llm`.
        timeout: deadline in µs; 0 = none.
        fields: fields by the names of `ensemble`; the default of max_tokens is 8.
    """
    answer = ask_by(server, way, prompt, timeout, **fields)
    assert answer.error == ""
    return answer


def ask_by(server: Server, way: str, prompt: str | list[int], timeout: int = 0, **fields: Any) -> Answer:
    """Like `served`, but the request may be refused."""
    model = "ensemble" if isinstance(prompt, str) else "llm"
    begin: dict[str, Any] = {"max_tokens": 8, "stream": way != "generate", "exclude_input_in_output": True}
    inputs = begin | fields
    if isinstance(prompt, str):
        inputs = {"text_input": prompt} | inputs
    else:
        inputs = {_NAMES_OF_LLM.get(name, name): value for name, value in inputs.items()}
        inputs |= {"input_ids": prompt, "input_lengths": len(prompt)}
    if way != "grpc":
        return _ask_http(
            server, f"/v2/models/{model}/{way}", inputs | ({"timeout": timeout} if timeout else {})
        )
    if "seed" in inputs:
        inputs["seed"] = np.array([[inputs["seed"]]], dtype=np.uint64)
    return as_answer(ask(server.grpc, model, inputs, **({"timeout": timeout} if timeout else {})))


def as_answer(outcome: Outcome) -> Answer:
    """The answer of a gRPC stream, which must have exactly one FINAL."""
    assert (outcome.num_finals, outcome.call_error) == (1, "")
    pieces = [{name: _flat(array) for name, array in response.items()} for response in outcome.responses]
    return Answer(pieces, "; ".join(outcome.errors))


def _flat(array: Any) -> list[Any]:
    values = array.reshape(-1).tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def _ask_http(server: Server, path: str, body: dict[str, Any]) -> Answer:
    status, text = server.post(path, body)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    events = [json.loads(line) for line in lines]
    errors = [event.pop("error") for event in events if "error" in event]
    assert (status == 200) == (errors == []), text
    pieces = [
        {name: value if isinstance(value, list) else [value] for name, value in event.items()}
        for event in events
        if event
    ]
    return Answer(pieces, "; ".join(errors))
