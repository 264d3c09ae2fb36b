from __future__ import annotations

import pytest

from naiad.cli.serve.server_log import ServerLog, find_cause, other_lines

PREFIX = "E1121 06:03:04.281119 13958 "


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [
                PREFIX + 'server.cc:241] "something else"',
                PREFIX + "model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: "
                'TritonModelException: block_size = 5: expected 16\\n\\nAt:\\n  x.py(3): initialize\\n"',
            ],
            "block_size = 5: expected 16",
        ),
        (
            [
                PREFIX + "model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: "
                "ModuleNotFoundError: No module named 'naiad'\\n\\nAt:\\n\""
            ],
            "ModuleNotFoundError: No module named 'naiad'",
        ),
        (
            ["stub: error while loading shared libraries: libpython3.11.so.1.0: cannot open"],
            "libpython3.11.so.1.0: cannot open",
        ),
        (
            [PREFIX + 'main.cc:400] "failed to start HTTP service: Unavailable"', "x"],
            "failed to start HTTP service: Unavailable",
        ),
        (
            ["error: creating server: Internal - failed to load all models"],
            "creating server: Internal - failed to load all models",
        ),
        (["nothing that helps"], None),
    ],
)
def test_the_cause_is_found(lines: list[str], cause: str | None) -> None:
    assert find_cause(lines) == cause


def test_what_repeats_the_cause_is_left_out() -> None:
    cause = "kv_cache_bytes = 100: expected at least one block"
    raised = f"TritonModelException: {cause}\\n\\nAt:\\n  x.py(3): initialize\\n"
    lines = [
        f"naiad engine: ERROR: the engine can not start: {cause}",
        PREFIX + f'backend_model.cc:692] "ERROR: Failed to create instance: {raised}"',
        PREFIX + f"model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: {raised}\"",
        PREFIX + 'other.cc:1] "another trouble\\n\\nAt:\\n  y.py(4): initialize\\n"',
        "error: creating server: Internal - failed to load all models",
    ]
    assert find_cause(lines) == cause
    assert other_lines(lines, cause) == [PREFIX + 'other.cc:1] "another trouble"']


def test_lines_are_held_back_until_the_server_serves() -> None:
    shown: list[str] = []
    log = ServerLog(shown.append, hold=True)
    log.take("early")
    assert (shown, log.held()) == ([], ["early"])
    log.release()
    log.take("late")
    assert shown == ["early", "late"]


def test_what_a_machine_without_gpu_always_says_is_not_shown() -> None:
    shown: list[str] = []
    ServerLog(shown.append, hold=False).take("Error: Failed to initialize NVML")
    assert shown == []
