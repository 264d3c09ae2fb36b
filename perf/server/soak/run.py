"""One run of a soak: the load, the kills, the counts and the samples."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import time
import urllib.request
from pathlib import Path

import grpc.aio
import psutil
from perf.server.load import openai_model
from perf.server.serve_process import Served
from perf.server.soak.judge import DISTURBANCES, RELOAD, Disturbance, Judge, Trial
from perf.server.soak.memory import (
    ENGINE,
    Sample,
    role_of,
    samples_of,
    shared_memory_mb,
)
from perf.server.soak.questions import NO_END, Asker, Door, Question, bounded, draw_questions
from tritonclient.grpc import service_pb2

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.control_key import GRPC_HEADER
from naiad.config import ModelConfig
from naiad.errors import InternalError

_LOAD_MODEL = "/inference.GRPCInferenceService/RepositoryModelLoad"
_SAMPLE_S = 10.0
_END_S = 120.0
_WELL_S = 240.0
_ONE_ENGINE_S = 90.0
# Load before a kill, so that there is something to cut off.
_LOADED_S = 10.0
_MAX_LIVE = 64
# The server's processes write their counts every second or two; at rest they stay the same.
_SETTLED_S, _REST_S = 4.0, 30.0
# What a request may be: heard to its end, left by its client, or with a deadline.
_LEFT, _LATE = 0.1, 0.03
_DEADLINE_US = 150_000
_RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_ENDED = "vllm:request_success_total"


class Soak:
    """One piece: a server under load, what it was asked and what came of it."""

    def __init__(self, server: Served, repository: Path, key: str, args: argparse.Namespace) -> None:
        """Set up.

        Args:
            server: the server.
            repository: its model repository.
            key: that of model control.
            args: the command's.
        """
        self.samples: list[Sample] = []
        self.shared_mb: list[tuple[float, float]] = []
        self.disturbances: list[Disturbance] = []
        self.judge = Judge(self.disturbances)
        self._server, self._repository, self._key, self._args = server, repository, key, args
        self._draw = random.Random(args.seed)
        self._began_s = time.monotonic()
        self._live: set[asyncio.Task[None]] = set()
        vocab_size = ModelConfig.from_directory(resolve_model(args.model)).vocab_size
        self._questions = draw_questions(args.questions, vocab_size)
        # Sequences that ended, and requests that may have, since the last rest.
        self._num_ended = self._num_perhaps = 0

    @property
    def now_s(self) -> float:
        """Seconds since the soak began."""
        return time.monotonic() - self._began_s

    async def run(self) -> None:
        """Ask, disturb and watch until the time is over."""
        async with Asker(self._server, openai_model(self._server)) as self._asker:
            await self._ask_alone()
            self._began_s = time.monotonic()
            end_s, turn = 3600 * self._args.hours, 0
            watching = asyncio.create_task(self._watch())
            while self.now_s < end_s:
                minutes = self._args.first_every_min if turn < len(DISTURBANCES) else self._args.every_min
                await self._stretch(min(end_s, self.now_s + 60 * minutes))
                if self.now_s < end_s and not self._args.undisturbed:
                    await self._disturb(DISTURBANCES[turn % len(DISTURBANCES)])
                    turn += 1
            if watching.done():
                watching.result()  # raises why nothing was seen since then
            watching.cancel()

    async def _ask_alone(self) -> None:
        for question in self._questions:
            heard = await bounded(self._asker.ask(question), _END_S)
            if heard.error or heard.num_ends != 1:
                raise InternalError(f"question {question.number}, asked alone: {heard}")
            self.judge.expected.append(heard.answer)

    async def _stretch(self, until_s: float) -> None:
        """Load the server until then, from rest to rest, and compare what it has counted."""
        before = await self._at_rest()
        self._num_ended = self._num_perhaps = 0
        await self._load(until_s)
        counted = await self._at_rest() - before
        if not self._num_ended <= counted <= self._num_ended + self._num_perhaps:
            self.judge.tell(
                f"the server has counted {counted:g} sequences that ended, its clients {self._num_ended}, "
                f"and {self._num_perhaps} more may have"
            )

    async def _load(self, until_s: float) -> None:
        due_s = self.now_s
        while (due_s := due_s + self._draw.expovariate(self._args.rate)) < until_s:
            await asyncio.sleep(max(0.0, due_s - self.now_s))
            if len(self._live) >= _MAX_LIVE:
                self.judge.num["not sent"] += 1
                continue
            task = asyncio.create_task(self._one(self._draw.choice(self._questions)))
            self._live.add(task)
            task.add_done_callback(self._live.discard)

    async def _one(self, question: Question) -> None:
        share = self._draw.random()
        leaves_after = self._draw.randrange(1, 6) if share < _LEFT and question.is_streamed else None
        is_late = _LEFT < share < _LEFT + _LATE and not question.door.is_openai
        deadline_us = _DEADLINE_US if is_late else None
        began_s = self.now_s
        asking = self._asker.ask(question, leaves_after=leaves_after, deadline_us=deadline_us)
        heard = await bounded(asking, _END_S)
        trial = Trial(question, heard, began_s, self.now_s, has_deadline=is_late)
        self.judge.take(trial)
        if heard.has_left or heard.error or is_late:
            self._num_perhaps += int(question.asked.get("n", 1))
        else:
            self._num_ended += len(heard.pieces)

    async def _at_rest(self) -> float:
        """Wait until every request has ended and the server rests; return how many sequences it counted."""
        while self._live:
            await asyncio.wait(self._live)
        end_s, ended, since_s = self.now_s + _REST_S, math.nan, self.now_s
        while True:
            running, now_ended = await asyncio.to_thread(_counted, self._server)
            if any(running.values()) or now_ended != ended:
                ended, since_s = now_ended, self.now_s
            elif self.now_s - since_s >= _SETTLED_S:
                return ended
            if self.now_s > end_s:
                self.judge.tell(f"no request is open for {_REST_S:g} s, but the server says {running}")
                return ended
            await asyncio.sleep(0.5)

    async def _disturb(self, kind: str) -> None:
        """Kill or reload under load, and wait until every door answers again."""
        loading = asyncio.create_task(self._load(math.inf))
        await asyncio.sleep(_LOADED_S)
        disturbance = Disturbance(kind, self.now_s)
        self.disturbances.append(disturbance)
        if kind == RELOAD:
            await self._reload()
        else:
            _kill(self._server.pid, kind)
        await self._until_well(kind)
        if kind == RELOAD:
            await self._until_one_engine()
        disturbance.ended_s = self.now_s
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading

    async def _reload(self) -> None:
        # The server loads a model anew only if its files have changed.
        os.utime(self._repository / "llm" / "1" / "model.py")
        async with grpc.aio.insecure_channel(self._server.grpc) as channel:
            load = channel.unary_unary(_LOAD_MODEL, service_pb2.RepositoryModelLoadRequest.SerializeToString)
            asked = service_pb2.RepositoryModelLoadRequest(model_name="llm")
            await load(asked, metadata=((GRPC_HEADER, self._key),))

    async def _until_well(self, kind: str) -> None:
        end_s = self.now_s + _WELL_S
        for door in Door:
            question = next(each for each in self._questions if each.door is door)
            while (heard := await bounded(self._asker.ask(question), _END_S)).error:
                if heard.error.startswith(NO_END):
                    self.judge.tell(f"{kind}: a request by {door.name} was lost: {heard.error}")
                if self.now_s > end_s:
                    raise InternalError(
                        f"{kind}: {door.name} does not answer after {_WELL_S:g} s: {heard.error}"
                    )
                await asyncio.sleep(0.5)

    async def _until_one_engine(self) -> None:
        """Wait until the old process has given up its engine, and with it the counts of the server."""
        end_s = self.now_s + _ONE_ENGINE_S
        while await asyncio.to_thread(_num_processes, self._server.pid, ENGINE) > 1:
            if self.now_s > end_s:
                self.judge.tell(f"{_ONE_ENGINE_S:g} s after the reload the old process still has its engine")
                return
            await asyncio.sleep(0.5)

    async def _watch(self) -> None:
        while True:
            at_s = self.now_s
            self.samples += await asyncio.to_thread(lambda: list(samples_of(self._server.pid, self.now_s)))
            self.shared_mb.append((at_s / 3600, shared_memory_mb()))
            await asyncio.sleep(_SAMPLE_S)


def _num_processes(pid: int, role: str) -> int:
    """How many processes of this role are below `naiad serve`."""
    num = 0
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            num += role_of(process) == role
    return num


def _kill(pid: int, role: str) -> None:
    """Kill the process of this role below `naiad serve`.

    Raises:
        InternalError: there is none.
    """
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if role_of(process) == role:
                process.kill()
                return
    raise InternalError(f"no process of {role!r} is there to be killed")


def _counted(server: Served) -> tuple[dict[str, float], float]:
    """What runs or is held, and how many sequences have ended, as the server counts them."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()

    def total(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    return {name: total(name) for name in _RUNNING}, total(_ENDED)
