"""Clients that ask a proxy for completions, and go on asking."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import string
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.openai_api import COMPLETIONS, MODEL

SESSION = "x-session-id"


@dataclass
class Answer:
    """What a client got.

    Attributes:
        began_s, first_s, ended_s: when it was sent, when its first bytes came and when it ended.
        status: of HTTP; 0: there was no answer.
        is_whole: it ended as it should.
        usage: the numbers of tokens.
        error: what went wrong.
    """

    began_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    is_whole: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def cached(self) -> int:
        """Number of prompt tokens that came from the prefix cache."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def random_text(seed: str, num_chars: int) -> str:
    """A text that begins like no other one; routers send texts that begin alike to one replica."""
    return "".join(random.Random(seed).choices(string.ascii_lowercase + " ", k=num_chars))


def complete(address: str, prompt: str, *, session: str = "", **fields: Any) -> Answer:
    """Ask for a completion, streamed if `stream` says so."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **fields}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    headers = {"Content-Type": "application/json"} | ({SESSION: session} if session else {})
    answer = Answer(time.monotonic())
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        connection.request("POST", COMPLETIONS, json.dumps(body), headers)
        response = connection.getresponse()
        answer.status = response.status
        read = response.read1()
        answer.first_s = time.monotonic()
        while more := response.read1():
            read += more
        _take(answer, read, is_stream=bool(body.get("stream")))
    except (OSError, http.client.HTTPException) as error:
        answer.error = repr(error)
    finally:
        answer.ended_s = time.monotonic()
        connection.close()
    return answer


@contextlib.contextmanager
def endless(address: str, number: int) -> Iterator[None]:
    """Keep so many streams, which are cancelled at the end."""
    body = {"model": MODEL, "prompt": "Story", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(address)))
            connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        yield


def _take(answer: Answer, read: bytes, *, is_stream: bool) -> None:
    if answer.status != 200:
        answer.error = read.decode(errors="replace")[:500]
    elif is_stream:
        events = [
            event.removeprefix(b"data: ") for event in read.split(b"\n\n") if event.startswith(b"data: ")
        ]
        answer.is_whole = events[-1:] == [b"[DONE]"]
        whole = [json.loads(event) for event in events if event != b"[DONE]"]
        answer.usage = next((event["usage"] for event in reversed(whole) if event.get("usage")), {})
        answer.error = next((str(event["error"]) for event in whole if "error" in event), "")
        if not answer.is_whole and not answer.error:
            answer.error = "the stream broke off"
    else:
        answer.usage, answer.is_whole = json.loads(read)["usage"], True


class Load:
    """Clients that each ask, one request after the other, until they are told to stop.

    Every second request is a stream.
    """

    def __init__(
        self, address: str, num_clients: int, *, max_tokens: int, only_streams: bool = False
    ) -> None:
        """Begin."""
        self.answers: list[Answer] = []
        self._over = threading.Event()
        self._address = address
        self._fields = {"max_tokens": max_tokens}
        self._only_streams = only_streams
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            is_stream = self._only_streams or turn % 2 == 0
            prompt = random_text(f"client {number}, turn {turn}", 40)
            self.answers.append(complete(self._address, prompt, stream=is_stream, **self._fields))

    def __enter__(self) -> Load:
        """Go on."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the last requests end."""
        self._over.set()
        for thread in self._threads:
            thread.join()


def failed(answers: Sequence[Answer]) -> list[Answer]:
    """Those that did not end as they should."""
    return [answer for answer in answers if not answer.is_whole]
