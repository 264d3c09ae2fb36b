"""Weights kept for the next start: used only if nothing has changed, and equal to the last bit."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import CASES, SIZES
from helpers.quantised_checkpoints import write_checkpoint
from helpers.tiny_models import ARCHITECTURES, make_tiny_model
from naiad.config import ModelConfig
from naiad.errors import ModelError
from naiad.models import load_model, packed_weights, registry
from naiad.models.checkpoint_cache import CheckpointCache
from naiad.models.decoder import DecoderModel
from naiad.models.whole_file import remove_left_parts, replace_file
from naiad_kernels.linear import LoadOptions

OPTIONS = {
    "float32": LoadOptions(torch.float32, native=True),
    "bfloat16": LoadOptions(torch.bfloat16, native=True),
}
# Weights of a model of `SIZES`, in its projections and in its embedding.
NUM_PROJECTIONS = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 192)
NUM_TABLE = 128 * 64


@pytest.fixture(autouse=True)
def user_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user_cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path)
    return tmp_path


def load(directory: Path, options: LoadOptions = OPTIONS["float32"], *, keeps: bool = True) -> DecoderModel:
    cache = CheckpointCache(directory) if keeps else None
    return load_model(str(directory), ModelConfig.from_directory(directory), options, cache)


def tensors(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """All tensors and numbers of a model, by their places."""
    if isinstance(value, (torch.Tensor, int, float)):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from tensors(each, f"{place}[{index}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from tensors(each, f"{place}.{name}")


def assert_same(actual: DecoderModel, expected: DecoderModel) -> None:
    found, wanted = dict(tensors(vars(actual))), dict(tensors(vars(expected)))
    assert found.keys() == wanted.keys()
    assert len(found) > 20
    for place, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[place].dtype == value.dtype, place
            assert torch.equal(found[place], value), place
        else:
            assert type(found[place]) is type(value), place
            assert found[place] == value, place


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.weights"))


def is_reused(directory: Path, options: LoadOptions = OPTIONS["float32"]) -> bool:
    return packed_weights.from_packed(CheckpointCache(directory), options, lambda kept: kept) is not None


def change_a_weight(model_dir: Path) -> None:
    """Change one bit of a weight; sizes and the time of modification stay."""
    path = model_dir / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize("dtype", OPTIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kept_weights_are_the_checkpoints(
    tmp_path: Path, architecture: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path, architecture, max_shard_size="30KB")
    plain = load(tmp_path, OPTIONS[dtype], keeps=False)
    assert not (tmp_path / ".naiad").exists()
    assert_same(load(tmp_path, OPTIONS[dtype]), plain)
    # From now on there is no reading of the checkpoint.
    monkeypatch.setattr(registry, "Checkpoint", None)
    monkeypatch.setattr(packed_weights, "Checkpoint", None)
    assert_same(load(tmp_path, OPTIONS[dtype]), plain)
    assert_same(load(tmp_path, OPTIONS[dtype]), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_16_bits_is_kept_in_them_for_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    make_tiny_model(tmp_path).to(dtype).save_pretrained(tmp_path)
    plain = load(tmp_path, keeps=False)
    for _ in range(2):
        assert_same(load(tmp_path), plain)
    named = dict(tensors(vars(plain)))
    assert named["._embedding.table"].dtype == named["._lm_head.panels"].dtype == dtype
    # The same numbers, stored in 32 bits.
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(path).items()}, path)
    assert_same(load(tmp_path), plain)


def test_the_users_cache_is_left_alone_if_it_is_not_needed(model_dir: Path, user_cache: Path) -> None:
    for _ in range(2):
        load(model_dir)
    assert not list(user_cache.iterdir())


def test_both_dtypes_are_kept_beside_each_other(model_dir: Path) -> None:
    for options in OPTIONS.values():
        load(model_dir, options)
    assert len(weight_files(model_dir)) == 2
    assert all(is_reused(model_dir, options) for options in OPTIONS.values())


@pytest.mark.parametrize("is_replaced", [False, True], ids=["in place", "another file"])
def test_a_changed_checkpoint_is_never_served_from_a_stale_file(model_dir: Path, is_replaced: bool) -> None:
    load(model_dir)
    assert is_reused(model_dir)
    stale = weight_files(model_dir)[0].read_bytes()
    if is_replaced:
        copy = model_dir / "copy"
        shutil.copytree(model_dir, copy, ignore=shutil.ignore_patterns("copy"))
        change_a_weight(copy)
        os.replace(copy / "model.safetensors", model_dir / "model.safetensors")
        shutil.rmtree(copy)
    else:
        change_a_weight(model_dir)
    assert not is_reused(model_dir)
    assert_same(load(model_dir), load(model_dir, keeps=False))
    assert is_reused(model_dir)
    assert [path.read_bytes() != stale for path in weight_files(model_dir)] == [True]


def test_a_change_within_the_same_tick_of_the_clock_is_seen(model_dir: Path) -> None:
    for _ in range(20):
        load(model_dir)
        change_a_weight(model_dir)
        assert not is_reused(model_dir)


def test_another_config_is_another_checkpoint(model_dir: Path) -> None:
    load(model_dir)
    config = model_dir / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert not is_reused(model_dir)


def test_other_code_is_another_file(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    load(model_dir)
    code = tmp_path_factory.mktemp("code")
    monkeypatch.setattr(packed_weights, "_CODE", (*packed_weights._CODE, code))
    for place in ("panels.py", "deep/er/panels.py"):
        (code / place).parent.mkdir(parents=True, exist_ok=True)
        (code / place).write_text("# another layout\n")
        assert not is_reused(model_dir)
        load(model_dir)
        assert is_reused(model_dir)
    assert len(weight_files(model_dir)) == 1


def test_another_library_that_reads_gguf_files_is_another_file(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model_dir)
    monkeypatch.setattr(metadata, "version", lambda name: f"another {name}")
    assert not is_reused(model_dir)


_PACK = """
import sys
from naiad.config import ModelConfig
from naiad.models import load_model
from naiad.models.checkpoint_cache import CheckpointCache
from naiad_kernels.linear import LoadOptions
for path in sys.argv[1:]:
    options = LoadOptions(native=True, quantization="int4")
    load_model(path, ModelConfig.from_directory(path), options, CheckpointCache(path))
