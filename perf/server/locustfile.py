"""Locust users that stream from a Naiad server, with time to first token and times between tokens.

    locust -f perf/server/locustfile.py --grpc-url HOST:PORT --http-url HOST:PORT [GrpcUser] [SseUser]

Each answer fires events of its protocol: `ttft` once, `itl` for each token but the first, and `request`,
whose time is that of the whole answer and whose content size is its number of tokens. The loop is closed:
a user sends its next request when the last one has ended, so requests that would have waited for a slow
server are not counted; `perf.server.replay` counts them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import requests
from grpc.experimental import gevent as grpc_gevent
from locust import LoadTestShape, User, events, task
from perf.common.token_times import TokenTimes
from perf.common.word_prompts import word_text
from perf.server.load_shapes import users_at
from perf.server.sse import sse_events

from naiad_client import Client, ServerError

# Without this, one waiting user would block all others in gRPC.
grpc_gevent.init_gevent()

_PAUSE_AFTER_ERROR_S = 1.0
_draw = random.SystemRandom()


@events.init_command_line_parser.add_listener
def add_arguments(parser: Any) -> None:
    """Add our options to Locust's command line and web page."""
    group = parser.add_argument_group("Naiad")
    add = group.add_argument
    add("--grpc-url", default="127.0.0.1:8001", metavar="HOST:PORT", help="of GrpcUser")
    add("--http-url", default="127.0.0.1:8000", metavar="HOST:PORT", help="of SseUser")
    add("--model", default="ensemble", help="a text model")
    add("--prompt-words", type=int, default=64, metavar="N", help="words of a prompt; about as many tokens")
    add("--max-tokens", type=int, default=32, metavar="N", help="exact number of tokens of each answer")
    add(
        "--shape",
        choices=("steady", "ramp"),
        default="steady",
        help="start users all at once, or in 4 steps over --run-time",
    )


class Shape(LoadTestShape):
    """`--users` from the start (steady), or another quarter of them in each quarter of `--run-time`."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Return the current number of users and how many may start per second; None ends the run."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        run_time_s = options.run_time or float("inf")
        users = users_at(self.get_run_time(), run_time_s, options.num_users or 1, options.shape)
        return None if users is None else (users, users)


class StreamUser(User):
    """Repeatedly asks for streamed answers; subclasses implement the protocol."""

    abstract = True
    protocol = ""

    def num_tokens_of_chunks(self, prompt: str, max_tokens: int) -> Iterator[int]:
        """Send a request and yield the number of new tokens in each response."""
        raise NotImplementedError

    @task
    def ask(self) -> None:
        """Send one request and fire its events."""
        options = self.environment.parsed_options
        prompt = word_text(options.prompt_words, _draw)
        times = TokenTimes()
        error: Exception | None = None
        start_s = time.perf_counter()
        try:
            for num_tokens in self.num_tokens_of_chunks(prompt, options.max_tokens):
                is_first = times.first_s is None
                gaps_s = times.take(num_tokens, time.perf_counter() - start_s)
                if is_first and times.first_s is not None:
                    self._fire("ttft", times.first_s)
                for gap_s in gaps_s:
                    self._fire("itl", gap_s)
            if times.num_tokens != options.max_tokens:
                error = ValueError(f"{times.num_tokens} tokens instead of {options.max_tokens}")
        except (ServerError, requests.RequestException) as failure:
            error = failure
        self._fire("request", time.perf_counter() - start_s, times.num_tokens, error)
        if error is not None:
            time.sleep(_PAUSE_AFTER_ERROR_S)

    def _fire(self, name: str, seconds: float, length: int = 0, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=self.protocol,
            name=name,
            response_time=1000 * seconds,
            response_length=length,
            exception=error,
            context={},
        )


class GrpcUser(StreamUser):
    """Streams over gRPC, on a connection of its own."""

    protocol = "grpc"

    def on_start(self) -> None:
        """Connect."""
        options = self.environment.parsed_options
        self._client = Client(options.grpc_url, model=options.model)

    def on_stop(self) -> None:
        """Disconnect."""
        self._client.close()

    def num_tokens_of_chunks(self, prompt: str, max_tokens: int) -> Iterator[int]:
        """The chunks of a `ModelStreamInfer` call."""
        with self._client.generate(prompt, max_tokens=max_tokens, ignore_eos=True) as chunks:
            for chunk in chunks:
                yield chunk.num_output_tokens


class SseUser(StreamUser):
    """Streams over HTTP: server-sent events of `generate_stream`."""

    protocol = "sse"

    def on_start(self) -> None:
        """Open a connection that is kept."""
        self._session = requests.Session()

    def on_stop(self) -> None:
        """Disconnect."""
        self._session.close()

    def num_tokens_of_chunks(self, prompt: str, max_tokens: int) -> Iterator[int]:
        """The events of a `generate_stream`."""
        options = self.environment.parsed_options
        for event in sse_events(self._session, options.http_url, options.model, prompt, max_tokens):
            yield event.get("num_output_tokens", 0)
