"""Clients that leave are no fault of the server."""

from __future__ import annotations

import json
import logging
import urllib.request
from pathlib import Path

import pytest
from aiohttp import ClientConnectionResetError

from helpers.scripted_model import scripted_model
from naiad.openai_server.streams import EventStream


def test_a_client_that_leaves_before_the_head_of_its_stream_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_opened = 0

    async def leave(_stream: EventStream) -> None:
        nonlocal num_opened
        num_opened += 1
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(EventStream, "open", leave)
    body = {"model": "first", "prompt": "a", "stream": True}
    with scripted_model(tmp_path) as script, caplog.at_level(logging.INFO):
        script.texts = ["b"]
        request = urllib.request.Request(
            f"{script.openai}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert (answer.status, answer.read()) == (200, b"")
    assert num_opened == 1
    assert "failed" not in caplog.text