rooms = ("naiad.models.", "naiad.config.", "naiad.gguf.", "naiad_kernels.")
for name, module in sys.modules.items():
    if f"{name}.".startswith(rooms): print(module.__file__)
"""


def test_all_code_that_packs_decides_about_a_file(tmp_path: Path) -> None:
    """A quantised checkpoint and a GGUF file reach all of it."""
    model = make_tiny_model(tmp_path / "plain", **SIZES)
    write_gguf(tmp_path / "model.gguf", model, "Q4_0")
    writer, config = CASES["gptq 2 bits"]
    write_checkpoint(
        tmp_path / "plain",
        tmp_path / "model",
        lambda layer: None if layer == "lm_head" else writer,
        config,
    )
    paths = [str(tmp_path / name) for name in ("plain", "model", "model.gguf")]
    run = subprocess.run(
        [sys.executable, "-c", _PACK, *paths], capture_output=True, text=True, check=True, timeout=120
    )
    imported = {Path(line) for line in run.stdout.splitlines()}
    names = {path.name for path in imported}
    assert {"gptq.py", "gguf_source.py", "cursor.py", "nibbles.py", "library.py", "kept.py"} <= names
    assert len(weight_files(tmp_path)) == 3
    covered = {path for folder in packed_weights._CODE for path in folder.rglob("*.py")}
    assert imported <= covered


def flip(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 16
    return bytes(changed)


DAMAGES = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:50],
    "cut": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "a bit of the header": lambda content: flip(content, 20),
    "a bit of a weight": lambda content: flip(content, len(content) // 2),
    "a bit of the table": lambda content: flip(content, len(content) - 10),
    "foreign": lambda content: b"\x7fELF" + content[4:],
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_and_replaced(model_dir: Path, damage: Any) -> None:
    load(model_dir)
    (path,) = weight_files(model_dir)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert not is_reused(model_dir)
    assert_same(load(model_dir), load(model_dir, keeps=False))
    assert is_reused(model_dir)
    assert path.read_bytes() == whole


def test_the_file_of_another_checkpoint_is_refused(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    make_tiny_model(other, seed=1)
    load(other)
    shutil.copytree(other / ".naiad", model_dir / ".naiad")
    assert not is_reused(model_dir)
    assert_same(load(model_dir), load(model_dir, keeps=False))


def test_a_copied_checkpoint_brings_its_file_along(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    load(model_dir)
    copy = tmp_path_factory.mktemp("copies") / "copy"
    shutil.copytree(model_dir, copy)
    assert is_reused(copy)


@pytest.mark.parametrize("obstacle", ["a file", "open to all"])
def test_the_users_cache_is_used_where_the_directory_cannot_be_written(
    model_dir: Path, user_cache: Path, obstacle: str
) -> None:
    if obstacle == "a file":
        (model_dir / ".naiad").touch()
    else:
        (model_dir / ".naiad").mkdir()
        (model_dir / ".naiad").chmod(0o777)
    plain = load(model_dir, keeps=False)
    for _ in range(2):
        assert_same(load(model_dir), plain)
    assert is_reused(model_dir)
    assert not weight_files(model_dir)
    (path,) = weight_files(user_cache)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    change_a_weight(model_dir)
    assert not is_reused(model_dir)


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_directory_stays_as_it_is(model_dir: Path, user_cache: Path) -> None:
    model_dir.chmod(0o500)
    try:
        load(model_dir)
        assert is_reused(model_dir)
    finally:
        model_dir.chmod(0o700)
    assert weight_files(user_cache)
    assert not (model_dir / ".naiad").exists()


def test_where_nothing_can_be_kept_the_checkpoint_is_served(
    model_dir: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (model_dir / ".naiad").touch()
    user_cache.rmdir()
    user_cache.touch()
    with caplog.at_level(logging.WARNING):
        assert_same(load(model_dir), load(model_dir, keeps=False))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the weights are not kept for the next start: neither")


def test_a_full_disk_leaves_nothing(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_weights, "_MAX_GROWTH", 0)
    monkeypatch.setattr(packed_weights, "_MAX_PADDING_BYTES", 1 << 13)
    assert_same(load(model_dir), load(model_dir, keeps=False))
    assert "larger than was expected" in caplog.text
    assert [path.name for path in (model_dir / ".naiad").iterdir() if "weights" in path.name] == []


@pytest.mark.parametrize(
    ("options", "needed_bytes"),
    [
        (LoadOptions(torch.float32, native=True), 4 * (NUM_PROJECTIONS + 2 * NUM_TABLE)),
        (LoadOptions(torch.bfloat16, native=True), 2 * (NUM_PROJECTIONS + 2 * NUM_TABLE)),
        (LoadOptions(torch.float32, native=True, quantization="int8"), NUM_PROJECTIONS + 5 * NUM_TABLE),
        (
            LoadOptions(torch.bfloat16, native=True, quantization="int4"),
            NUM_PROJECTIONS * 5 // 8 + 3 * NUM_TABLE,
        ),
    ],
)
def test_as_much_must_be_free_as_the_file_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: LoadOptions,
    needed_bytes: int,
) -> None:
    write_gguf(tmp_path / "model.gguf", make_tiny_model(tmp_path / "model", **SIZES), "Q4_0")
    needed_bytes = int(1.1 * needed_bytes) + packed_weights._SPARE_BYTES
    free = SimpleNamespace(free=needed_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    load(tmp_path / "model.gguf", options)
    assert not weight_files(tmp_path)
    assert re.search(
        r"not kept .*: the packed weights take about 0\.0 GiB, for which 0\.5 GiB should be free", caplog.text
    )
    free.free += 1
    load(tmp_path / "model.gguf", options)
    assert weight_files(tmp_path)


def test_what_killed_starts_have_left_is_removed(model_dir: Path) -> None:
    folder = model_dir / ".naiad"
    folder.mkdir(mode=0o700)
    killed = subprocess.Popen(
        [sys.executable, "-c", _WRITE, str(folder / "float32.weights")], stdout=subprocess.PIPE
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"open\n"
    (part,) = folder.glob(".*.part")
    load(model_dir)
    assert part.exists()
    killed.kill()
    killed.wait()
    weight_files(model_dir)[0].unlink()
    load(model_dir)
    assert not list(folder.glob(".*.part"))
    assert len(weight_files(model_dir)) == 1


_WRITE = """
import sys, time
from pathlib import Path
from naiad.models.whole_file import written_whole
with written_whole(Path(sys.argv[1])):
    print("open", flush=True)
    time.sleep(600)
