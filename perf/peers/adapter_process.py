"""An engine in a process of its own, which is asked through its adapter; see `adapters/protocol.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from perf.server.open_loop import Arrival

from naiad.errors import InternalError

_LIMIT_S = 900.0
_QUIT_S = 20.0
_ERROR_LINES = 3


@dataclass(frozen=True, slots=True)
class Pass:
    """The result of one pass: the new ids of each prompt, and the seconds it took."""

    tokens: list[list[int]]
    seconds: float


@dataclass(frozen=True, slots=True)
class Decoded:
    """The time in which all sequences of a pass generated.

    Attributes:
        first_s: seconds until all had their first tokens.
        num_tokens, seconds: new tokens of all sequences from then until the first of them ended, and how long
            that took; 0 if one had ended before.
    """

    first_s: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Served:
    """How requests were served.

    Attributes:
        first_s, last_s: seconds from when each was due to its first and to its last token.
        num_tokens: new tokens of each.
    """

    first_s: list[float]
    last_s: list[float]
    num_tokens: list[int]

    @property
    def inter_token_s(self) -> list[float]:
        """The mean seconds from token to token of each request that has several; [0.0] if none has."""
        listed = zip(self.first_s, self.last_s, self.num_tokens, strict=True)
        return [(last - first) / (num - 1) for first, last, num in listed if num > 1] or [0.0]

    @staticmethod
    def joined(parts: Sequence[Served]) -> Served:
        """The requests of all parts."""
        return Served(
            [value for part in parts for value in part.first_s],
            [value for part in parts for value in part.last_s],
            [value for part in parts for value in part.num_tokens],
        )


class AdapterProcess:
    """A started adapter. Its process group is stopped while others are measured."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        """Start it; what it says on stderr goes to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self.start_s = time.perf_counter()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                list(command),
                env=dict(variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def load(self, **task: Any) -> dict[str, str]:
        """Load the model; return the versions of the engine's packages."""
        versions: dict[str, str] = self._ask({"op": "load", **task})["versions"]
        return versions

    def run(self, prompts: list[list[int]], new_tokens: int) -> Pass:
        """Generate greedily.

        Raises:
            InternalError: the adapter ended, or a sequence has another number of tokens.
        """
        answer = self._ask({"op": "run", "prompts": prompts, "new_tokens": new_tokens})
        lengths = [len(ids) for ids in answer["tokens"]]
        if lengths != [new_tokens] * len(prompts):
            raise InternalError(
                f"the sequences have {lengths} tokens instead of {new_tokens} for each of {len(prompts)}"
            )
        return Pass(answer["tokens"], answer["seconds"])

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Decoded:
        """Generate greedily, and time the steps in which all sequences generate.

        Raises:
            InternalError: the adapter ended.
        """
        return Decoded(**self._ask({"op": "decode", "prompts": prompts, "new_tokens": new_tokens}))

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        """Serve greedy requests that come when they are due.

        Raises:
            InternalError: the adapter ended, or a request has another number of tokens.
        """
        listed = [
            {"due_s": each.due_s, "prompt": each.prompt_token_ids, "new_tokens": each.num_tokens}
            for each in arrivals
        ]
        answer = self._ask({"op": "serve", "arrivals": listed})
        expected = [each.num_tokens for each in arrivals]
        if answer["num_tokens"] != expected:
            raise InternalError(f"the requests have {answer['num_tokens']} tokens instead of {expected}")
        return Served(answer["first_s"], answer["last_s"], expected)

    def pause(self) -> None:
        """Stop the process group, so that no idle thread takes time from others."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process group go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def peak_bytes(self) -> int:
        """The largest resident memory, summed over the process and its children."""
        root = psutil.Process(self._process.pid)
        return sum(_peak_bytes(each.pid) for each in (root, *root.children(recursive=True)))

    def share_bytes(self) -> int:
        """The present proportional memory (PSS), summed over the process and its children."""
        root = psutil.Process(self._process.pid)
        return sum(each.memory_full_info().pss for each in (root, *root.children(recursive=True)))

    def close(self) -> None:
        """End the process, by force if it does not end."""
        if self._process.poll() is None:
            self.resume()
            try:
                self._ask({"op": "quit"})
                self._process.wait(_QUIT_S)
            except (InternalError, subprocess.TimeoutExpired):
                pass
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(_LIMIT_S, os.killpg, (self._process.pid, signal.SIGKILL))
        watch.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-_ERROR_LINES:]
            raise InternalError(
                f"the adapter ended with {self._process.wait()} at {request['op']}: {' | '.join(said)}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
