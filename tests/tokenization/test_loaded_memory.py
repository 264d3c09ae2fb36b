"""What a tokenizer leaves in a process's memory beside itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import re, sys
from naiad.freed_memory import give_back_memory
from naiad.tokenization import Tokenizer

def anonymous_kb():
    return int(re.search(r"^Anonymous: +(\\d+) kB", open("/proc/self/smaps_rollup").read(), re.M)[1])

tokenizer = Tokenizer.from_directory(sys.argv[1])
loaded_kb = anonymous_kb()
give_back_memory()
print(loaded_kb - anonymous_kb())
"""


def test_memory_that_reading_a_tokenizer_took_is_given_back(default_model_dir: Path) -> None:
    """The default tokenizer takes about 33 MB while it is read, and 20 MB afterwards."""
    command = [sys.executable, "-c", _PROGRAM, str(default_model_dir)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(made.stdout) < 2000
