"""Server-sent events of `generate_stream`, each decoded on arrival; for load tests see `sse_load`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import requests

from naiad_client import ServerError

_TIMEOUT_S = 600


def sse_events(session: requests.Session, url: str, model: str, text: str, max_tokens: int) -> Iterator[Any]:
    """Ask a text model for exactly `max_tokens` tokens and yield the decoded events of its answer.

    Args:
        session: keeps the connection.
        url: HOST:PORT of the server's HTTP endpoint.
        model: a text model.
        text: the prompt.
        max_tokens: number of tokens of the answer.

    Raises:
        ServerError: the server answered with an error.
        requests.RequestException: the connection broke.
    """
    body: dict[str, Any] = {
        "text_input": text,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "return_num_output_tokens": True,
    }
    address = f"http://{url}/v2/models/{model}/generate_stream"
    with session.post(address, json=body, stream=True, timeout=_TIMEOUT_S) as answer:
        for line in answer.iter_lines():
            if not line:
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise ServerError(event["error"])
            yield event
