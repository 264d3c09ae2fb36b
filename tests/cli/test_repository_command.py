"""The files that `naiad repository` writes, and what it refuses."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.blank_checkpoint import write_checkpoint
from naiad.cli.main import main
from naiad.cli.repository.check import core_warnings
from naiad.cli.repository.model_entries import (
    ModelEntry,
    find_repository,
    read_repository,
    with_parameters,
)
from naiad.cli.repository.served_models import served_models, steps
from naiad.config.control_groups import ControlGroups
from naiad.errors import ConfigError

MODELS = ["detokenizer", "ensemble", "llm", "text", "tokenizer"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder)
    return folder


@pytest.fixture
def repository(tmp_path: Path, checkpoint: Path) -> Path:
    """A repository with two models, each with a budget."""
    folder = tmp_path / "repository"
    create(folder, checkpoint, "--kv-cache-bytes", "1000", "--max-num-seqs", "4")
    add(
        folder,
        checkpoint,
        "second",
        "--kv-cache-bytes",
        "2000",
        "--max-num-seqs",
        "2",
        "--max-model-len",
        "32",
    )
    return folder


def naiad(*words: object) -> int:
    return main(["repository", *map(str, words)])


def create(folder: Path, checkpoint: Path, *options: str) -> None:
    assert naiad("create", "--model", checkpoint, "--name", "first", *options, folder) == 0


def add(folder: Path, checkpoint: Path, name: str, *options: str) -> None:
    assert naiad("add", "--model", checkpoint, "--name", name, *options, folder) == 0


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert naiad(*words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def entries(folder: Path) -> dict[str, ModelEntry]:
    return {entry.name: entry for entry in read_repository(folder)}


def everything(folder: Path) -> dict[Path, Any]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_the_first_model_keeps_the_shipped_names_and_tensors(tmp_path: Path, checkpoint: Path) -> None:
    create(tmp_path / "made", checkpoint)
    made, shipped = entries(tmp_path / "made"), entries(find_repository(None))
    assert sorted(made) == sorted(shipped) == MODELS
    for name in MODELS:
        assert made[name].config.input == shipped[name].config.input
        assert made[name].config.output == shipped[name].config.output
        assert made[name].config.name == name
        source = find_repository(None) / name / "1"
        assert {path.name for path in (tmp_path / "made" / name / "1").iterdir()} == {
            path.name for path in source.iterdir() if path.name != "__pycache__"
        }


def test_options_become_parameters_of_every_model_that_has_them(tmp_path: Path, checkpoint: Path) -> None:
    create(
        tmp_path / "made", checkpoint, "--max-model-len", "48", "--max-num-seqs", "3", "--max-batch-size", "2"
    )
    made = entries(tmp_path / "made")
    assert {name: entry.parameters.get("max_model_len") for name, entry in made.items()} == {
        "detokenizer": None,
        "ensemble": None,
        "llm": "48",
        "text": "48",
        "tokenizer": "48",
    }
    assert made["llm"].parameters["max_num_seqs"] == "3"
    assert {entry.parameters.get("model_dir") for entry in made.values()} == {str(checkpoint), None}
    assert {entry.config.max_batch_size for entry in made.values()} == {2}


def test_a_model_is_served_under_its_name_which_is_written_once(repository: Path) -> None:
    for engine, name in (("llm", "first"), ("second_llm", "second")):
        lines = (repository / engine / "config.pbtxt").read_text().splitlines()
        (line,) = [each for each in lines if '"served_name"' in each]
        assert f'string_value: "{name}"' in line
    written = (repository / "llm" / "config.pbtxt").read_text()
    keys = re.findall(r'key: "(\w+)"', written)
    assert len(keys) == len(set(keys)) > 10


@pytest.mark.parametrize("action", ["create", "add"])
def test_a_served_name_beside_the_name_is_refused(
    action: str, repository: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (action, "--model", checkpoint, "--name", "third", "--served-name", "other", repository)
    with pytest.raises(SystemExit):
        naiad(*words)
    assert "--served-name" in capsys.readouterr().err
    assert not any(name.startswith("third") for name in entries(repository))


@pytest.mark.parametrize("action", ["add", "remove", "list", "check"])
def test_a_repository_that_is_not_there_is_refused_by_the_name_that_the_usage_has(
    action: str, tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"add": ("--model", checkpoint, "--name", "a"), "remove": ("--name", "a")}
    line = refusal(capsys, action, *options.get(action, ()), tmp_path / "nothing")
    assert f"DEST = '{tmp_path / 'nothing'}': expected an existing directory" in line


def test_an_added_model_is_wired_to_itself(repository: Path) -> None:
    made = entries(repository)
    assert sorted(made) == sorted(MODELS + [f"second_{name}" for name in MODELS])
    for prefix in ("", "second_"):
        assert steps(made[f"{prefix}ensemble"]) == [
            f"{prefix}{n}" for n in ("tokenizer", "llm", "detokenizer")
        ]
        for name in ("detokenizer", "text"):
            assert made[f"{prefix}{name}"].parameters["llm_model_name"] == f"{prefix}llm"
        assert made[f"{prefix}llm"].config.name == f"{prefix}llm"


def test_each_model_has_its_own_engine_options(repository: Path) -> None:
    configs = {model.name: model.engine_config() for model in served_models(read_repository(repository))}
    assert {name: (c.kv_cache_bytes, c.max_num_seqs, c.max_model_len) for name, c in configs.items()} == {
        "first": (1000, 4, 0),
        "second": (2000, 2, 32),
    }


def test_a_model_is_removed_with_all_that_is_its_own(repository: Path) -> None:
    assert naiad("remove", "--name", "second", repository) == 0
    assert sorted(entries(repository)) == MODELS


def test_the_first_model_can_be_removed_too(repository: Path) -> None:
    assert naiad("remove", "--name", "first", repository) == 0
    assert sorted(entries(repository)) == [f"second_{name}" for name in MODELS]
    assert naiad("check", repository) == 0


def test_models_of_others_stay(repository: Path) -> None:
    (repository / "resnet" / "1").mkdir(parents=True)
    (repository / "resnet" / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\n')
    assert naiad("remove", "--name", "first", repository) == 0
    assert "resnet" in entries(repository)


def test_check_lists_models_and_adds_up_their_memory(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert naiad("check", repository) == 0
    said = capsys.readouterr().out
    assert "first: detokenizer, ensemble, llm, text, tokenizer" in said
    assert "second: second_detokenizer, second_ensemble, second_llm, second_text, second_tokenizer" in said
    assert "2.00 GiB in all" in said


CoreWarnings = Callable[..., list[str]]


@pytest.fixture
def warnings(repository: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> CoreWarnings:
    """What is said of engines with these parameters, on a machine with four cores of one thread each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(ControlGroups, "num_cores", lambda _, available: available)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    models = served_models(list(entries(repository).values()))

    def warnings(*parameters: dict[str, str]) -> list[str]:
        directory = {"model_dir": str(checkpoint)}
        return core_warnings(
            [
                replace(model, engine=with_parameters(model.engine, {**directory, **each}))
                for model, each in zip(models, parameters, strict=False)
            ]
        )

    assert len(models) == 2
    return warnings


