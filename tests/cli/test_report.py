"""`naiad report`: sums over times, names of tenants, costs, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from naiad.cli.main import main
from naiad.snapshot import tenant_label
from naiad.usage import UsageLine

HOUR_S = 3600.0


def line(
    begin_s: float, end_s: float, tenant: str, step_s: float, tokens: int = 0, model: str = "m"
) -> bytes:
    made = UsageLine(
        tenant=tenant_label(tenant),
        step_s=step_s,
        num_output_tokens=tokens,
        begin_s=begin_s,
        end_s=end_s,
        model=model,
    )
    return msgspec.json.encode(made) + b"\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "usage"
    made.write_bytes(
        line(0, HOUR_S, "acme", 30.0, 100)
        + line(HOUR_S, 2 * HOUR_S, "acme", 30.0, 101)
        + line(0, 2 * HOUR_S, "", 20.0, 40, model="other model")
    )
    return made


def rows(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert main(["report", str(path), "--json", *options]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return found


def test_sums_shares_and_costs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acme, nobody = rows(path, capsys, "--price-per-hour", "2")
    assert (acme["model"], acme["tenant"], acme["step_s"], acme["num_output_tokens"]) == (
        "m",
        tenant_label("acme"),
        60.0,
        201,
    )
    assert nobody["tenant"] == "(no tenant)"
    assert (acme["share"], nobody["share"]) == (0.75, 0.25)
    assert (acme["cost"], nobody["cost"]) == (3.0, 1.0)


def test_a_line_counts_by_the_time_that_it_has_in_common(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin, end = "1970-01-01T00:30:00+00:00", "1970-01-01T01:30:00+00:00"
    acme, nobody = rows(path, capsys, "--from", begin, "--to", end, "--price-per-hour", "2")
    assert acme["step_s"] == pytest.approx(30.0)
    assert acme["num_output_tokens"] == 100
    assert nobody["step_s"] == pytest.approx(10.0)
    assert acme["cost"] + nobody["cost"] == pytest.approx(2.0)


def test_tenants_have_the_names_of_the_file_of_keys(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.json"
    entry = {"name": "k", "sha256": "0" * 64, "tenant": "acme"}
    keys.write_text(json.dumps({"keys": [entry]}))
    keys.chmod(0o600)
    assert rows(path, capsys, "--api-keys", str(keys))[0]["tenant"] == "acme"


def test_the_table_is_for_people(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(path), "--price-per-hour", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    head = "model tenant step s share KV block s prompt cached output draft cost"
    assert printed[2].split() == head.split()
    assert printed[3].split()[-7:] == ["%", "0.0", "0", "0", "201", "0", "3.0000"]


def test_no_use_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "usage"
    path.touch()
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == "nothing was used\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"{}\n", "line 1"),
        (b'{"tenant": "a", "begin_s": 0, "end_s": 1, "model": "m", "step_s": -1}\n', "step_s"),
        (b'{"tenant": "a", "begin_s": 0, "end_s": 1, "model": "m", "steps": 1}\n', "steps"),
        (b"\xff\n", "line 1"),
        (b'{"tenant": "\xff"}\n', "line 1"),
    ],
)
def test_lines_that_are_none_are_named(
    text: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "usage"
    path.write_bytes(text)
    assert main(["report", str(path)]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--from", "2026-02-01", "--to", "2026-01-01"], "--to"),
        (["--from", "2026-02-01", "--to", "2026-02-01"], "--to"),
    ],
)
def test_times_in_the_wrong_order(
    path: Path, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(path), *options]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--from", "yesterday"], ["--price-per-hour", "nan"], ["--price-per-hour", "0"]]
)
def test_values_that_are_none(path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(path), *options])
    assert options[0] in capsys.readouterr().err


def test_a_device_without_lines_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "/dev/zero"]) == 1
    assert "/dev/zero: line 1 is not one of a usage file" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "cannot be read: No such file" in capsys.readouterr().err
