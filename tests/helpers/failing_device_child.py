"""An engine process whose device fails, once its model directory says so, as a GPU does.

What has been queued cannot be read back, and nothing can be queued any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from naiad.engine_process.__main__ import main, parse
from naiad.model_runner.paged_model import PagedModel

FAULT = "fault"


def _let_it_fail(fault: Path) -> None:
    """Fail in the first step after the file is there, which is removed: the next process is well."""
    broken: list[bool] = []

    def failing(method: Callable[..., Any], *, may_begin: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if may_begin and fault.exists():
                fault.unlink()
                broken.append(True)
            if broken:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            return method(*args)

        return call

    PagedModel._finish = failing(PagedModel._finish, may_begin=True)  # type: ignore[method-assign]
    PagedModel.launch = failing(PagedModel.launch, may_begin=False)  # type: ignore[method-assign]


if __name__ == "__main__":
    config, _, _ = parse(sys.argv[1:])
    _let_it_fail(Path(config.model_dir) / FAULT)
    main()
