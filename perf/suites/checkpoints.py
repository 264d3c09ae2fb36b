"""The checkpoints that the suites' models mean: made of one small model, whose files are linked."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

_BASE_END = "<|endoftext|>"
# What Naiad says of a checkpoint that it has made, and that is not changed.
_MANIFEST = "naiad-manifest.json"
_TEMPLATE = "chat_template.jinja"
# Calls are those of the family "hermes". Messages look as in the small model's own template.
_TOOL_TEMPLATE = """\
{% if tools %}<|im_start|>system
You can call these functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}A call is <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_hub(hub: Path, names: Sequence[str], checkpoint: Path) -> None:
    """Make a cache of the Hugging Face hub in which these names mean the checkpoint."""
    for name in names:
        repository = hub / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        for path in checkpoint.iterdir():
            if path.is_file():
                (snapshot / path.name).symlink_to(path)


def make_base(base: Path, checkpoint: Path) -> None:
    """Make a checkpoint that behaves like a base model, of which a chat's end does not end the text.

    Raises:
        SystemExit: its vocabulary does not have a base model's end.
    """
    tokens = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    end = next((each["id"] for each in tokens if each["content"] == _BASE_END), None)
    if end is None:
        raise SystemExit(f"{checkpoint} has no token {_BASE_END}: expected such a --model")
    changes = {"config.json": end, "generation_config.json": end, "tokenizer_config.json": _BASE_END}
    _link(base, checkpoint, leave_out=changes)
    for name, value in changes.items():
        if (checkpoint / name).exists():
            key = "eos_token" if name == "tokenizer_config.json" else "eos_token_id"
            changed = json.loads((checkpoint / name).read_text(encoding="utf-8")) | {key: value}
            (base / name).write_text(json.dumps(changed), encoding="utf-8")


def make_tool_model(folder: Path, checkpoint: Path) -> None:
    """Make a checkpoint whose chat template shows tools, as the small model's own does not."""
    _link(folder, checkpoint, leave_out=(_TEMPLATE,))
    (folder / _TEMPLATE).write_text(_TOOL_TEMPLATE, encoding="utf-8")


def _link(folder: Path, checkpoint: Path, leave_out: Collection[str]) -> None:
    folder.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in leave_out and path.name != _MANIFEST:
            (folder / path.name).symlink_to(path)
