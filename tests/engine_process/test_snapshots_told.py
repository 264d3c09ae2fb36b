"""Snapshots over the engine's socket: for those who ask, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from helpers.engine_harness import RawClient, Recorder, fake_command, make_request, wait_until
from helpers.fake_engine_child import HELD_ID, let_go
from naiad.config import EngineConfig
from naiad.engine_process import AttachedClient, EngineClient
from naiad.engine_process.clients import attached_client
from naiad.engine_process.protocol import (
    AskSnapshot,
    Checkpoint,
    Ready,
    SnapshotTaken,
    encode_frame,
    engine_message_decoder,
)
from naiad.errors import EngineAwayError, UnavailableError
from naiad.frames import FrameBuffer
from naiad.outputs import EngineStats
from naiad.sequence import GrammarKind, GrammarSpec
from naiad.snapshot import BlockMap, EngineSnapshot, SequenceRow, StepSummary, TenantShare, tenant_label


@pytest.fixture
def owner(socket_dir: Path) -> Iterator[EngineClient]:
    recorder = Recorder()
    made = EngineClient(
        EngineConfig(model_dir=str(socket_dir)),
        socket_dir / "llm.0.engine",
        recorder.on_outputs,
        recorder.on_lost,
        command=fake_command("good"),
    )
    made.start()
    yield made
    made.close(timeout_s=0)


class Asker:
    def __init__(self, directory: Path) -> None:
        self.recorder = Recorder()
        self.answers: list[SnapshotTaken] = []
        self.client = AttachedClient(
            directory, "llm", self.recorder.on_outputs, lambda _: None, lambda _: None, self.answers.append
        )
        self.client.start()

    def ask(self) -> SnapshotTaken:
        number = len(self.answers)
        self.client.ask_snapshot()
        wait_until(lambda: len(self.answers) > number)
        return self.answers[-1]


@pytest.fixture
def askers(owner: EngineClient, socket_dir: Path) -> Iterator[list[Asker]]:
    made = [Asker(socket_dir) for _ in range(2)]
    for asker in made:
        wait_until(lambda asker=asker: asker.client.info is not None)  # type: ignore[misc]
    yield made
    for asker in made:
        asker.client.close()


def test_a_snapshot_survives_the_wire() -> None:
    snapshot = EngineSnapshot(
        stats=EngineStats(num_running=1),
        rows=[SequenceRow(7, "ab", "prefill", -1, 5, 3, 0, 9, 2, 0, 0.5, 0.25)],
        steps=[StepSummary(0.1, 5, 4, 3, 2, 1)],
        kv_groups=[BlockMap(None, 1, 2, 3, 4, 5, bytes(range(4)))],
    )
    (body,) = FrameBuffer().feed(encode_frame(SnapshotTaken(snapshot, {7: 1})))
    assert engine_message_decoder.decode(body) == SnapshotTaken(snapshot, {7: 1})


def test_an_older_client_reads_what_a_newer_engine_says_of_itself() -> None:
    class OlderReady(msgspec.Struct, tag="ready", kw_only=True):
        checkpoint: Checkpoint
        max_model_len: int

    ready = Ready(
        checkpoint=Checkpoint("/m", "m"),
        created_s=1,
        max_model_len=64,
        vocab_size=10,
        eos_token_ids=[],
        max_num_seqs=1,
        stats=EngineStats(),
        tells_snapshots=True,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=OlderReady).max_model_len == 64


def test_an_idle_engine_answers(askers: list[Asker]) -> None:
    answer = askers[0].ask()
    assert answer.snapshot.rows == []
    assert answer.snapshot.stats.max_num_seqs == 8


def test_each_client_learns_which_sequences_are_its_own(
    owner: EngineClient, askers: list[Asker], socket_dir: Path
) -> None:
    first, second = askers
    for asker, own_ids in ((first, (5,)), (second, (5, 6))):
        for own_id in own_ids:
            asker.client.submit([make_request(own_id, HELD_ID, max_tokens=60)])
            asker.recorder.wait_started(own_id)
    seen_first, seen_second = first.ask(), second.ask()
    assert sorted(seen_first.own_ids.values()) == [5]
    assert sorted(seen_second.own_ids.values()) == [5, 6]
    ids = {row.sequence_id for row in seen_first.snapshot.rows}
    assert ids == seen_first.own_ids.keys() | seen_second.own_ids.keys()
    assert len(ids) == 3
    first.client.abort([5])
    first.recorder.wait_finished(5)
    assert first.ask().own_ids == {}
    let_go(socket_dir)


def test_sequences_that_wait_for_a_grammar_are_shown(
    owner: EngineClient, askers: list[Asker], socket_dir: Path
) -> None:
    asker = askers[0]
    made = make_request(5, first_id=20)
    spec = GrammarSpec(kind=GrammarKind.REGEX, source="held")
    params = msgspec.structs.replace(made.params, grammar=spec)
    asker.client.submit([msgspec.structs.replace(made, params=params, sibling_ids=(6,), tenant="someone")])
    wait_until(lambda: len(asker.ask().snapshot.rows) == 2)
    told = asker.ask()
    snapshot = told.snapshot
    assert {row.state for row in snapshot.rows} == {"compiling"}
    assert sorted(told.own_ids[row.sequence_id] for row in snapshot.rows) == [5, 6]
    assert {row.num_prompt_tokens for row in snapshot.rows} == {len(made.prompt_token_ids)}
    assert (snapshot.stats.num_waiting, snapshot.stats.num_compiling) == (2, 2)
    assert (snapshot.num_tenants, snapshot.num_rows_left_out) == (1, 0)
    assert snapshot.tenants == [TenantShare(tenant_label("someone"), 0, 2, 0)]
    asker.client.abort([6])
    asker.recorder.wait_finished(6)
    assert len(asker.ask().snapshot.rows) == 1
    let_go(socket_dir)
    asker.recorder.wait_finished(5)


def test_nobody_gets_a_snapshot_without_asking(
    owner: EngineClient, askers: list[Asker], socket_dir: Path
) -> None:
    quiet = RawClient(socket_dir / "llm.0.engine")
    assert isinstance(quiet.receive(), Ready)
    for _ in range(3):
        askers[0].ask()
    assert askers[1].answers == []
    # An answer to `quiet` alone, after which nothing else may be on its way.
    quiet.send(AskSnapshot())
    assert isinstance(quiet.receive(), SnapshotTaken)
    quiet.close()


def test_the_owner_is_not_disturbed_by_those_who_look(owner: EngineClient, askers: list[Asker]) -> None:
    for _ in range(3):
        askers[0].ask()
    assert owner.is_ready


def test_a_client_that_asks_and_hangs_up_harms_nobody(
    owner: EngineClient, askers: list[Asker], socket_dir: Path
) -> None:
    rude = RawClient(socket_dir / "llm.0.engine")
    rude.send(AskSnapshot())
    rude.close()
    assert askers[0].ask().snapshot.rows == []


def test_without_an_engine_nobody_can_be_asked(owner: EngineClient, askers: list[Asker]) -> None:
    owner.close(timeout_s=0)
    wait_until(lambda: askers[0].client.info is None)
    with pytest.raises(EngineAwayError, match="does not serve now"):
        askers[0].client.ask_snapshot()


def test_an_older_engine_is_not_asked(askers: list[Asker], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would drop the connection, and with it this client's sequences."""
    engine = askers[0].client._newest()
    assert engine is not None
    assert engine.info is not None
    engine.info = msgspec.structs.replace(engine.info, tells_snapshots=False)
    monkeypatch.setattr(attached_client._Engine, "send_or_hang_up", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(UnavailableError, match="too old"):
        askers[0].client.ask_snapshot()


def test_watching_changes_no_token(askers: list[Asker]) -> None:
    asker = askers[0]
    asker.client.submit([make_request(1, 10, max_tokens=40)])
    for _ in range(5):
        askers[1].ask()
    asker.recorder.wait_finished(1)
    assert asker.recorder.token_ids(1) == list(range(10, 50))
