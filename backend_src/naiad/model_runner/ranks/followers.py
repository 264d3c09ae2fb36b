"""`Followers`: the other ranks of a split model, as the first one sees them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.errors import InternalError, StartupError
from naiad.model_runner.channel import Channel
from naiad.model_runner.ranks.messages import (
    ComputeLogits,
    Failed,
    RankMessage,
    StartRank,
    answer_decoder,
    encoder,
)
from naiad.models import DecoderModel, FamilyModel, ForwardBatch
from naiad.models.native_stage import NativeStage
from naiad.models.registry import load_part
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup
from naiad.models.split.staged_model import StagedModel, TorchStage
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.library import Team
from naiad_kernels.store_kv import LayerCache

_LOG = logging.getLogger(__name__)
# That of an engine process that has failed.
_EXIT_CODE = 4
_END_S = 10.0
# The end of a rank is noticed much sooner.
_NOTICE_S = 1.0


def _ending(code: int) -> str:
    """How a process has ended, by its return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:  # not every signal has a name
        return f"signal {-code}"


class Followers:
    """The processes of all ranks but the first; they are told what to compute.

    This process ends as soon as one of them has ended: a model that lacks a part computes nothing, and the
    others would wait for it forever.

    Attributes:
        group: what the ranks exchange tensors by.
        num_parts: number of ranks of the first stage.
        staged: this process's stage; None before `load`, and if there is one stage only.
    """

    def __init__(self, config: EngineConfig, place: Place, device: torch.device, is_native: bool) -> None:
        """Start the processes and meet them; all load their parts from now on.

        Args:
            config: the engine's configuration.
            place: the first rank's.
            device: the first rank's.
            is_native: native kernels compute the steps.
        """
        self.num_parts = place.part.size
        self.staged: StagedModel | None = None
        self._place = place
        self._part: FamilyModel | None = None
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        try:
            with tempfile.TemporaryDirectory(prefix="naiad-ranks-") as directory:
                store = Path(directory) / "store"
                for rank in range(1, place.num_ranks):
                    self._start(StartRank(config, rank, str(store), is_native))
                with self.computing():
                    self.group = RankGroup(place, store, device)
        except BaseException:
            self._end(0)
            raise

    def _start(self, message: StartRank) -> None:
        here, there = socket.socketpair()
        with there:
            process = subprocess.Popen(
                [sys.executable, "-m", "naiad.model_runner.ranks", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        self._processes.append(process)
        self._channels.append(Channel(here))
        call_at_end(process, partial(self._rank_has_ended, message.rank))
        self._channels[-1].send(encoder.encode(message))

    def _rank_has_ended(self, rank: int, code: int) -> None:
        if not self._is_closing:
            what = f"rank {rank} of the model has ended ({_ending(code)})"
            _LOG.error("%s, so the engine ends and is started again", what)
            os._exit(_EXIT_CODE)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around what the ranks compute together: if a rank has ended, that is reported, not the failure."""
        try:
            yield
        except StartupError:
            raise
        except Exception:
            if not self._is_closing:
                _LOG.debug("the ranks can not go on", exc_info=True)
                # Whoever watches the rank that has ended ends this process meanwhile.
                time.sleep(_NOTICE_S)
            raise

    def load(self, directory: str, config: ModelConfig, options: LoadOptions) -> DecoderModel:
        """Load the first rank's part, while the others load theirs.

        Args:
            directory: the checkpoint's directory.
            config: the configuration of the whole model.
            options: of the first rank.

        Returns:
            The part, joined with the others.

        Raises:
            StartupError: a rank could not load its part. All have ended.
        """
        try:
            with self.computing():
                part = load_part(directory, config, options, self._place, self.group)
                self._wait_until_loaded()
        except BaseException:
            self.close()
            raise
        if self._place.stage.count > 1:
            layers = TorchStage(part, self._place.stage, options.dtype)
            self.staged = StagedModel(layers, self._place, self.group)
        self._part = part
        return LeadModel(part, self)

    def record(self, caches: Sequence[LayerCache], dtype: torch.dtype, team: Team) -> None:
        """Let native kernels compute the first rank's stage from now on; the other ranks record theirs.

        Args:
            caches: of the stage's layers; no others can be used later.
            dtype: in which the model computes.
            team: computes the steps.
        """
        assert self._part is not None, "the part is not loaded yet"
        layers = NativeStage(self._part, self._place.stage, caches, dtype, team)
        self.staged = StagedModel(layers, self._place, self.group)

    def _wait_until_loaded(self) -> None:
        for channel in self._channels:
            answer = answer_decoder.decode(channel.receive())
            if isinstance(answer, Failed):
                raise StartupError(answer.message)

    def tell(self, message: RankMessage) -> None:
        """Send a message to every rank that has to do with it: those of later stages have no head.

        Raises:
            InternalError: a rank is gone.
        """
        body = encoder.encode(message)
        num_told = self.num_parts - 1 if isinstance(message, ComputeLogits) else len(self._channels)
        with self.computing():
            try:
                for channel in self._channels[:num_told]:
                    channel.send(body)
            except OSError as error:
                raise InternalError("a rank of the model has ended") from error

    def close(self) -> None:
        """End the processes."""
        self._end(_END_S)
        self.group.leave()

    def _end(self, timeout_s: float) -> None:
        self._is_closing = True
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def call_at_end(process: subprocess.Popen[bytes], call: Callable[[int], None]) -> None:
    """Call a function with the exit status of a process as soon as it has ended, in a thread of its own."""
    threading.Thread(target=lambda: call(process.wait()), name="rank-watch", daemon=True).start()


class LeadModel:
    """A `DecoderModel`: the first rank's part, whose logits are those of all parts."""

    def __init__(self, part: FamilyModel, followers: Followers) -> None:
        """Join a part with those of the followers."""
        self._part = part
        self._followers = followers

    @property
    def config(self) -> ModelConfig:
        """The part's configuration."""
        return self._part.config

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run all layers; the followers run theirs when they are told the step."""
        model = self._followers.staged or self._part
        return model.forward(batch, caches)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the whole vocabulary."""
        if self._followers.num_parts == 1:
            assert self._followers.staged is not None, "there are stages or parts"
            return self._followers.staged.logits(hidden)
        self._followers.tell(ComputeLogits(len(hidden)))
        group = self._followers.group
        own = self._part.logits(group.from_first(hidden.contiguous()))
        return group.joined_at_first(own, self.config.vocab_size)
