"""Writes the files that are made from the tables of this room.

`make generated` runs it as `python -m naiad.frontend.generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import naiad
from naiad.frontend.compatibility_tables import with_tables
from naiad.frontend.model_configs import CONFIGURATIONS, config_text

_PACKAGE = Path(naiad.__file__).parent
# A checkout: the package links to the repository that is shipped.
_ROOT = _PACKAGE.parents[1]
_PAGE = _ROOT / "docs" / "compatibility.md"
_TEMPLATES = _PACKAGE / "cli" / "repository" / "templates"


def generated_files() -> Mapping[Path, str]:
    """Return the text of each file that is written."""
    files = {
        folder / name / "config.pbtxt": config_text(name)
        for name in CONFIGURATIONS
        for folder in (_TEMPLATES if (_TEMPLATES / name).is_dir() else _ROOT / "model_repository",)
    }
    return files | {_PAGE: with_tables(_PAGE.read_text(encoding="utf-8"))}


def main() -> None:
    """Write those files that have changed, and name them."""
    for path, text in generated_files().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(_ROOT)}")


if __name__ == "__main__":
    main()
