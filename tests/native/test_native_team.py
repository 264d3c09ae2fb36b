"""How a team shares work, and how many members it has: the rules alone with given numbers, and real teams."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from helpers.native_tapes import run_records
from naiad_kernels.linear import linear
from naiad_kernels.native.build import COMPILE_FLAGS, SOURCE_DIR, compiler
from naiad_kernels.native.library import Library, Team
from naiad_kernels.native.panels import NativeWeight

SHIM = Path(__file__).parent / "driver" / "team_rules.cpp"
# Runs of 100 ms: each is a window of its own.
WINDOW_NS = 100_000_000
Rule = Callable[..., list[int]]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The team's own code, without kernels."""
    folder = tmp_path_factory.mktemp("team")
    sources = [str(SHIM), str(SOURCE_DIR / "team.cpp")]
    command = [*compiler(), *COMPILE_FLAGS, "-fvisibility=default", "-shared", f"-I{SOURCE_DIR}", *sources]
    subprocess.run([*command, "-o", str(folder / "shim.so")], check=True)
    return ctypes.CDLL(str(folder / "shim.so"))


@pytest.fixture(scope="module")
def sizes_after(shim: ctypes.CDLL) -> Rule:
    """The team's size after each run, given the shares of time that its members waited."""

    def sizes(most: int, waits: Sequence[float], run_ns: int = WINDOW_NS) -> list[int]:
        found = (ctypes.c_int64 * len(waits))()
        given = (ctypes.c_double * len(waits))(*waits)
        shim.sizes(ctypes.c_int64(most), given, ctypes.c_int64(len(waits)), ctypes.c_int64(run_ns), found)
        return list(found)

    return sizes


def test_a_team_that_does_not_wait_stays_whole(sizes_after: Rule) -> None:
    assert set(sizes_after(4, [0.25] * 200)) == {4}


