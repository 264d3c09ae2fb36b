"""Array files: what is written is read, and nothing that is damaged is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.array_files import replace_table, table_of
from naiad.models.array_file import PAGE_BYTES, ArrayFile, ArrayFileError, ArrayWriter

ARRAYS = {
    "one": torch.arange(35, dtype=torch.float32).view(5, 7),
    "two": torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "three": torch.tensor([-128, 127, 3], dtype=torch.int8),
}
HEADER_BYTES = 32 + 32 + 32


def write(path: Path, key: str = "key", max_bytes: int = 1 << 20) -> None:
    with path.open("w+b") as file:
        writer = ArrayWriter(file, key, max_bytes)
        for name, array in ARRAYS.items():
            assert torch.equal(writer.add(name, array), array)
        writer.notes["one"] = {"in_features": 7, "class": "Any"}
        writer.finish()


def test_arrays_and_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path / "file")
    file = ArrayFile(tmp_path / "file")
    assert file.key == "key"
    assert file.notes == {"one": {"in_features": 7, "class": "Any"}}
    assert set(file.names) == set(ARRAYS)
    for name, array in ARRAYS.items():
        read = file.array(name)
        assert read.dtype == array.dtype
        assert torch.equal(read, array)
        assert read.data_ptr() % PAGE_BYTES == 0
    assert (tmp_path / "file").stat().st_size < 6 * PAGE_BYTES


def test_arrays_outlive_their_file(tmp_path: Path) -> None:
    write(tmp_path / "file")
    array = ArrayFile(tmp_path / "file").array("one")
    (tmp_path / "file").unlink()
    assert torch.equal(array, ARRAYS["one"])


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_a_flipped_bit_in_the_header_is_seen(tmp_path: Path, place: int) -> None:
    write(tmp_path / "file")
    content = bytearray((tmp_path / "file").read_bytes())
    content[place] ^= 4
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ArrayFileError):
        ArrayFile(tmp_path / "file")


def test_a_table_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content.replace(b'"three"', b'"thre\xff"'))
    with pytest.raises(ArrayFileError, match="damaged"):
        ArrayFile(tmp_path / "file")


@pytest.mark.parametrize("num_bytes", [0, 1, 63, PAGE_BYTES, -1])
def test_a_cut_file_is_refused(tmp_path: Path, num_bytes: int) -> None:
    write(tmp_path / "file")
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:num_bytes])
    with pytest.raises(ArrayFileError):
        ArrayFile(tmp_path / "file")


def test_an_unfinished_file_and_a_longer_one_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        ArrayWriter(file, "key", 1 << 20).add("one", ARRAYS["one"])
    with pytest.raises(ArrayFileError, match="no array file"):
        ArrayFile(tmp_path / "file")
    write(tmp_path / "file")
    with (tmp_path / "file").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ArrayFileError, match="incomplete"):
        ArrayFile(tmp_path / "file")


def test_more_arrays_than_were_announced_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        writer = ArrayWriter(file, "key", PAGE_BYTES)
        with pytest.raises(OSError, match="larger than was expected"):
            writer.add("one", torch.zeros(10 * PAGE_BYTES, dtype=torch.int8))


def lie(array: str, field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        table["arrays"][array][field] = value

    return change


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a negative dimension": lie("one", "shape", [-5, 7]),
    "two negative dimensions": lie("one", "shape", [-5, -7]),
    "a dimension of zero": lie("one", "shape", [0, 7]),
    "too many dimensions": lie("one", "shape", [1] * 9),
    "a shape beyond the file": lie("one", "shape", [1 << 40, 7]),
    "a shape beyond all numbers": lie("one", "shape", [1 << 62, 1 << 62]),
    "a shape into the next array": lie("one", "shape", [PAGE_BYTES // 4 + 1]),
    "the last array into the table": lie("three", "shape", [4]),
    "a place before the file": lie("one", "offset", -PAGE_BYTES),
    "a place in the header": lie("one", "offset", 0),
    "a place beyond the file": lie("one", "offset", 1 << 40),
    "a place beyond all numbers": lie("one", "offset", 1 << 80),
    "a place off the pages": lie("one", "offset", PAGE_BYTES + 4),
    "the place of another array": lie("one", "offset", 2 * PAGE_BYTES),
    "an unknown dtype": lie("one", "dtype", "float64"),
    "a number as the dtype": lie("one", "dtype", 7),
    "no arrays": lambda table: table.pop("arrays"),
    "arrays in a list": lambda table: table.update(arrays=[]),
    "notes that are too deep": lambda table: table.update(notes={"one": {"two": {}}}),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_a_table_that_lies_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    write(tmp_path / "file")
    table = table_of(tmp_path / "file")
    replace_table(tmp_path / "file", json.dumps(table).encode())
    ArrayFile(tmp_path / "file")
    change(table)
    replace_table(tmp_path / "file", json.dumps(table).encode())
    with pytest.raises(ArrayFileError, match="its table"):
        ArrayFile(tmp_path / "file")


@pytest.mark.parametrize(
    "table", [b"", b"{", b"[" * 100_000, b'{"other":' + b"[" * 200_000, b" " * ((16 << 20) + 1)]
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, table: bytes) -> None:
    write(tmp_path / "file")
    replace_table(tmp_path / "file", table)
    with pytest.raises(ArrayFileError, match="its table"):
        ArrayFile(tmp_path / "file")


def test_an_array_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file")
    with pytest.raises(ArrayFileError, match="no array 'four'"):
        ArrayFile(tmp_path / "file").array("four")
    with pytest.raises(ArrayFileError, match="no array 'four'"):
        ArrayFile(tmp_path / "file").bytes_from("four")
