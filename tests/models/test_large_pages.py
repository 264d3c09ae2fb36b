"""Weights in large pages: the same numbers at the same addresses, as long as there is enough memory."""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.numa_maps import REASON, policy_at, tells_of_nodes
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig, ModelConfig
from naiad.model_runner import ModelRunner, model_runner
from naiad.models import large_pages, load_model
from naiad.models.array_file import ArrayFile, ArrayWriter
from naiad.models.checkpoint_cache import CheckpointCache
from naiad.models.large_pages import LargePages, has_large_pages, own_memory
from naiad.models.llama import LlamaModel
from naiad.models.memory_nodes import MemoryNodes
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.panels import NativeWeight

OPTIONS = LoadOptions(torch.bfloat16, native=True)
GIB = 1 << 30
LARGE = 2 << 20
NUM_BYTES = 100_000_000


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path)
    return tmp_path


def mapped_from(tensor: torch.Tensor) -> str:
    """The file that a tensor is mapped from; empty: memory of the process's own."""
    return mapping_at(tensor.data_ptr())[1]


def flags_of(tensor: torch.Tensor) -> list[str]:
    """The kernel's flags of the mapping that a tensor begins in."""
    address, is_here = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(match[1], 16) <= address < int(match[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def large_bytes_of(tensor: torch.Tensor) -> int:
    """How much of the mapping that a tensor begins in lies in large pages."""
    address, is_here = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(match[1], 16) <= address < int(match[2], 16)
        elif is_here and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


def collapses() -> bool:
    """Whether the system can replace small pages by a large one when it is asked to."""
    memory = own_memory(2 * LARGE)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE
    try:
        memory.madvise(25, begin, LARGE)
    except OSError:
        return False
    return has_large_pages()


def permissions(address: int) -> str:
    return mapping_at(address)[0]


def mapping_at(address: int) -> tuple[str, str]:
    """Permissions and file of what is mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)", line)
        assert match is not None, line
        if int(match[1], 16) <= address < int(match[2], 16):
            return match[3], match[4]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def parts_of(thing: object) -> Iterator[object]:
    """All that a model consists of."""
    yield thing
    if isinstance(thing, list | tuple):
        parts = list(thing)
    elif isinstance(thing, NativeWeight):
        parts = []
    elif dataclasses.is_dataclass(thing):
        parts = [getattr(thing, each.name) for each in dataclasses.fields(thing)]
    else:
        parts = list(vars(thing).values()) if isinstance(thing, LlamaModel) else []
    for part in parts:
        yield from parts_of(part)


def kind_of(tensor: torch.Tensor) -> list[bool]:
    """For each large page of a tensor's memory whether it is the process's own, not a file's."""
    return [mapped_from(tensor[at:]) == "" for at in range(0, tensor.nbytes, LARGE)]


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """A file of 100 MB in memory, which begins and ends within large pages."""
    path = tmp_path / "array"
    with path.open("w+b") as file:
        writer = ArrayWriter(file, "key", 128 << 20)
        writer.add("before", torch.zeros(5, dtype=torch.uint8))
        numbers = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8)
        writer.add("first", numbers)
        writer.add("second", torch.arange(7, dtype=torch.int32))
        writer.finish()
    memory = ArrayFile(path).bytes_from("first")
    assert memory.nbytes == -(-NUM_BYTES // 4096) * 4096 + 7 * 4
    assert torch.equal(memory[:NUM_BYTES], numbers)
    return memory


def num_whole_pages(tensor: torch.Tensor) -> int:
    return (tensor.nbytes - -tensor.data_ptr() % LARGE) // LARGE


def moved(tensor: torch.Tensor, pages: LargePages) -> list[bool]:
    """Move a tensor, which changes neither its address nor its content; say which pages are moved."""
    before, address = tensor.clone(), tensor.data_ptr()
    pages.move(tensor)
    pages.wait()
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, before)
    assert pages.num_reserved_bytes == 0
    # The first and the last page are partly somebody else's.
    first = -address % LARGE
    middle = tensor[first : first + num_whole_pages(tensor) * LARGE]
    assert mapped_from(tensor[-1:]) != ""
    return kind_of(middle)


def test_whole_large_pages_are_moved(mapped: torch.Tensor) -> None:
    assert moved(mapped, LargePages(lambda: 64 * GIB)) == [True] * num_whole_pages(mapped)


def test_nothing_is_moved_where_memory_is_short(mapped: torch.Tensor) -> None:
    assert not any(moved(mapped, LargePages(lambda: GIB // 2)))


def test_no_more_is_moved_once_memory_is_short(mapped: torch.Tensor) -> None:
    available = [2 * GIB, GIB // 2, 2 * GIB]
    kinds = moved(mapped, LargePages(lambda: available.pop(0)))
    assert kinds == [True] * 16 + [False] * (len(kinds) - 16)


def test_no_more_is_moved_once_it_is_stopped(mapped: torch.Tensor) -> None:
    def available_bytes() -> int:
        pages.stop()
        return 64 * GIB

    pages = LargePages(available_bytes)
    kinds = moved(mapped, pages)
    assert kinds == [True] * 16 + [False] * (len(kinds) - 16)


def test_a_closed_runner_moves_no_more(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []
    monkeypatch.setattr(LargePages, "stop", lambda pages: stopped.append(pages))
    runner = ModelRunner(EngineConfig(model_dir=str(model_dir), kv_cache_bytes=1 << 20))
    assert not stopped
    runner.close()
    assert len(stopped) == 1


def test_what_the_system_refuses_stays_mapped(
    mapped: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOMEM, "memory cannot be moved")

    monkeypatch.setattr(large_pages, "_move_piece", refuse)
    with caplog.at_level(logging.INFO):
        assert not any(moved(mapped, LargePages(lambda: 64 * GIB)))
    assert "weights stay in small pages" in caplog.text


def test_memory_is_reserved_for_all_that_is_moved_as_far_as_it_will_be_taken(mapped: torch.Tensor) -> None:
    may_go_on, available = threading.Event(), [64 * GIB]

    def available_bytes() -> int:
        if threading.current_thread().name == "large-pages":
            may_go_on.wait()
        return available[0]

    pages = LargePages(available_bytes)
    parts = mapped[: 40 << 20], mapped[40 << 20 : 60 << 20]
    for part in parts:
        pages.move(part)
    assert pages.num_reserved_bytes == 60 << 20
    # 512 MiB stay available.
    for left, reserved in ((GIB // 2 + 5, 5), (GIB // 4, 0)):
        available[0] = left
        assert pages.num_reserved_bytes == reserved
    available[0] = 64 * GIB
    may_go_on.set()
    pages.wait()
    assert pages.num_reserved_bytes == 0


def test_a_copy_takes_its_place_also_if_that_fails_at_first(
    mapped: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, tries = large_pages._put, []

    def put_later(*arguments: Any) -> bool:
        tries.append(arguments)
        return len(tries) > 2 and put(*arguments)

    monkeypatch.setattr(large_pages, "_put", put_later)
    assert all(moved(mapped, LargePages(lambda: 64 * GIB)))


def test_a_copy_that_cannot_take_its_place_is_given_back(
    mapped: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pages, "_put", lambda *arguments: False)
    num_before = len(Path("/proc/self/maps").read_text().splitlines())
    assert not any(moved(mapped, LargePages(lambda: 64 * GIB)))
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= num_before + 2


def test_without_a_thread_everything_stays(mapped: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(large_pages.threading.Thread, "start", refuse)
    pages = LargePages(lambda: 64 * GIB)
    pages.move(mapped)
    pages.wait()
    assert not any(kind_of(mapped))


def test_less_than_a_large_page_is_left_alone(mapped: torch.Tensor) -> None:
    part = mapped[: LARGE - 1]
    pages = LargePages(lambda: 64 * GIB)
    pages.move(part)
    pages.wait()
    assert mapped_from(part) != ""
    assert pages.num_reserved_bytes == 0


@pytest.mark.skipif(not tells_of_nodes(), reason=REASON)
def test_on_several_nodes_the_moved_memory_is_spread(mapped: torch.Tensor) -> None:
    """The system leaves out nodes that the machine does not have."""
    moved(mapped, LargePages(lambda: 64 * GIB, MemoryNodes([0, 1])))
    assert policy_at(mapped.data_ptr() + -mapped.data_ptr() % LARGE) == "interleave"


def test_the_moved_memory_cannot_be_written(mapped: torch.Tensor) -> None:
    moved(mapped, LargePages(lambda: 64 * GIB))
    address = mapped.data_ptr() + LARGE
    assert permissions(address) == "r--p"


def test_readers_see_the_same_numbers_meanwhile(mapped: torch.Tensor) -> None:
    expected = mapped.clone()
    pages = LargePages(lambda: 64 * GIB)
    pages.move(mapped)
    num_read = 0
    while pages.num_reserved_bytes or not num_read:
        assert torch.equal(mapped, expected)
        num_read += 1
    pages.wait()
    assert torch.equal(mapped, expected)


def test_memory_that_is_being_written_gets_large_pages() -> None:
    memory = torch.frombuffer(own_memory(16 * LARGE), dtype=torch.uint8)
    starts = [memory.data_ptr() + place * LARGE for place in (1, 5, 15)]
    pages = LargePages()
    memory[5 * LARGE : 5 * LARGE + 100] = 7
    pages.enlarge(memory, starts)
    for place in range(0, memory.nbytes, 4096):
        memory[place] = 1 + place % 251
    pages.wait()
    expected = torch.zeros_like(memory)
    expected[5 * LARGE : 5 * LARGE + 100] = 7
    expected[::4096] = torch.tensor([1 + place % 251 for place in range(0, memory.nbytes, 4096)])
    assert torch.equal(memory, expected)
    if has_large_pages():
        assert "hg" in flags_of(memory)
    if collapses():
        # All of it was written in small pages or had large ones later; two of the three lie wholly inside.
        assert large_bytes_of(memory) >= 2 * LARGE


def test_pages_at_the_ends_of_memory_that_belong_to_others_are_left_alone() -> None:
    memory = torch.frombuffer(own_memory(LARGE + 4096), dtype=torch.uint8)
    pages = LargePages()
    pages.enlarge(memory, [memory.data_ptr(), memory.data_ptr() + memory.nbytes - 1])
    pages.wait()
    assert not memory.any()


@pytest.mark.parametrize("start", ["first", "later"])
def test_what_a_start_moves_are_the_panels_of_all_weights(model_dir: Path, start: str) -> None:
    given: list[torch.Tensor] = []

    class Seen(LargePages):
        def move(self, tensor: torch.Tensor) -> None:
            given.append(tensor)

    for _ in range(1 if start == "first" else 2):
        given.clear()
        cache = CheckpointCache(model_dir)
        model = load_model(str(model_dir), ModelConfig.from_directory(model_dir), OPTIONS, cache, Seen())
    (memory,) = given
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    weights = [each for each in parts_of(model) if isinstance(each, NativeWeight)]
    assert len(weights) > 4
    for weight in weights:
        assert begin <= weight.panels.data_ptr() < weight.panels.data_ptr() + weight.panels.nbytes <= end
        assert mapped_from(weight.panels).endswith(".weights")
    assert begin == min(each.panels.data_ptr() for each in weights)


@pytest.mark.parametrize(
    ("wanted", "setting", "expected"),
    [(True, "always [madvise] never", 1), (True, "always madvise [never]", 0), (False, "[always]", 0)],
)
def test_the_engine_moves_weights_if_it_may_and_can(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wanted: bool,
    setting: str,
    expected: int,
) -> None:
    file = tmp_path / "enabled"
    file.write_text(setting)
    given = []

    class Seen(LargePages):
        def move(self, tensor: torch.Tensor) -> None:
            given.append(tensor)

    monkeypatch.setattr(model_runner, "has_large_pages", lambda: has_large_pages(file))
    monkeypatch.setattr(model_runner, "LargePages", Seen)
    config = EngineConfig(
        model_dir=str(model_dir), cpu_kernels="native", large_pages=wanted, kv_cache_bytes=1 << 20
    )
    ModelRunner(config)
    assert len(given) == expected


def test_a_system_without_large_pages_has_none(tmp_path: Path) -> None:
    assert not has_large_pages(tmp_path / "enabled")
