"""lm-eval asks the server and transformers, both in float32, for the same tasks: the scores are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clients.environments import python_of
from clients.served import Served

TASKS = Path(__file__).parent / "tasks"
CHOICES, TEXT, ANSWERS = "naiad_choices", "naiad_text", "naiad_answers"


def evaluate(
    served: Served, folder: Path, model: str, options: dict[str, Any], *tasks: str, chat: bool = False
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Run lm-eval; return task → metric → score, and what it read from each response."""
    arguments = ",".join(f"{name}={value}" for name, value in options.items())
    served.run(
        *(python_of("lm_eval").parent / "lm-eval", "run", "--model", model, "--model_args", arguments),
        *("--tasks", ",".join(tasks), "--include_path", TASKS, "--output_path", folder, "--log_samples"),
        *(("--apply_chat_template",) if chat else ()),
        *(("--device", "cpu") if model == "hf" else ()),
        folder=TASKS,
    )
    (report,) = folder.rglob("results_*.json")
    samples = [path for task in tasks for path in folder.rglob(f"samples_{task}_*.jsonl")]
    assert len(samples) == len(tasks)
    lines = [json.loads(line) for path in samples for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: (line["doc_hash"], line["doc_id"]))
    return json.loads(report.read_text())["results"], [line["filtered_resps"] for line in lines]


def transformers(served: Served) -> dict[str, Any]:
    return {"pretrained": served.model_dir, "dtype": "float32"}


def naiad(served: Served, path: str) -> dict[str, Any]:
    return {"base_url": f"{served.server.openai}/{path}", "model": served.model, "num_concurrent": 4}


def test_completions_score_as_transformers(served: Served, tmp_path: Path) -> None:
    local = naiad(served, "completions") | {"tokenizer": served.model_dir}
    tasks = (CHOICES, TEXT)
    found, _ = evaluate(served, tmp_path / "naiad", "local-completions", local, *tasks)
    expected, _ = evaluate(served, tmp_path / "transformers", "hf", transformers(served), *tasks)
    for metric in ("acc,none", "acc_norm,none"):
        assert found[CHOICES][metric] == expected[CHOICES][metric]
    for metric in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        assert found[TEXT][metric] == pytest.approx(expected[TEXT][metric], rel=1e-4)


def test_completions_answer_as_transformers(served: Served, tmp_path: Path) -> None:
    local = naiad(served, "completions") | {"tokenizer": served.model_dir}
    found = evaluate(served, tmp_path / "naiad", "local-completions", local, ANSWERS)
    expected = evaluate(served, tmp_path / "transformers", "hf", transformers(served), ANSWERS)
    assert any(text.strip() for (text,) in expected[1])
    assert found[1] == expected[1]


def test_chats_answer_as_transformers(served: Served, tmp_path: Path) -> None:
    local = naiad(served, "chat/completions")
    found = evaluate(served, tmp_path / "naiad", "local-chat-completions", local, ANSWERS, chat=True)
    expected = evaluate(served, tmp_path / "transformers", "hf", transformers(served), ANSWERS, chat=True)
    assert any(text.strip() for (text,) in expected[1])
    assert found[1] == expected[1]
