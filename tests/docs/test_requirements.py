"""Whether what `make install` installs is pinned by hash and free to use."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
HASH = "--hash=sha256:0000"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "requirements" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_requirement_has_a_version_and_a_hash(audit: ModuleType) -> None:
    assert audit.unhashed(audit.requirement_files()) == []


def test_every_licence_is_a_free_one(audit: ModuleType) -> None:
    assert {"torch", "numpy", "nvidia-pytriton"} <= set(audit.installed_here())
    assert audit.licence_faults(audit.installed_here()) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"a==1 \\\n    {HASH}\nb==2\n", "x.txt: b has no hash"),
        (f"a==1 ; python_version < '4' \\\n    {HASH}\nb>=2\n", "x.txt: 1 requirements have no version"),
    ],
)
def test_what_is_not_pinned_is_found(audit: ModuleType, tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "x.txt"
    path.write_text(text)
    assert audit.unhashed([path]) == [fault]


def test_a_package_for_another_interpreter_is_not_asked_for(audit: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(
        f"a==1 ; python_version < '3' \\\n    {HASH}\nb==1 ; python_version > '3' \\\n    {HASH}\n"
    )
    assert audit.pinned_here(path) == ["b"]