"""


def test_parts_that_are_written_survive_those_who_remove(tmp_path: Path) -> None:
    """Also a part that has just been created and is not locked yet."""
    stops = threading.Event()

    def remove() -> None:
        while not stops.is_set():
            remove_left_parts(tmp_path)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for number in range(300):
            replace_file(tmp_path / "file", b"%d" % number)
            assert (tmp_path / "file").read_bytes() == b"%d" % number
    finally:
        stops.set()
        thread.join()


def test_only_own_parts_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.part").touch()
    (tmp_path / ".folder.part").mkdir()
    (tmp_path / ".link.part").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").touch()
    remove_left_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".folder.part", ".link.part", "kept"]


def test_another_release_writes_the_same_file(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an older one's is not left, even if that had other options."""
    load(model_dir)
    monkeypatch.setattr(LoadOptions, "__repr__", lambda self: "LoadOptions(with another field)")
    assert not is_reused(model_dir)
    load(model_dir)
    assert is_reused(model_dir)
    assert len(weight_files(model_dir)) == 1


def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = packed_weights.PackingCheckpoint.finish

    def finish_late(self: packed_weights.PackingCheckpoint) -> None:
        finish(self)
        change_a_weight(model_dir)

    monkeypatch.setattr(packed_weights.PackingCheckpoint, "finish", finish_late)
    assert_same(load(model_dir), load(model_dir, keeps=False))
    assert not weight_files(model_dir)