@pytest.mark.parametrize(
    ("first", "second", "num_threads"),
    [
        ({"cpu_threads": "3"}, {"cpu_threads": "2"}, 5),
        ({"cpu_affinity": "0-2"}, {"cpu_threads": "2"}, 5),
        ({}, {}, 8),
        ({"cpu_threads": "1"}, {}, 5),
        ({}, {"cpu_affinity": "3"}, 5),
    ],
)
def test_engines_with_more_threads_than_cores_are_warned_of(
    warnings: CoreWarnings, first: dict[str, str], second: dict[str, str], num_threads: int
) -> None:
    """An engine without settings has a thread for each core."""
    (warning,) = warnings(first, second)
    assert f"2 engines compute with {num_threads} threads, and this process may use 4 physical" in warning


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cpu_threads": "3"}, {"cpu_threads": "1"}),
        ({"cpu_affinity": "0-1"}, {"cpu_affinity": "2-3"}),
        ({"cpu_threads": "1", "cpu_affinity": "0-1"}, {"cpu_affinity": "2-3"}),
        ({}, {"device": "cuda"}),
    ],
)
def test_engines_with_a_core_for_each_thread_are_not_warned_of(
    warnings: CoreWarnings, first: dict[str, str], second: dict[str, str]
) -> None:
    assert warnings(first, second) == []


