"""Snapshots of the engine against schedules that are known."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from helpers.engine_drive import EngineDrive, GuessingDrafter
from helpers.snapshots import check_snapshot
from naiad.engine.step_history import NUM_LISTED_STEPS, StepHistory
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.sequence import BeamParams, SamplingParams
from naiad.snapshot import MAX_ROWS, MAX_TENANTS, EngineSnapshot, SequenceRow, tenant_label

PROMPT = [7, 7, 8, 8, 9, 9]


def rows_of(snapshot: EngineSnapshot) -> dict[int, SequenceRow]:
    return {row.sequence_id: row for row in snapshot.rows}


def test_rows_follow_a_sequence_from_the_queue_to_its_end() -> None:
    drive = EngineDrive(max_num_seqs=1, budget=4)
    drive.now = 1.0
    drive.add(1, PROMPT, SamplingParams(max_tokens=3), cache_salt="a")
    drive.add(2, PROMPT, SamplingParams(max_tokens=9, priority=-3))
    seen = []
    for now_s in (2.0, 3.0, 5.0):
        drive.now = now_s
        row = rows_of(check_snapshot(drive))[1]
        seen.append(
            (row.state, row.num_computed_tokens, row.num_output_tokens, round(row.wait_s), round(row.run_s))
        )
        drive.step()
    # The second step computes the rest of the prompt and samples.
    assert seen == [("waiting", 0, 0, 1, 0), ("prefill", 4, 0, 1, 1), ("decode", 6, 1, 1, 3)]
    other = rows_of(check_snapshot(drive))[2]
    assert (other.state, other.priority, other.max_tokens, other.num_prompt_tokens) == ("waiting", -3, 9, 6)
    drive.step()
    assert rows_of(check_snapshot(drive)).keys() == {2}
    drive.run()
    assert check_snapshot(drive).rows == []


def test_steps_are_those_of_the_schedule() -> None:
    drive = EngineDrive(max_num_seqs=4, budget=4)
    drive.add(1, PROMPT, SamplingParams(max_tokens=3))
    for now_s in (1.0, 2.5, 4.5):
        drive.now = now_s
        drive.step()
    drive.add(2, [1, 2, 3], SamplingParams(max_tokens=1))
    drive.run()
    snapshot = check_snapshot(drive)
    work = [(step.num_prefill_tokens, step.num_decode_rows) for step in snapshot.steps]
    assert work == [(4, 0), (2, 0), (0, 1), (3, 1)]
    assert snapshot.first_step == 0


def test_a_step_takes_as_long_as_it_did_not_share() -> None:
    """Steps overlap: each is launched before the end of the one before it."""
    history = StepHistory()
    history.add((1.0, 3.0, 4, 0, 0, 0, 0, 1))
    history.add((2.0, 5.0, 0, 1, 0, 0, 0, 2))
    history.add((7.0, 8.0, 0, 1, 0, 0, 2, 3))
    assert [step.duration_s for step in history.summaries()] == [2.0, 2.0, 1.0]
    assert [step.num_preemptions for step in history.summaries()] == [0, 0, 2]


def test_old_steps_are_forgotten_and_keep_their_numbers() -> None:
    drive = EngineDrive(num_blocks=2000)
    drive.add(1, [1, 2], SamplingParams(max_tokens=1500))
    drive.run()
    snapshot = check_snapshot(drive)
    assert len(snapshot.steps) == NUM_LISTED_STEPS
    assert snapshot.first_step + len(snapshot.steps) == snapshot.stats.total_steps == 1500


def test_blocks_are_free_used_shared_and_cached() -> None:
    drive = EngineDrive(num_blocks=16, block_size=2, prefix_cache=PrefixCache(2))
    (blocks,) = check_snapshot(drive).kv_groups
    assert (blocks.num_free, blocks.cells) == (16, bytes(16))
    drive.add(1, PROMPT, SamplingParams(max_tokens=8))
    drive.step()
    drive.add(2, PROMPT, SamplingParams(max_tokens=8))
    drive.step()
    (blocks,) = check_snapshot(drive).kv_groups
    # The last token of a prompt is computed in any case, so its block is not shared.
    assert blocks.num_shared == 2
    assert rows_of(check_snapshot(drive))[2].num_cached_tokens == 4
    drive.run()
    (blocks,) = check_snapshot(drive).kv_groups
    assert (blocks.num_used, blocks.num_shared) == (0, 0)
    assert blocks.num_cached > 2


def test_beams_share_their_prompt() -> None:
    drive = EngineDrive(num_blocks=32, block_size=2)
    drive.add(1, PROMPT, SamplingParams(max_tokens=8), sibling_ids=(2, 3), beam=BeamParams())
    for _ in range(3):
        drive.step()
    snapshot = check_snapshot(drive)
    assert snapshot.kv_groups[0].num_shared >= 3
    assert rows_of(snapshot).keys() == {1, 2, 3}


def test_who_was_preempted_is_paused() -> None:
    drive = EngineDrive(num_blocks=4, block_size=4, max_num_seqs=2)
    for sequence_id in (1, 2):
        drive.add(sequence_id, [sequence_id] * 7, SamplingParams(max_tokens=8))
    states, num_preemptions = set(), 0
    while drive.engine.has_work:
        drive.step()
        snapshot = check_snapshot(drive)
        states |= {row.state for row in snapshot.rows if row.num_preemptions}
        num_preemptions = sum(step.num_preemptions for step in snapshot.steps)
    assert "paused" in states
    assert num_preemptions == drive.engine.stats().total_preemptions == 1


def test_tenants_have_their_running_sequences_and_computed_tokens() -> None:
    drive = EngineDrive(max_num_seqs=2)
    for sequence_id, tenant in ((1, "a"), (2, "a"), (3, "")):
        drive.add(sequence_id, PROMPT, SamplingParams(max_tokens=4), cache_salt=tenant)
    drive.step()
    shares = {each.tenant: each for each in check_snapshot(drive).tenants}
    assert shares.keys() == {tenant_label("a"), ""}
    assert sum(each.num_tokens for each in shares.values()) == 12
    drive.run()
    drive.add(4, PROMPT, cache_salt="late")
    drive.step()
    # Its counter was raised to the virtual time, but no token was computed for that.
    (late,) = check_snapshot(drive).tenants
    assert (late.tenant, late.num_tokens) == (tenant_label("late"), 6)


def test_a_label_does_not_tell_the_tenant() -> None:
    assert tenant_label("") == ""
    assert "acme" not in tenant_label("acme")
    assert tenant_label("acme") != tenant_label("acme2")


def test_accepted_drafts_are_counted_step_by_step() -> None:
    rng = random.Random(1)
    drive = EngineDrive(make_drafter=lambda _cache, _runner: GuessingDrafter(rng, 0.3))
    for sequence_id in range(6):
        drive.add(sequence_id, [sequence_id, 3, 4], SamplingParams(max_tokens=30))
    drive.run()
    snapshot = check_snapshot(drive)
    assert snapshot.first_step == 0
    assert 0 < snapshot.num_recent_accepted_tokens < snapshot.num_recent_draft_tokens
    assert snapshot.num_recent_draft_tokens == snapshot.stats.total_draft_tokens


def test_rates_and_latencies_of_a_steady_engine() -> None:
    drive = EngineDrive(num_blocks=1000)
    drive.now = 100.0
    drive.add(1, PROMPT, SamplingParams(max_tokens=400))
    drive.now = 100.5
    for _ in range(200):
        drive.step()
        drive.now += 0.05
    snapshot = check_snapshot(drive)
    assert snapshot.generation_tokens_per_s == pytest.approx(20, rel=0.03)
    assert snapshot.prefill_tokens_per_s == 0
    assert snapshot.inter_token.p50_s == pytest.approx(0.05)
    assert snapshot.inter_token.p95_s == pytest.approx(0.05)
    assert snapshot.first_token.count == 1
    assert snapshot.first_token.p95_s == pytest.approx(0.5, abs=1e-3)
    drive.now += 40
    snapshot = check_snapshot(drive)
    assert (snapshot.generation_tokens_per_s, snapshot.first_token.count, snapshot.inter_token.count) == (
        0,
        0,
        0,
    )


def test_percentiles_are_by_nearest_rank() -> None:
    history = StepHistory()
    for number in range(1, 101):
        history.add_first_token(10.0, float(number))
    found = history.first_token(11.0)
    assert (found.p50_s, found.p95_s, found.count) == (50.0, 95.0, 100)


def test_more_sequences_and_tenants_than_are_listed_are_counted() -> None:
    drive = EngineDrive(max_num_seqs=2)
    for sequence_id in range(MAX_ROWS + 5):
        drive.add(sequence_id, [1], cache_salt=f"tenant {sequence_id}")
    snapshot = drive.engine.snapshot()
    assert (len(snapshot.rows), snapshot.num_rows_left_out) == (MAX_ROWS, 5)
    assert (len(snapshot.tenants), snapshot.num_tenants) == (MAX_TENANTS, MAX_ROWS + 5)


def test_nobodys_prompt_is_in_it() -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4))
    prompt = [43] * 12
    drive.add(1, prompt, SamplingParams(max_tokens=4, stop_sequences=((48, 47),)), cache_salt="secret tenant")
    drive.step()
    raw = msgspec.json.encode(drive.engine.snapshot())
    assert b"secret tenant" not in raw
    assert 43 not in _numbers(json.loads(raw))
    assert 48 not in _numbers(json.loads(raw))


def test_snapshots_change_no_token() -> None:
    told = []
    for is_watched in (False, True):
        drive = EngineDrive(num_blocks=12, block_size=2, prefix_cache=PrefixCache(2))
        for sequence_id in range(8):
            drive.add(sequence_id, PROMPT[: 1 + sequence_id % 5], SamplingParams(max_tokens=12))
        while drive.engine.has_work:
            drive.step()
            if is_watched:
                check_snapshot(drive)
        told.append((drive.tokens, drive.runner.steps))
    assert told[0] == told[1]


def _numbers(found: object) -> set[object]:
    if isinstance(found, dict):
        return set().union(*map(_numbers, found.values()))
    if isinstance(found, list):
        return set().union(*map(_numbers, found))
    return {found}