def test_a_short_wait_is_no_reason(sizes_after: Rule) -> None:
    """A window of many steps counts as a whole."""
    assert set(sizes_after(2, [0.9, 0.0, 0.0, 0.0, 0.0] * 4, WINDOW_NS // 5)) == {2}


def test_members_leave_one_by_one_while_the_team_waits(sizes_after: Rule) -> None:
    assert sizes_after(4, [0.5] * 3) == [3, 2, 1]


def test_a_member_comes_back_when_its_core_is_free(sizes_after: Rule) -> None:
    assert sizes_after(2, [0.5] + [0.0] * 6) == [1, 1, 1, 1, 1, 2, 2]
    assert set(sizes_after(2, [0.5] + [0.0] * 100)[5:]) == {2}


def test_members_come_back_one_after_the_other(sizes_after: Rule) -> None:
    sizes = sizes_after(3, [0.5, 0.5] + [0.0] * 20)
    assert sizes[:2] == [2, 1]
    assert sizes == sizes[:2] + sorted(sizes[2:])
    assert sizes[-1] == 3


def test_tries_in_vain_become_rare(sizes_after: Rule) -> None:
    """A team of two waits whenever it is two."""
    waits, sizes = [0.5], [1]
    while len(waits) < 400:
        waits.append(0.5 if sizes[-1] == 2 else 0.0)
        sizes = sizes_after(2, waits)
    tries = [index for index, size in enumerate(sizes) if size == 2]
    rests = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert rests[:3] == [11, 21, 41]
    assert set(rests[2:]) == {41}


def test_one_member_has_nobody_to_wait_for(sizes_after: Rule) -> None:
    assert set(sizes_after(1, [1.0] * 50)) == {1}


@pytest.mark.parametrize("team_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("least", "grain"), [(1, 1), (4, 4), (64, 1)])
def test_shares_are_all_of_the_things_in_order(
    shim: ctypes.CDLL, team_size: int, least: int, grain: int
) -> None:
    borders = (ctypes.c_int64 * (8 * team_size))()
    for count in (1, 2, 3, 5, 18, 36, 97, 1000):
        num_shares = shim.shares(
            *(ctypes.c_int64(each) for each in (count, least, grain, team_size)), borders
        )
        assert 1 <= num_shares <= (4 * team_size if team_size > 1 else 1)
        firsts, ends = list(borders[: 2 * num_shares : 2]), list(borders[1 : 2 * num_shares : 2])
        assert [0, *ends] == [*firsts, count]
        sizes = [end - first for first, end in zip(firsts, ends, strict=True)]
        assert all(size >= 0 for size in sizes)
        if grain == 1 and count >= least * num_shares:
            # As equal as can be, and none too small to be worth it.
            assert min(sizes) >= least
            assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize("team_size", [1, 2, 5, 16])
def test_each_thing_is_computed_once_and_stages_follow_each_other(shim: ctypes.CDLL, team_size: int) -> None:
    """Members sleep in the midst of shares, and there are more of them than cores."""
    draw = random.Random(team_size)
    things = [draw.choice((1, 2, 7, 40, 300)) for _ in range(60)]
    stages = (ctypes.c_int64 * len(things))(*things)
    right = shim.right_runs(
        ctypes.c_int64(team_size), ctypes.c_int64(40), stages, ctypes.c_int64(len(things))
    )
    assert right == 40


@pytest.mark.parametrize("team_size", [2, 3])
def test_a_real_team_gets_smaller_while_it_waits(shim: ctypes.CDLL, team_size: int) -> None:
    assert shim.size_after_waiting(ctypes.c_int64(team_size)) == team_size - 1


def test_waits_before_a_team_adapts_do_not_count(shim: ctypes.CDLL) -> None:
    assert shim.size_after_earlier_waits() == 2


def test_the_rest_of_a_member_that_was_left_out_is_no_wait(shim: ctypes.CDLL) -> None:
    assert shim.size_after_a_rest() == 2


def test_members_that_are_left_help_each_other(shim: ctypes.CDLL) -> None:
    assert shim.shares_of_a_slow_member() in (1, 2)


@pytest.fixture
def weight() -> NativeWeight:
    return NativeWeight.of(torch.randn(2048, 512, generator=torch.Generator().manual_seed(3)), None)


def product(team: Team, weight: NativeWeight, x: torch.Tensor) -> torch.Tensor:
    return run_records(team, lambda _, x: linear(x, weight), x)


def test_results_do_not_change_with_the_size(library: Library, weight: NativeWeight) -> None:
    """Far more threads than cores: members wait for each other, and the team changes its size meanwhile."""
    x = torch.randn(24, 512, generator=torch.Generator().manual_seed(4))
    expected = product(library.new_team(1), weight, x)
    team = library.new_team(2 * (os.cpu_count() or 1) + 1)
    team.adapt(True)
    for _ in range(300):
        assert torch.equal(product(team, weight, x), expected)
        assert 1 <= team.size <= team.num_threads
    team.adapt(False)
    assert team.size == team.num_threads
    assert torch.equal(product(team, weight, x), expected)


@pytest.fixture
def _own_cores() -> Iterator[None]:
    """A pinned team moves the thread that calls it."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


def processor_ticks(tasks: Iterable[str]) -> int:
    """Processor time that threads of this process have used, in the kernel's ticks."""
    stats = [Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split() for task in tasks]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats)


def test_members_sleep_while_there_is_nothing_to_do(library: Library, weight: NativeWeight) -> None:
    """They spin for a moment after a run, which takes a tick every 10 ms, and no longer."""
    tasks = Path("/proc/self/task")
    before = {path.name for path in tasks.iterdir()}
    team = library.new_team(3)
    started = {path.name for path in tasks.iterdir()} - before
    assert len(started) == 2
    for _ in range(3):
        product(team, weight, torch.ones(64, 512))

    time.sleep(0.2)
    used = processor_ticks(started)
    time.sleep(0.3)
    assert processor_ticks(started) == used


@pytest.mark.usefixtures("_own_cores")
def test_a_pinned_team_stays_on_its_cores(library: Library, weight: NativeWeight) -> None:
    x = torch.ones(2, 512)
    core = max(os.sched_getaffinity(0))
    tasks = Path("/proc/self/task")
    before = {path.name for path in tasks.iterdir()}
    team = library.new_team(2)
    started = {path.name for path in tasks.iterdir()} - before
    team.pin([core, core])
    assert [os.sched_getaffinity(int(task)) for task in started] == [{core}]
    assert torch.equal(product(team, weight, x), product(library.new_team(1), weight, x))
    assert os.sched_getaffinity(0) == {core}


def test_a_core_that_does_not_exist_is_refused(library: Library) -> None:
    team = library.new_team(2)
    for core in (-1, 1023, 1 << 20):
        with pytest.raises(OSError, match=f"cannot be pinned to the cores .*{core}"):
            team.pin([0, core])
