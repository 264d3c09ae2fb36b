"""The default model with a chat template that shows tools, as its own does not."""

from __future__ import annotations

from pathlib import Path

from helpers.scripted_model import TOOL_TEMPLATE

# The comment says the family.
_TEMPLATE = TOOL_TEMPLATE + "{# <tool_call></tool_call> #}"


def tool_checkpoint(folder: Path, default_model_dir: Path) -> Path:
    """Make the checkpoint in a new folder; all files but the template are the model's own."""
    folder.mkdir(parents=True)
    for path in default_model_dir.iterdir():
        if path.name != "chat_template.jinja":
            (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder
