"""Hostile GGUF files are refused with the file's name, and nothing else ever happens."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import SIZES
from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.errors import ModelError
from naiad.gguf import GGUFFile
from naiad.models import load_model
from naiad.tokenization.tokenizer import Tokenizer
from naiad_kernels.linear import LoadOptions

# How often the file is changed. `NUM_MUTATIONS` of them are a test that is marked slow.
NUM_QUICK, NUM_MUTATIONS = 150, 2000
# Numbers that overflow, wrap around, or are just too large.
_NUMBERS = (0, 1, 2, 31, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 40, (1 << 61) + 1, 1 << 63, (1 << 64) - 1)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "model.gguf", make_tiny_model(folder / "model", **SIZES), "Q4_0")
    return (folder / "model.gguf").read_bytes()


def load(path: Path) -> None:
    """Read everything that a server reads."""
    config = ModelConfig.from_directory(path)
    Tokenizer.from_directory(path)
    load_model(str(path), config, LoadOptions())


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace the only occurrence."""
    assert data.count(old) == 1, data.count(old)
    return data.replace(old, new)


def tensor_info(data: bytes, name: str) -> int:
    """The place of what follows a tensor's name: dimensions, type, offset."""
    encoded = struct.pack("<Q", len(name)) + name.encode()
    assert data.count(encoded) == 1
    return data.index(encoded) + len(encoded)


def with_number(data: bytes, place: int, form: str, value: int) -> bytes:
    size = struct.calcsize(form)
    return data[:place] + struct.pack(form, value) + data[place + size :]


NAME = "blk.1.ffn_up.weight"


def test_the_file_itself_loads(whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole_file)
    load(path)
    assert GGUFFile(path).tensors[NAME].shape == (192, 64)


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 300, -32, -1])
def test_a_cut_file_is_refused(whole_file: bytes, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole_file[:kept])
    with pytest.raises(ModelError, match=r"^model\.gguf (is not a GGUF file|can not be read|is damaged)"):
        load(path)


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "<I", 0, "0 dimensions"),
        (0, "<I", 5, "5 dimensions"),
        (0, "<I", (1 << 32) - 1, "dimensions"),
        (4, "<Q", 0, "no whole blocks"),
        (4, "<Q", 63, "no whole blocks of 32"),
        (4, "<Q", 1 << 63, "after the file's end"),
        (12, "<Q", (1 << 64) - 1, "after the file's end"),
        (12, "<Q", 191, "has shape|overlaps"),
        (20, "<I", 4, "has the type 4"),
        (20, "<I", 39, "no whole blocks|has shape|after the file's end|overlaps|not finite"),
        (24, "<Q", 1, "multiple of 32"),
        (24, "<Q", 1 << 62, "after the file's end"),
        (24, "<Q", 0, "overlaps"),
    ],
)
def test_a_bad_tensor_is_named(
    whole_file: bytes, tmp_path: Path, offset: int, form: str, value: int, message: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_number(whole_file, tensor_info(whole_file, NAME) + offset, form, value))
    with pytest.raises(ModelError, match=rf"^model\.gguf.*({message})") as caught:
        load(path)
    assert "blk.1.ffn_" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"output_norm.weight", b"output_norm.weighu", "output_norm"),
        (b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight", "is there twice"),
        (b"llama.context_length", b"llama.contexu_length", "context_length"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "version"),
    ],
)
def test_a_bad_name_is_refused(
    whole_file: bytes, tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(changed(whole_file, old, new))
    with pytest.raises(ModelError, match=rf"^model\.gguf.*{message}"):
        load(path)


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.model"])
def test_a_list_in_place_of_a_name_is_refused(whole_file: bytes, tmp_path: Path, key: str) -> None:
    """The list takes as many bytes as the text, so that nothing else is changed."""
    text, array, byte = 8, 9, 0
    begin = struct.pack("<Q", len(key)) + key.encode()
    place = whole_file.index(begin) + len(begin)
    kind, length = struct.unpack_from("<IQ", whole_file, place)
    assert kind == text
    count = length - 4
    new = struct.pack("<IIQ", array, byte, count) + bytes(count)
    path = tmp_path / "model.gguf"
    path.write_bytes(whole_file[:place] + new + whole_file[place + len(new) :])
    expected = rf"^model\.gguf: {key} = \[[0, ]*\] is not supported: expected one of "
    with pytest.raises(ModelError, match=expected):
        load(path)


def test_blocks_with_scales_that_are_not_numbers_are_refused(whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole_file)
    tensor = GGUFFile(path).tensors[NAME]
    path.write_bytes(with_number(whole_file, tensor.offset, "<H", 0x7E00))
    with pytest.raises(ModelError, match=rf"^model\.gguf: tensor '{NAME}': a weight is not finite"):
        load(path)


def mutated(data: bytes, chance: random.Random, header_bytes: int) -> bytes:
    """Change, cut or insert bytes, mostly in the header."""
    mutant = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        end = min(header_bytes if chance.random() < 0.9 else len(mutant), len(mutant) - 8)
        place, kind = chance.randrange(max(end, 1)), chance.randrange(5)
        if kind == 0:
            mutant[place : place + 1] = chance.randbytes(1)
        elif kind == 1:
            mutant[place : place + 8] = struct.pack("<Q", chance.choice(_NUMBERS))
        elif kind == 2:
            mutant[place : place + 4] = struct.pack("<I", chance.choice(_NUMBERS) & 0xFFFFFFFF)
        elif kind == 3:
            del mutant[place : place + chance.choice((1, 4, 8, 100))]
        else:
            mutant[place:place] = chance.randbytes(chance.choice((1, 4, 8)))
    return bytes(mutant)


def fuzz(whole: bytes, path: Path, seed: str, count: int) -> None:
    chance, num_refused = random.Random(seed), 0
    path.write_bytes(whole)
    header_bytes = min(tensor.offset for tensor in GGUFFile(path).tensors.values())
    for _ in range(count):
        path.write_bytes(mutated(whole, chance, header_bytes))
        try:
            load(path)
        except ModelError:
            num_refused += 1
    # A token's text, a name or a template may change without harm.
    assert num_refused > count // 2


def test_mutated_files_are_refused(whole_file: bytes, tmp_path: Path) -> None:
    fuzz(whole_file, tmp_path / "model.gguf", "gguf", NUM_QUICK)


@pytest.mark.slow
def test_many_mutated_files_are_refused(whole_file: bytes, tmp_path: Path) -> None:
    fuzz(whole_file, tmp_path / "model.gguf", "many", NUM_MUTATIONS)