def test_a_bad_checkpoint_leaves_nothing(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    found = load_file(path)
    del found["model.norm.weight"]
    save_file(found, path)
    with pytest.raises(ModelError, match=r"model\.norm\.weight' is missing"):
        load(model_dir)
    assert not weight_files(model_dir)
    assert not list(model_dir.rglob("*.part"))


def test_who_may_not_read_the_checkpoint_may_not_read_the_file(model_dir: Path) -> None:
    source = model_dir / "model.safetensors"
    for mode, expected in ((0o600, 0o600), (0o644, 0o644), (0o640, 0o640)):
        source.chmod(mode)
        for path in weight_files(model_dir):
            path.unlink()
        load(model_dir)
        assert stat.S_IMODE(weight_files(model_dir)[0].stat().st_mode) == expected


_LOAD = """
import sys
from pathlib import Path
from naiad.config import ModelConfig
from naiad.models import load_model
from naiad.models.checkpoint_cache import CheckpointCache
from naiad_kernels.linear import LoadOptions
path = sys.argv[1]
print("imported", flush=True)
sys.stdin.readline()
for _ in range(5):
    for each in CheckpointCache(path).find("float32.weights"): each.unlink(missing_ok=True)
    load_model(path, ModelConfig.from_directory(path), LoadOptions(native=True), CheckpointCache(path))
"""


def test_two_processes_may_write_at_once(model_dir: Path) -> None:
    plain = load(model_dir, keeps=False)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOAD, str(model_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"imported\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert [process.wait(120) for process in processes] == [0, 0]
    assert is_reused(model_dir)
    assert_same(load(model_dir), plain)
    assert not list(model_dir.rglob("*.part"))


@pytest.mark.parametrize("dtype", OPTIONS)
def test_weights_of_a_gguf_file_are_kept_beside_it(tmp_path: Path, dtype: str) -> None:
    model = make_tiny_model(tmp_path / "model", **SIZES)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "Q4_0")
    plain = load(path, OPTIONS[dtype], keeps=False)
    assert_same(load(path, OPTIONS[dtype]), plain)
    assert is_reused(path, OPTIONS[dtype])
    assert_same(load(path, OPTIONS[dtype]), plain)
    assert len(weight_files(tmp_path / ".model.gguf.naiad")) == 1
    write_gguf(path, model, "Q8_0")
    assert not is_reused(path, OPTIONS[dtype])


@pytest.mark.parametrize("case", ["gptq 2 bits", "packed 3 bits dense", "fp8 blocks, ragged"])
def test_quantised_weights_are_kept_as_they_were_computed(tmp_path: Path, case: str) -> None:
    make_tiny_model(tmp_path / "plain", **SIZES)
    writer, config = CASES[case]
    directory = tmp_path / "model"
    write_checkpoint(
        tmp_path / "plain", directory, lambda layer: None if layer == "lm_head" else writer, config
    )
    plain = load(directory, keeps=False)
    assert_same(load(directory), plain)
    assert is_reused(directory)
    assert_same(load(directory), plain)