def test_an_engine_that_is_alone_is_not_warned_of(warnings: CoreWarnings) -> None:
    assert warnings({}) == []
    assert warnings({"cpu_threads": "4"}) == []


def test_threads_count_by_physical_cores_and_what_the_environment_leaves(
    warnings: CoreWarnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert warnings({}, {}) == []
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 2)
    (warning,) = warnings({}, {})
    assert "compute with 4 threads, and this process may use 2 physical cores" in warning


def test_engines_that_name_a_core_twice_are_warned_of(warnings: CoreWarnings) -> None:
    *_, warning = warnings({"cpu_affinity": "0-2"}, {"cpu_affinity": "3,2"})
    assert warning.endswith("names these cores: 2")


def test_an_engine_that_asks_for_more_cores_than_there_are_is_refused(warnings: CoreWarnings) -> None:
    with pytest.raises(ConfigError, match="cpu_threads = 5"):
        warnings({}, {"cpu_threads": "5"})


def test_budgets_that_only_together_are_too_much_are_refused(
    repository: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("naiad.cli.repository.command.available_memory_bytes", lambda: 5 << 29)
    assert naiad("check", repository) == 0
    add(repository, checkpoint, "third", "--kv-cache-bytes", "1000")
    assert "2.5 GiB of memory are available, these 3 models need 3.0 GiB" in refusal(
        capsys, "check", repository
    )


def test_a_model_among_others_needs_a_definite_budget(
    repository: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(repository, checkpoint, "third")
    assert "kv_cache_bytes of third_llm = 0: expected a number of bytes" in refusal(
        capsys, "check", repository
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--name", "a/b"), "--name = 'a/b'"),
        (("--name", ""), "--name = ''"),
        (("--name", "x" * 41), "--name = "),
        (("--name", "x", "--max-batch-size", "0"), "--max-batch-size = 0"),
        (("--name", "x", "--block-size", "5"), "block_size = 5"),
        (("--name", "x", "--model", "/no/such"), "--model /no/such"),
    ],
)
def test_a_refused_option_writes_nothing(
    options: tuple[str, ...],
    said: str,
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("create", "--model", checkpoint, *options, tmp_path / "made")
    assert said in refusal(capsys, *words)
    assert not (tmp_path / "made").exists()


def test_a_directory_that_is_not_empty_is_not_written_to(
    repository: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(repository)
    words = ("create", "--model", checkpoint, "--name", "x", repository)
    assert "exists and is not empty" in refusal(capsys, *words)
    assert everything(repository) == before


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_name_is_used_once(
    name: str, repository: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("add", "--model", checkpoint, "--name", name, repository)
    assert "another name than first, second" in refusal(capsys, *words)


def test_a_directory_that_is_in_the_way_is_kept(
    repository: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "third_llm").mkdir()
    before = everything(repository)
    assert "third_llm exists" in refusal(capsys, "add", "--model", checkpoint, "--name", "third", repository)
    assert everything(repository) == before


def test_removing_what_is_not_there_names_what_is(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected one of first, second" in refusal(capsys, "remove", "--name", "third", repository)


def test_the_last_model_is_not_removed(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path / "made", checkpoint)
    assert "the only model" in refusal(capsys, "remove", "--name", "first", tmp_path / "made")
    assert sorted(entries(tmp_path / "made")) == MODELS


def test_a_misspelt_parameter_of_an_engine_is_named(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = repository / "second_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace('"cpu_threads"', '"cpu_threadz"'))
    said = refusal(capsys, "check", repository)
    assert "cpu_threadz of second_llm = '0': expected one of the keys model_dir, " in said
    config.write_text(config.read_text().replace('"cpu_threadz"', '"FORCE_CPU_ONLY_INPUT_TENSORS"'))
    assert naiad("check", repository) == 0


@pytest.mark.parametrize("kind", ["tokenizer", "detokenizer", "text"])
def test_a_misspelt_parameter_of_another_model_is_named(
    repository: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = repository / f"second_{kind}" / "config.pbtxt"
    config.write_text(config.read_text().replace('"skip_special_tokens"', '"skip_special"'))
    said = refusal(capsys, "check", repository)
    assert f"skip_special of second_{kind} = 'true': expected one of the keys model_dir, " in said


def test_a_step_that_is_not_there_is_named(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "second_tokenizer").rename(repository / "elsewhere")
    assert "second_ensemble names the model second_tokenizer" in refusal(capsys, "check", repository)


def test_models_of_one_ensemble_with_two_checkpoints_are_refused(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "other")
    config = repository / "second_tokenizer" / "config.pbtxt"
    config.write_text(config.read_text().replace(str(tmp_path / "checkpoint"), str(tmp_path / "other")))
    assert "model_dir of second_tokenizer" in refusal(capsys, "check", repository)


def test_a_checkpoint_that_is_gone_is_called_by_its_parameter(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    said = refusal(capsys, "check", repository)
    assert f": model_dir {tmp_path / 'checkpoint'}: no such directory" in said
    assert "--model" not in said, "`check` has no such option"


def test_a_chat_template_that_does_not_compile_is_told(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "chat_template.jinja").write_text("{% for message in %}")
    create(tmp_path / "repository", checkpoint, "--kv-cache-bytes", "1000")
    assert naiad("check", tmp_path / "repository") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "naiad: warning: the chat template of first does not compile, so chats are refused: "
    )


def test_a_chat_template_that_can_not_be_read_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    create(tmp_path / "repository", checkpoint, "--kv-cache-bytes", "1000")
    assert naiad("check", tmp_path / "repository") == 1
    assert "chat_template.jinja is not UTF-8: invalid start byte at byte 4" in capsys.readouterr().err


def test_list_shows_the_first_model_first_whatever_the_names_are(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    create(folder, checkpoint, "--kv-cache-bytes", "1000")
    add(folder, checkpoint, "another", "--kv-cache-bytes", "1000")
    capsys.readouterr()
    assert naiad("list", folder) == 0
    assert capsys.readouterr().out.splitlines() == [
        "first: detokenizer, ensemble, llm, text, tokenizer",
        "another: another_detokenizer, another_ensemble, another_llm, another_text, another_tokenizer",
    ]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error",
    [FULL, shutil.Error([("a", "b", str(FULL))]), OSError("No space left on device")],
    ids=["errno", "copytree", "message"],
)
def test_a_full_disk_is_told_and_leaves_nothing_behind(
    tmp_path: Path,
    checkpoint: Path,
    error: OSError,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = Path.write_text

    def write_text(path: Path, text: str, encoding: str) -> int:
        if path.parent.name == "llm":
            raise error
        return write(path, text, encoding)

    (tmp_path / "empty").mkdir()
    before = everything(tmp_path)
    monkeypatch.setattr(Path, "write_text", write_text)
    for folder in (tmp_path / "new" / "made", tmp_path / "empty"):
        said = refusal(capsys, "create", "--model", checkpoint, "--name", "x", folder)
        assert said.startswith(f"naiad: error: {folder} can not be written: ")
        assert said.endswith("No space left on device")
        assert everything(tmp_path) == before


def test_models_of_which_one_can_not_be_put_in_place_are_taken_back(
    tmp_path: Path,
    checkpoint: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "third_llm":
            raise FULL
        return rename(path, target)

    before = everything(tmp_path)
    monkeypatch.setattr(Path, "rename", fail)
    said = refusal(capsys, "add", "--model", checkpoint, "--name", "third", repository)
    assert said == f"naiad: error: {repository} can not be written: No space left on device"
    assert everything(tmp_path) == before
