"""Runs a mix on a real engine in this process, in rounds that are the same each time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from helpers.drafting_engines import BLOCK, write_first_layers
from helpers.engine_drive import CheckedScheduler
from helpers.grammars import grammar_checkpoint
from helpers.invariants import check_invariants
from helpers.mixes.clients import MixClient
from helpers.mixes.doors import EnsembleDoor, MixDoor, OpenAIDoor, ServiceDoor
from helpers.mixes.drawn import MAX_MODEL_LEN, MAX_TICKS, TICK_S, Asked, Door, Ending, Kill, Mix, Settings
from helpers.mixes.replies import Meets, Reply, check_reply
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.engine.build import make_drafter
from naiad.engine_process.protocol import (
    Checkpoint,
    ClientMessage,
    Drain,
    EngineMessage,
    client_message_decoder,
    encode_frame,
    engine_message_decoder,
)
from naiad.engine_process.serving import tenant_turns
from naiad.engine_process.serving.connections import ConnectionEvent, Connections, Inbox
from naiad.engine_process.serving.loop import EngineLoop
from naiad.engine_process.serving.queue_gate import QueueGate, QueueLimits
from naiad.frames import FrameBuffer
from naiad.grammar import Grammars
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.model_runner import ModelRunner, model_runner
from naiad.scheduler.policies import make_policy
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost
from naiad.tokenization import Tokenizer, template_sandbox
from naiad.tokenization.text_stream import TextStream
from naiad.triton_server.responses import stream
from naiad.triton_server.service import llm_service

_NUM_BLOCKS = 64
# No real clock of this machine is as late, so streams count as silent until they send.
_START_S = 1e9
# Longer than a stream with an error waits for acknowledgements.
_MAX_QUIET_TICKS = 150
_MAX_ROWS = 32
# Chat templates are limited in real time, of which other work may take all.
_MAX_RENDER_S = 60.0


def _kind_of_runner(model: str, drafter: str, kv_cache_dtype: str) -> tuple[str, str, str]:
    """What differs between runners: most drafters need nothing of their own."""
    return model, drafter if drafter in ("self", "draft_model") else "none", kv_cache_dtype


class Bench:
    """The checkpoints, and a runner for each drafter and KV cache that needs its own, for all mixes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runners: dict[tuple[str, str, str], ModelRunner] = {}
        self._grammars: dict[str, Grammars] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._replies: dict[str, Reply] = {}

    def checkpoint(self, model: str) -> Path:
        """The directory of a model; it is made when it is first asked for."""
        directory = self._folder / model
        if not directory.exists():
            grammar_checkpoint(directory, model)
            write_first_layers(directory, self._folder / f"{model} drafts", 1)
        return directory

    def config(self, model: str, drafter: str, kv_cache_dtype: str) -> EngineConfig:
        return EngineConfig(
            model_dir=str(self.checkpoint(model)),
            dtype="float32",
            cpu_kernels="native",
            cpu_threads=1,
            start_cache=False,
            max_num_seqs=_MAX_ROWS,
            max_num_batched_tokens=256,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_bytes=1 << 23,
            drafter=drafter,
            draft_model=str(self._folder / f"{model} drafts") if drafter == "draft_model" else "",
            num_draft_layers=1 if drafter == "self" else 0,
        )

    def runner(self, model: str, drafter: str, kv_cache_dtype: str) -> ModelRunner:
        kind = _kind_of_runner(model, drafter, kv_cache_dtype)
        if kind not in self._runners:
            with patch.object(model_runner, "Grammars", self._shared_grammars):
                self._runners[kind] = ModelRunner(self.config(*kind))
        return self._runners[kind]

    def forget_runner(self, settings: Settings) -> None:
        """Let the next engine begin with a new runner, as another process does."""
        self._runners.pop(_kind_of_runner(settings.model, settings.drafter, settings.kv_cache_dtype))

    def _shared_grammars(self, model_dir: str, *args: Any) -> Grammars:
        """All runners of a model share what is compiled: it never changes, and begins with a new process."""
        if model_dir not in self._grammars:
            self._grammars[model_dir] = Grammars(model_dir, *args)
        return self._grammars[model_dir]

    def tokenizer(self, model: str) -> Tokenizer:
        if model not in self._tokenizers:
            self._tokenizers[model] = Tokenizer.from_directory(self.checkpoint(model))
        return self._tokenizers[model]

    def engine(self, settings: Settings, clock: Callable[[], float]) -> tuple[Engine, CheckedScheduler]:
        kind = settings.model, settings.drafter, settings.kv_cache_dtype
        runner = self.runner(*kind)
        assert all(group.num_blocks >= _NUM_BLOCKS for group in runner.kv_groups)
        groups = [KVGroupSpec(settings.num_blocks, group.window) for group in runner.kv_groups]
        windows = [group.window for group in groups]
        prefix_cache = PrefixCache(BLOCK, windows=windows) if settings.is_cached else None
        kv_cache = KVCacheManager(groups, BLOCK, prefix_cache, max_step_tokens=settings.budget)
        drafter = make_drafter(self.config(*kind), runner, kv_cache)
        # All steps cost the same, so all drafts are tried.
        policy = SpeculationPolicy(StepCost([(1, 1.0), (1 << 16, 1.0)]))
        speculator = Speculator(drafter, policy, settings.num_speculative_tokens)
        scheduler = CheckedScheduler(
            kv_cache,
            SchedulerLimits(settings.max_num_seqs, settings.budget),
            make_policy(settings.policy, aging_s=1.0),
            speculator,
        )
        grammars = self.runner(settings.model, "none", "auto").grammars
        text_state = partial(TextStream, self.tokenizer(settings.model).table)
        return Engine(scheduler, runner, text_state, clock, grammars=grammars), scheduler

    def alone(self, asked: Asked, settings: Settings) -> Reply:
        """The reply to a request alone, on an engine without drafts and prefix cache; it is remembered."""
        settings = Settings(
            settings.model,
            settings.num_blocks,
            settings.max_num_seqs,
            settings.budget,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        asked = replace(asked, tick=0, ending=None, ends_after=0, timeout_us=0)
        key = repr((settings, asked))
        if key not in self._replies:
            (self._replies[key],) = Stage(self, settings).run((asked,))
        return self._replies[key]

    def row_alone(self, asked: Asked, settings: Settings, row: int) -> Reply:
        """The reply to one row of a request alone."""
        return self.alone(replace(asked, rows=(asked.rows[row],)), settings)

    def close(self) -> None:
        for grammars in self._grammars.values():
            grammars.close()


def run_mix(bench: Bench, mix: Mix) -> Stage:
    """Run a mix and check everything.

    Raises:
        AssertionError: something is wrong.
    """
    stage = Stage(bench, mix.settings)
    replies = stage.run(mix.requests, mix.kill)
    for number, (asked, reply) in enumerate(zip(mix.requests, replies, strict=True)):
        try:
            alone = bench.alone(asked, mix.settings)
            row_alone = partial(bench.row_alone, asked, mix.settings)
            check_reply(asked, reply, alone, stage.meets[number], row_alone)
        except AssertionError as error:
            raise AssertionError(f"request {number}: {error}") from None
    return stage


class _Inline(ThreadPoolExecutor):
    """Does everything at once."""

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            done.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 — as an executor does
            done.set_exception(error)
        return done


class _InlineSenders:
    """Flushes streams at once; stands in for `SenderPool`."""

    def __init__(self, _num_threads: int, flush: Callable[[Any], None]) -> None:
        self._flush = flush

    def schedule(self, *streams: Any) -> None:
        for each in streams:
            self._flush(each)


class _KilledError(BaseException):
    """Ends the loop of an engine wherever it is; nothing of the engine catches it."""


class _Connection:
    """A client's end at the engine."""

    def __init__(self, client: MixClient, is_owner: bool) -> None:
        self.is_owner = is_owner
        self.last_stats = None
        self.client = client

    def drop(self) -> None:
        raise AssertionError("the engine drops a client")


class _Connections(Connections):
    """The engine's connections without sockets: messages pass as frames, at once.

    Attributes:
        num_left: how many messages the engine still sends before it is killed; None: it is not.
        is_dead: whether it has been killed.
    """

    def __init__(self, inbox: Inbox, gate: QueueGate) -> None:
        self.inbox = inbox
        self.gate = gate
        self.num_left: int | None = None
        self.is_dead = False
        self._open: set[Any] = set()
        self._num_arriving = 0
        self._on_the_way: deque[tuple[Any, bytes]] = deque()

    def open(self, client: MixClient) -> Any:
        connection: Any = _Connection(client, is_owner=not self._open)
        self._open.add(connection)
        client.connect(partial(self.arrive, connection))
        self.inbox.put(connection, ConnectionEvent.OPENED)
        return connection

    def arrive(self, connection: Any, frame: bytes) -> None:
        if self.is_dead:
            return
        self._num_arriving += 1
        try:
            for body in FrameBuffer().feed(frame):
                self._take(connection, client_message_decoder.decode(body))
        finally:
            self._num_arriving -= 1

    def send(self, connection: Any, message: EngineMessage) -> None:
        is_of_loop = not self._num_arriving
        if is_of_loop and self.num_left is not None:
            self.end_if_due()
            self.num_left -= 1
        self._on_the_way.append((connection, encode_frame(message)))
        if is_of_loop:
            self.deliver()

    def deliver(self) -> None:
        """Give clients what was sent while one of them was sending."""
        while self._on_the_way:
            connection, frame = self._on_the_way.popleft()
            for body in FrameBuffer().feed(frame):
                connection.client.receive(engine_message_decoder.decode(body))

    def end_if_due(self) -> None:
        """End the engine if it has sent what it was to send."""
        if self.num_left == 0:
            self.is_dead = True
            raise _KilledError


class _Rounds(Inbox):
    """Lets something happen before each step of the engine's loop."""

    def __init__(self, happen: Callable[[], None]) -> None:
        super().__init__()
        self._happen = happen

    def take(self, timeout_s: float | None) -> list[tuple[Any, ClientMessage | ConnectionEvent]]:
        self._happen()
        return super().take(0)


class Stage:
    """One engine with all its doors, and the engine that follows if it is killed.

    Attributes:
        engine, scheduler: the engine.
        num_ticks: how many rounds there were.
        meets: what each request met of the loss of the engine.
        num_kills: how often the engine was killed.
    """

    def __init__(self, bench: Bench, settings: Settings) -> None:
        self.num_ticks = 0
        self.num_kills = 0
        self.meets: dict[int, Meets] = {}
        self._num_quiet_ticks = 0
        self._bench = bench
        self._settings = settings
        self._requests: tuple[Asked, ...] = ()
        self._kill: Kill | None = None
        self._replies: dict[int, Reply] = {}
        self._stops: list[Reply] = []
        self._acks: list[tuple[int, Callable[[], None]]] = []
        self._tasks = asyncio.new_event_loop()
        self._tasks.set_default_executor(_Inline(1))
        self._doors = self._make_doors()
        self._start_engine()

    def _make_doors(self) -> dict[Door, MixDoor]:
        tokenizer = self._bench.tokenizer(self._settings.model)
        settings = self._settings
        runner = self._bench.runner(settings.model, settings.drafter, settings.kv_cache_dtype)
        vocab_size = runner.model_config.vocab_size
        llm = EnsembleDoor(self._schedule_ack, tokenizer, vocab_size)
        text, vllm = (ServiceDoor(kind, tokenizer, vocab_size) for kind in (Door.TEXT, Door.VLLM))
        openai = OpenAIDoor(self._tasks, tokenizer, vocab_size)
        doors: dict[Door, MixDoor] = {Door.LLM: llm, Door.ENSEMBLE: llm, Door.TEXT: text, Door.VLLM: vllm}
        return doors | {Door.COMPLETIONS: openai, Door.CHAT: openai}

    def _clients(self) -> list[MixClient]:
        """All clients, the owner of the engine first."""
        return [door.client for door in dict.fromkeys(self._doors.values())]

    def _start_engine(self) -> None:
        """Start an engine, which says that it is ready after the next round has begun."""
        self.engine, self.scheduler = self._bench.engine(self._settings, self._now)
        gate = QueueGate(QueueLimits(self._settings.max_num_seqs, 1000))
        self._connections = _Connections(_Rounds(self._happen), gate)
        self._owner, *_ = [self._connections.open(client) for client in self._clients()]
        with patch.object(tenant_turns, "ThreadPoolExecutor", _Inline):
            self._loop = EngineLoop(self.engine, self._connections, Checkpoint("", "first"))
        self._serves_from = self.num_ticks + 2

    @property
    def replies(self) -> list[Reply]:
        """What came back for each request."""
        return [self._replies[number] for number in range(len(self._requests))]

    def run(self, requests: tuple[Asked, ...], kill: Kill | None = None) -> list[Reply]:
        """Run all requests to their ends; return their replies, and check what is left of them."""
        self._requests = requests
        self._kill = kill
        with self._controlled(), contextlib.closing(self._tasks):
            try:
                self._run_engines()
                self._settle()
                self._check_end()
            finally:
                self._end_tasks()
        return self.replies

    def _run_engines(self) -> None:
        try:
            self._loop.run()
        except _KilledError:
            self._follow()
            self._loop.run()

    def _follow(self) -> None:
        """Let the clients find that the engine is gone, and start another one."""
        kill, self._kill = self._kill, None
        assert kill is not None
        self.num_kills += 1
        for _ in range(kill.unnoticed_ticks):
            self._happen()
        for number, reply in self._replies.items():
            if reply.num_finals == 0:
                self.meets[number] = Meets.LOSS
        self._serves_from = MAX_TICKS
        for client in self._clients():
            client.lose_engine()
        for _ in range(kill.away_ticks):
            self._happen()
        self._bench.forget_runner(self._settings)
        self._start_engine()

    def _end_tasks(self) -> None:
        for task in asyncio.all_tasks(self._tasks):
            task.cancel()
        self._settle()

    @contextlib.contextmanager
    def _controlled(self) -> Iterator[None]:
        """No thread and no clock but ours."""
        clock = SimpleNamespace(monotonic=self._now)
        with (
            patch.object(llm_service, "SenderPool", _InlineSenders),
            patch.object(llm_service, "time", clock),
            patch.object(stream, "time", clock),
            patch.object(template_sandbox, "MAX_RENDER_S", _MAX_RENDER_S),
        ):
            yield

    def _now(self) -> float:
        return _START_S + self.num_ticks * TICK_S

    def _schedule_ack(self, take: Callable[[], None]) -> None:
        self._acks.append((self.num_ticks + self._settings.ack_ticks, take))

    def _happen(self) -> None:
        has_work = self.engine.has_work and not self._connections.is_dead
        if has_work:
            check_invariants(self.scheduler)
        self.num_ticks += 1
        self._num_quiet_ticks = 0 if has_work else self._num_quiet_ticks + 1
        assert self.num_ticks < MAX_TICKS, "the engine does not finish"
        assert self._num_quiet_ticks < _MAX_QUIET_TICKS, "the engine is idle, but a request has no FINAL"
        tick = self.num_ticks - 2  # the doors are open from then on
        if tick < 0:
            return
        self._start_and_end(tick)
        self._take_acks()
        for door in {self._doors[Door.LLM], self._doors[Door.TEXT], self._doors[Door.VLLM]}:
            assert isinstance(door, ServiceDoor)
            door.service.housekeep()
            assert not door.bugs, door.bugs
        self._settle()
        if self._is_over():
            self._connections.inbox.put(self._owner, Drain())
        self._kill_if_due(tick)

    def _start_and_end(self, tick: int) -> None:
        """Send the requests of a round, and let clients end theirs."""
        for number, asked in enumerate(self._requests):
            if asked.tick == tick:
                self.meets[number] = Meets.ENGINE if self.num_ticks >= self._serves_from else Meets.NOBODY
                self._replies[number] = self._doors[asked.door].start(asked, f"request {number}")
            if asked.ending is not None and asked.tick + asked.ends_after == tick:
                self._end(number, asked)

    def _kill_if_due(self, tick: int) -> None:
        if self._kill is None or self._connections.is_dead:
            return
        if tick == self._kill.tick:
            self._connections.num_left = self._kill.num_sent
        elif tick > self._kill.tick:
            self._connections.num_left = 0
        if self._connections.num_left is not None:
            self._connections.end_if_due()

    def _end(self, number: int, asked: Asked) -> None:
        if asked.ending is Ending.LEAVES or asked.door.is_openai:
            self._doors[asked.door].leave(self._replies[number])
            return
        door = self._doors[Door.TEXT if asked.door is Door.TEXT else Door.LLM]
        assert isinstance(door, ServiceDoor)
        self._stops.append(door.stop(f"request {number}"))

    def _take_acks(self) -> None:
        due = [take for tick, take in self._acks if tick <= self.num_ticks]
        self._acks = [(tick, take) for tick, take in self._acks if tick > self.num_ticks]
        for take in due:
            take()

    def _settle(self) -> None:
        """Let messages arrive, and the tasks of the OpenAI door run until they wait for the engine."""
        for _ in range(6):
            self._connections.deliver()
            self._tasks.run_until_complete(asyncio.sleep(0))

    def _is_over(self) -> bool:
        have_come = len(self._replies) == len(self._requests)
        ends = max((asked.tick + asked.ends_after for asked in self._requests), default=0)
        is_quiet = all(reply.num_finals for reply in self._replies.values()) and not self._acks
        return have_come and is_quiet and self.num_ticks - 2 > ends

    def _check_end(self) -> None:
        assert not self.engine.has_work, "the engine still has work"
        assert self.engine.stats().num_used_blocks == 0, "blocks are still held"
        assert not self.scheduler.leaving
        assert not self._loop._engine_ids
        assert not self._loop._sequences
        assert self._connections.gate._num_inside == 0, "the gate counts sequences that are gone"
        for reply in self._stops:
            assert (reply.num_finals, reply.responses, reply.errors) == (1, [], [])
        for door in set(self._doors.values()):
            if isinstance(door, ServiceDoor):
                assert not door.service.open_streams(), "a stream is left"
            else:
                assert not door._live, "a generation is left"  # type: ignore[attr-defined]
            assert not door.client.num_outstanding, "a client still waits for the engine"
