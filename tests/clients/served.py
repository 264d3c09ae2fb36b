"""The server that the clients ask, and how they are run."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.environments import offline
from helpers.server import Server, eventually

PROGRAMS = Path(__file__).parent / "programs"
_LONGEST_S = 900
_TAIL_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Served:
    """A server with one model.

    Attributes:
        server: the server.
        model_dir: the checkpoint; the name of its directory is that of the model.
    """

    server: Server
    model_dir: Path

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.model_dir.name

    @property
    def root(self) -> str:
        """URL of the API without /v1."""
        return self.server.openai.removesuffix("/v1")

    def run(self, *command: Path | str, without: Sequence[str] = (), folder: Path | None = None) -> str:
        """Run a client, which reaches no other host; return what it prints.

        Args:
            command: the program and its arguments.
            without: variables that its process does not get.
            folder: its working directory.
        """
        variables = offline() | {
            "NAIAD_URL": self.server.openai,
            "NAIAD_METRICS": f"http://{self.server.metrics}",
            "NAIAD_MODEL": self.model,
        }
        done = subprocess.run(
            [str(part) for part in command],
            env={name: text for name, text in variables.items() if name not in without},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            timeout=_LONGEST_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-_TAIL_CHARS:]
        return done.stdout

    def expect_idle(self) -> None:
        """Wait until the engine has no request and no block of its KV cache is in use."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        eventually(lambda: not any(map(self.server.metric, names)))
        eventually(lambda: self.server.used_blocks() == 0)
