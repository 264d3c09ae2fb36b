"""Starts `naiad serve` from a test suite's own environment, which has nothing of Naiad."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence

from perf.suites import variables

_READY = re.compile(r"ready: .* openai=(http://\S+)/v1")
_STOP_TIMEOUT_S = 60
_TRANSLATED = {"--no-enable-prefix-caching": ("--enable-prefix-caching", "false")}


class ServedModel:
    """A running `naiad serve` with one model."""

    def __init__(self, name: str, checkpoint: str, options: Sequence[str] = ()) -> None:
        """Start it and wait until it is ready.

        Args:
            name: what its clients call the model.
            checkpoint: the model's directory.
            options: further options of `naiad serve`.

        Raises:
            RuntimeError: it ended before it was ready; the message has its last lines.
        """
        command = [*json.loads(os.environ[variables.COMMAND]), "--model", checkpoint, "--served-name", name]
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--openai-port", "0")
        # Nothing of the suite's environment may reach Naiad's, which is another Python.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        self._process = subprocess.Popen(
            [*command, *options, *ports],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.name = name
        self.root = self._wait_until_ready()

    def stop(self) -> None:
        """Stop it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _wait_until_ready(self) -> str:
        last_lines: deque[str] = deque(maxlen=20)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            last_lines.append(line)
            if match := _READY.search(line):
                # A full pipe would block the server.
                threading.Thread(target=deque, args=(self._process.stdout, 0), daemon=True).start()
                return match[1]
        raise RuntimeError("naiad serve ended before it was ready:\n" + "".join(last_lines))


def options_of_vllm(arguments: Sequence[str]) -> list[str]:
    """Translate the options of `vllm serve` that Naiad has too; the others are left out."""
    return [option for argument in arguments for option in _TRANSLATED.get(argument, ())]
