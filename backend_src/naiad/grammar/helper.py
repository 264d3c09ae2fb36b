"""Compiles each grammar in a process of its own first, which has limits of memory and time.

A thread that compiles cannot be ended, and a grammar of some hundred bytes may keep it busy for ever. What
the helper survives is compiled once more where it is used.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec

from naiad.errors import InvalidRequestError
from naiad.frames import FrameBuffer, frame
from naiad.grammar import limits
from naiad.grammar.compiling import compile_text
from naiad.grammar.vocabulary import Vocabulary
from naiad.sequence import GrammarSpec

_PROGRAM = ("-m", "naiad.grammar.helper")
_NICENESS = 5


class _Settings(msgspec.Struct, frozen=True):
    """What a helper is started with; `work_s` is for each grammar."""

    vocabulary: Vocabulary
    work_s: int
    memory_bytes: int


class _Result(msgspec.Struct, frozen=True):
    """The grammar in llguidance's form, or why it is refused."""

    text: str = ""
    error: str = ""


class Helper:
    """A process that compiles one grammar after the other. It is started when it is needed."""

    def __init__(self, vocabulary: Vocabulary, work_s: int) -> None:
        """Set up.

        Args:
            vocabulary: the tokens.
            work_s: seconds of a core's time that a grammar may take.
        """
        self._settings = _Settings(vocabulary, work_s, limits.HELPER_MEMORY_BYTES)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def translate(self, spec: GrammarSpec) -> str:
        """Translate a grammar into llguidance's form, if it compiles within the limits.

        Raises:
            ValueError: the grammar is refused; the message says why.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                # It has ended by itself since the last grammar, of which this one knows nothing.
                self._end()
            answer = self._answer_or_refusal(frame(msgspec.json.encode(spec)))
        result = msgspec.json.decode(answer, type=_Result)
        if result.error:
            raise ValueError(result.error)
        return result.text

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _answer_or_refusal(self, job: bytes, *, may_repeat: bool = True) -> bytes:
        try:
            return self._answer(job)
        except TimeoutError:
            self._end()
            raise ValueError(f"it does not compile within {limits.HELPER_TIMEOUT_S:g} s") from None
        except OSError:
            # No limit ends a process so: it was killed, and perhaps still ending when the job came.
            if self._end() == -signal.SIGKILL and may_repeat:
                return self._answer_or_refusal(job, may_repeat=False)
            work_s, most = self._settings.work_s, self._settings.memory_bytes >> 20
            raise ValueError(
                f"it does not compile within {work_s} s of work and {most} MiB of memory"
            ) from None

    def _answer(self, job: bytes) -> bytes:
        """Send a job and wait for the answer.

        Raises:
            TimeoutError: there is none in time.
            OSError: the process did not survive the job.
        """
        deadline_s = time.monotonic() + limits.HELPER_TIMEOUT_S
        connection = self._connected()
        connection.settimeout(limits.HELPER_TIMEOUT_S)
        connection.sendall(job)
        frames = FrameBuffer()
        bodies: list[bytes] | None = []
        while not bodies:
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            bodies = frames.receive(connection)
            if bodies is None:
                raise ConnectionResetError
        return bodies[0]

    def _connected(self) -> socket.socket:
        if self._socket is None:
            here, there = socket.socketpair()
            with there:
                self._process = subprocess.Popen(
                    [sys.executable, *_PROGRAM, str(there.fileno()), msgspec.json.encode(self._settings)],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            self._socket = here
        return self._socket

    def _end(self) -> int | None:
        """End the process, and return its return code; None: there was none."""
        code = None
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            code = self._process.wait()
        self._socket = self._process = None
        return code


def main() -> None:
    """Answer jobs until the other end of the socket is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = msgspec.json.decode(sys.argv[2], type=_Settings)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    tokens = settings.vocabulary.load()
    most = _address_space_bytes() + settings.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    frames = FrameBuffer()
    while (bodies := frames.receive(connection)) is not None:
        for body in bodies:
            _allow_work(settings.work_s)
            spec = msgspec.json.decode(body, type=GrammarSpec)
            try:
                text, _ = compile_text(spec, tokens)
                result = _Result(text=text)
            except (ValueError, InvalidRequestError) as error:
                result = _Result(error=str(error))
            connection.sendall(frame(msgspec.json.encode(result)))


def _address_space_bytes() -> int:
    """The size of this process's address space, most of which is only reserved."""
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[0]) * resource.getpagesize()


def _allow_work(num_seconds: int) -> None:
    """Let the kernel end this process when it has worked for so many more seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + 1 + num_seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (end, hard))


if __name__ == "__main__":
    main()
