"""A checkpoint's own modules are never imported, whatever its files ask for."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_repository import tiny_checkpoint
from naiad.cli.main import main
from naiad.config import ModelConfig
from naiad.errors import ModelError
from naiad.tokenization import Tokenizer

MODULES = ("configuration_x", "modeling_x", "tokenization_x")
AUTO_MAP = {
    "AutoConfig": "configuration_x.XConfig",
    "AutoModelForCausalLM": "modeling_x.XForCausalLM",
    "AutoTokenizer": ["tokenization_x.XTokenizer", None],
}


class Trap:
    """A checkpoint with modules that write a file when they run."""

    def __init__(self, folder: Path) -> None:
        """Write the checkpoint into `folder`."""
        self.checkpoint = tiny_checkpoint(folder / "checkpoint")
        self._canary = folder / "canary"
        for module in MODULES:
            code = f"from pathlib import Path\nPath({str(self._canary)!r}).touch()\n"
            self.module(module).write_text(code, encoding="utf-8")

    def module(self, name: str) -> Path:
        """The file of one of the modules."""
        return self.checkpoint / f"{name}.py"

    def change(self, name: str, **keys: Any) -> None:
        """Set keys of one of the checkpoint's JSON files."""
        path = self.checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | keys), encoding="utf-8")

    @property
    def has_run(self) -> bool:
        """Whether one of the modules has run."""
        return self._canary.exists()


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_ran_would_be_noticed(trap: Trap, module: str) -> None:
    assert not trap.has_run
    runpy.run_path(str(trap.module(module)))
    assert trap.has_run


def test_a_model_that_asks_for_its_code_is_refused_and_nothing_runs(trap: Trap) -> None:
    trap.change("config.json", auto_map=AUTO_MAP, model_type="x")
    with pytest.raises(ModelError, match=r"auto_map = .*code from a checkpoint is never run"):
        ModelConfig.from_directory(trap.checkpoint)
    assert not trap.has_run


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--model", "CHECKPOINT"),
        ("repository", "create", "--name", "x", "--model", "CHECKPOINT", "OUT"),
        ("quantize", "CHECKPOINT", "OUT"),
    ],
    ids=["serve", "repository", "quantize"],
)
def test_commands_refuse_it_by_name_and_nothing_runs(
    trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    trap.change("config.json", auto_map=AUTO_MAP)
    trap.change("tokenizer_config.json", auto_map=AUTO_MAP)
    paths = {"CHECKPOINT": str(trap.checkpoint), "OUT": str(tmp_path / "out")}
    assert main([paths.get(word, word) for word in command]) != 0
    assert "auto_map" in capsys.readouterr().err
    assert not trap.has_run


def test_a_tokenizer_that_asks_for_its_code_is_read_without_it(trap: Trap) -> None:
    plain = Tokenizer.from_directory(trap.checkpoint).encode("Hello <|im_start|>", True)
    trap.change("tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="XTokenizer")
    tokenizer = Tokenizer.from_directory(trap.checkpoint)
    assert tokenizer.encode("Hello <|im_start|>", True) == plain
    assert tokenizer.render_chat(json.dumps([{"role": "user", "content": "Hello"}]))
    # The model's own files ask for no code, so it is served with this tokenizer.
    ModelConfig.from_directory(trap.checkpoint)
    assert not trap.has_run
