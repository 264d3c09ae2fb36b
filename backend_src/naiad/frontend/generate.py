"""Writes the files that are generated from the tables of this package.

`make generated` runs it as `python -m naiad.frontend.generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import naiad
from naiad.frontend.compatibility_tables import with_tables
from naiad.frontend.model_configs import CONFIGURATIONS, config_text

_PACKAGE = Path(naiad.__file__).parent
# The root of a checkout, where the package has a link to the shipped model repository.
_ROOT = _PACKAGE.parents[1]
_PAGE = _ROOT / "docs" / "compatibility.md"
_TEMPLATES = _PACKAGE / "cli" / "repository" / "templates"


def generated_files() -> Mapping[Path, str]:
    """Return the path and the text of each generated file."""
    files = {
        folder / name / "config.pbtxt": config_text(name)
        for name in CONFIGURATIONS
        for folder in (_TEMPLATES if (_TEMPLATES / name).is_dir() else _ROOT / "model_repository",)
    }
    return files | {_PAGE: with_tables(_PAGE.read_text(encoding="utf-8"))}


def main() -> None:
    """Write the files that have changed, and print their names."""
    for path, text in generated_files().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(_ROOT)}")


if __name__ == "__main__":
    main()
