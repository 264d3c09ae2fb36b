"""The key of model control."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from naiad.cli.control_key import control_key, grpc_metadata, restrictions
from naiad.errors import StartupError

KEY = "0123456789abcdef-XYZ"


def test_without_a_file_each_start_has_a_new_key_that_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = [control_key(None), control_key(None)]
    assert keys[0] != keys[1]
    text = capsys.readouterr().err
    assert [text.count(key) for key in keys] == [1, 1]
    assert "header naiad-model-control-key" in text


def test_a_file_is_made_for_its_owner_alone_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    key = control_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert control_key(path) == key
    assert key not in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "short", "with space and more", "a:b=c,ddddddddddddd", "ü" * 20])
def test_what_is_no_key_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(StartupError, match=r"--model-control-key = .*expected a file with 16 to 256 letters"):
        control_key(path)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o640)
    with pytest.raises(StartupError, match=re.escape(f"`chmod 600 {path}`")):
        control_key(path)


def test_a_file_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="can not be made: No such file"):
        control_key(tmp_path / "none" / "key")


def test_the_server_asks_for_the_key_on_both_ports() -> None:
    assert restrictions(KEY) == [
        f"--http-restricted-api=model-repository:naiad-model-control-key={KEY}",
        f"--grpc-restricted-protocol=model-repository:naiad-model-control-key={KEY}",
    ]
    assert grpc_metadata(KEY) == (("triton-grpc-protocol-naiad-model-control-key", KEY),)
    assert grpc_metadata(None) == ()
