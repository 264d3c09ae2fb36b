"""A server's counters beside what it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from perf.server import load
from perf.server.load import CountedTokens

from naiad.errors import InternalError


class _Counters:
    """A server's metrics, which show what is counted at the second look."""

    def __init__(self) -> None:
        self.shown = self.counted = (5, 7)
        self.num_looks = 0

    def look(self) -> str:
        shown, self.shown = self.shown, self.counted
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        self.num_looks += 1
        return "".join(f'{name}{{model="llm"}} {value}\n' for name, value in zip(names, shown, strict=True))


@pytest.fixture
def counters() -> _Counters:
    return _Counters()


@pytest.fixture
def server(counters: _Counters) -> Iterator[Any]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(counters.look().encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listener = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=listener.serve_forever, daemon=True).start()
    yield SimpleNamespace(metrics=f"127.0.0.1:{listener.server_port}")
    listener.shutdown()
    listener.server_close()


def test_what_is_counted_late_is_waited_for_after_the_calls_and_not_in_them(
    server: Any, counters: _Counters
) -> None:
    counted = CountedTokens(server)
    generate = counted.of(lambda prompts, num_tokens: len(prompts) * num_tokens)
    assert generate([[1, 2], [3]], 4) == 8
    assert counters.num_looks == 1
    counters.counted = (5 + 3, 7 + 8)
    counted.check()
    assert counters.num_looks > 2


@pytest.mark.parametrize("more", [(3, 7), (3, 9), (2, 8)])
def test_fewer_or_more_tokens_than_were_asked_for_are_an_error(
    server: Any, counters: _Counters, more: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_COUNTED_AFTER_S", 0.1)
    counted = CountedTokens(server)
    counted.of(lambda _prompts, _num_tokens: None)([[1, 2], [3]], 4)
    counters.counted = (5 + more[0], 7 + more[1])
    with pytest.raises(InternalError, match=r"expected \[8\.0, 15\.0\]"):
        counted.check()
