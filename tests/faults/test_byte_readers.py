"""Whatever bytes a reader gets, it reads or refuses them. `make fuzz-readers` tries millions."""

from __future__ import annotations

import random
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import byte_readers
from helpers.byte_readers import READERS
from helpers.mutations import mutated
from naiad.errors import InvalidRequestError
from naiad.gate.refusal import RefusedError

CORPUS = Path(__file__).parent / "corpus"
NUM_MUTATIONS = 300


def corpus_of(name: str) -> list[bytes]:
    """What `make fuzz-readers` has found for this reader and kept."""
    path = CORPUS / f"{name}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as file:
        return [file.read(each) for each in file.namelist()]


def test_every_corpus_has_its_reader() -> None:
    assert {path.stem for path in CORPUS.glob("*")} <= set(READERS)


@pytest.mark.parametrize("name", READERS)
def test_it_reads_or_refuses(name: str) -> None:
    reader = READERS[name]
    known = [b"", *reader.make_seeds(), *corpus_of(name)]
    for data in known:
        reader.read(data)
    draw = random.Random(7)
    for _ in range(NUM_MUTATIONS):
        reader.read(mutated(draw.choice(known), draw, known))


def _refuses_its_own(read: Callable[..., Any], refusal: Exception) -> Callable[..., Any]:
    """A reader that refuses whatever it gets after the first time."""
    num_read = 0

    def read_once(*args: Any) -> Any:
        nonlocal num_read
        num_read += 1
        if num_read > 1:
            raise refusal
        return read(*args)

    return read_once


_REFUSED = RefusedError(400, "of itself")
_STAND_INS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "an empty body": ("gate_json", "checked_json", lambda *_: b"{}"),
    "an empty request": ("gate_json", "checked_inference", lambda _, length, __: (b"{}", length and 2)),
    "a body that it refuses": (
        "gate_json",
        "checked_json",
        _refuses_its_own(byte_readers.checked_json, _REFUSED),
    ),
    "a request that it refuses": (
        "gate_json",
        "checked_inference",
        _refuses_its_own(byte_readers.checked_inference, _REFUSED),
    ),
    "no words": ("word_list", "unpack_word_list", lambda _: []),
    "words that it refuses": (
        "word_list",
        "unpack_word_list",
        _refuses_its_own(byte_readers.unpack_word_list, InvalidRequestError("of itself")),
    ),
}


@pytest.mark.parametrize("told", _STAND_INS)
def test_a_reader_that_writes_something_else_is_found(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, stand_in = _STAND_INS[told]
    seed = READERS[name].make_seeds()[0]
    READERS[name].read(seed)
    monkeypatch.setattr(byte_readers, function, stand_in)
    with pytest.raises((AssertionError, RefusedError, InvalidRequestError)):
        READERS[name].read(seed)


@pytest.mark.parametrize(
    ("body", "is_the_same"),
    [(b'{"a": 1}', True), (b'{"a": 1.0}', False), (b'{"a": true}', False), (b'{"b": 1}', False)],
)
def test_bodies_mean_the_same_if_their_values_are(body: bytes, is_the_same: bool) -> None:
    assert (byte_readers._meaning(body) == byte_readers._meaning(b'{"a":1}')) is is_the_same


def test_what_readers_write_goes_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        byte_readers.atexit, "register", lambda call, *args, **named: at_exit.append((call, args, named))
    )
    folder = byte_readers._folder.__wrapped__()
    (folder / "config.json").write_text("{}")
    for call, args, named in at_exit:
        call(*args, **named)
    assert not list(tmp_path.iterdir())
