"""Whatever bytes a reader gets, it reads or refuses them. `make fuzz-readers` tries millions."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest

from helpers.byte_readers import READERS
from helpers.mutations import mutated

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
