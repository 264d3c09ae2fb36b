"""What one start has measured is used by the next one, where nothing has changed on which it depends."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner, kept_measurements, model_runner, paged_model
from naiad.model_runner.kept_measurements import Facts, KeptMeasurements
from naiad.model_runner.step_costs import MeasuredCosts
from naiad.model_runner.token_budget import TokenBudget
from naiad.models.checkpoint_cache import CheckpointCache

BUDGET = TokenBudget(336, 0.00074, 2.0)
COSTS = MeasuredCosts([(1, 0.25), (2, 0.5)], [(1, 1e-6)], 256, 1e-5)
FACTS: Facts = {"num_threads": 2, "kernels": "avx2"}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path)
    return tmp_path


def file_of(model_dir: Path) -> Path:
    return model_dir / ".naiad" / "measurements.json"


def get(model_dir: Path, facts: Facts = FACTS, more: Facts | None = None, name: str = "budget") -> int:
    """How often something is measured when it is asked for."""
    num_measured = 0

    def measure() -> TokenBudget:
        nonlocal num_measured
        num_measured += 1
        return BUDGET

    kept = KeptMeasurements(CheckpointCache(model_dir), facts)
    assert kept.get(name, TokenBudget, measure, more or {}) == BUDGET
    return num_measured


def test_it_is_measured_once(model_dir: Path) -> None:
    assert [get(model_dir) for _ in range(3)] == [1, 0, 0]


def test_it_waits_only_before_it_measures(model_dir: Path) -> None:
    happened: list[str] = []

    def measure() -> TokenBudget:
        happened.append("measured")
        return BUDGET

    for cache in (None, CheckpointCache(model_dir)):
        kept = KeptMeasurements(cache, FACTS, lambda: happened.append("waited"))
        kept.get("budget", TokenBudget, measure, {})
        assert happened == ["waited", "measured"]
        happened.clear()
    kept.get("budget", TokenBudget, measure, {})
    assert happened == []


def test_costs_are_kept_as_they_are(model_dir: Path) -> None:
    kept = KeptMeasurements(CheckpointCache(model_dir), FACTS)
    for _ in range(2):
        assert kept.get("costs", MeasuredCosts, lambda: COSTS, {}) == COSTS


@pytest.mark.parametrize(
    "foreign",
    [
        TokenBudget(1 << 40),
        TokenBudget(0),
        TokenBudget(64, -1.0),
        TokenBudget(64, 1e308, 2.0),
        TokenBudget(64, 0.0, -1.0),
        TokenBudget(64, 0.0, 0.5),
        TokenBudget(64, 0.0, 1e308),
    ],
    ids=str,
)
def test_a_budget_that_no_start_measures_is_measured_anew(model_dir: Path, foreign: TokenBudget) -> None:
    """A checkpoint may bring the file along."""
    kept = KeptMeasurements(CheckpointCache(model_dir), FACTS)
    assert kept.get("budget", TokenBudget, lambda: foreign, {}) == foreign
    assert kept.get("budget", TokenBudget, lambda: BUDGET, {}) == BUDGET


@pytest.mark.parametrize(
    "foreign",
    [
        {"seconds": []},
        {"seconds": [(1, 0.0)]},
        {"seconds": [(0, 0.1)]},
        {"seconds": [(1, -0.1)]},
        {"seconds": [(1, 1e308)]},
        {"seconds": [(1 << 80, 0.1)]},
        {"seconds": [(2, 0.5), (1, 0.25)]},
        {"seconds": [(1, 0.25), (1, 0.5)]},
        {"context": [(2, 1e-6), (1, 1e-6)]},
        {"context": [(1, 1e308)]},
        {"num_context": -1},
        {"num_context": 1 << 80},
        {"drawn_s": 1e308},
    ],
    ids=str,
)
def test_costs_that_no_start_measures_are_measured_anew(model_dir: Path, foreign: dict[str, object]) -> None:
    kept = KeptMeasurements(CheckpointCache(model_dir), FACTS)
    costs = {**asdict(COSTS), **foreign}
    assert kept.get("costs", dict, lambda: costs, {}) == costs
    assert kept.get("costs", MeasuredCosts, lambda: COSTS, {}) == COSTS


@pytest.mark.parametrize("change", [{"num_threads": 3}, {"kernels": "avx512"}, {"block_size": 16}], ids=str)
def test_whatever_changes_it_is_measured_anew_and_both_are_kept(model_dir: Path, change: Facts) -> None:
    assert [get(model_dir), get(model_dir, {**FACTS, **change})] == [1, 1]
    assert [get(model_dir, more={"block_size": 32}), get(model_dir, name="other")] == [1, 1]
    assert [get(model_dir), get(model_dir, {**FACTS, **change})] == [0, 0]


@pytest.mark.parametrize("name", ["cpu_model", "cpu_flags"])
def test_another_cpu_is_another_measurement(
    model_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(model_dir)
    monkeypatch.setattr(kept_measurements, name, lambda: "another")
    assert [get(model_dir), get(model_dir)] == [1, 0]


def test_another_checkpoint_is_another_measurement(model_dir: Path) -> None:
    get(model_dir)
    (model_dir / "config.json").write_text((model_dir / "config.json").read_text() + "\n")
    assert get(model_dir) == 1


@pytest.mark.parametrize(
    ("old", "new"), [("336", "337"), ('"num_threads":2', '"num_threads":4'), ("}", ""), ("336", '"x"')]
)
def test_a_damaged_file_is_measured_anew(model_dir: Path, old: str, new: str) -> None:
    get(model_dir)
    content = file_of(model_dir).read_text()
    assert old in content
    file_of(model_dir).write_text(content.replace(old, new))
    assert [get(model_dir), get(model_dir)] == [1, 0]


def test_a_file_that_is_nested_too_deeply_is_measured_anew(model_dir: Path) -> None:
    get(model_dir)
    file_of(model_dir).write_bytes(b'{"a":{"facts":{},"sha256":"","value":' + b"[" * 200_000)
    assert [get(model_dir), get(model_dir)] == [1, 0]


def test_a_file_that_is_not_utf_8_is_measured_anew(model_dir: Path) -> None:
    get(model_dir)
    file_of(model_dir).write_bytes(file_of(model_dir).read_bytes().replace(b'"', b'"\xff', 1))
    assert [get(model_dir), get(model_dir)] == [1, 0]


def test_the_oldest_measurements_are_dropped(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_measurements, "_MAX_KEPT", 3)
    for num in range(5):
        get(model_dir, {"num_threads": num})
    assert [get(model_dir, {"num_threads": num}) for num in (4, 3, 2)] == [0, 0, 0]
    assert get(model_dir, {"num_threads": 0}) == 1


def make_runner(model_dir: Path, **settings: object) -> ModelRunner:
    values: dict[str, object] = {"model_dir": str(model_dir), "kv_cache_bytes": 1 << 22, "max_num_seqs": 4}
    return ModelRunner(EngineConfig(**{**values, **settings}))  # type: ignore[arg-type]


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
def test_the_second_start_probes_nothing(
    model_dir: Path, cpu_kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"cpu_kernels": cpu_kernels, "drafter": "self", "num_draft_layers": 1}

    def measured() -> list[object]:
        runner = make_runner(model_dir, **settings)
        assert runner.draft_runner is not None
        costs = [runner.measure_step_costs(), runner.draft_runner.measure_step_costs()]
        return [runner.token_budget, *costs]

    first = measured()
    assert first[1] != first[2]
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "measure_token_budget", None)
        patch.setattr(paged_model, "measure_step_costs", None)
        assert measured() == first
    monkeypatch.setattr(paged_model, "measure_step_costs", lambda *args, **kwargs: COSTS)
    assert make_runner(model_dir, **settings, block_size=16).measure_step_costs() == COSTS


def test_a_rounded_draft_model_has_measurements_of_its_own(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"cpu_kernels": "native", "drafter": "draft_model", "draft_model": str(model_dir)}
    make_runner(model_dir, **settings).measure_step_costs()
    monkeypatch.setattr(paged_model, "measure_step_costs", lambda *args, **kwargs: COSTS)
    rounded = make_runner(model_dir, **settings, draft_quantization="int8")
    assert rounded.draft_runner is not None
    assert rounded.draft_runner.measure_step_costs() == COSTS
    assert rounded.measure_step_costs() != COSTS


def test_nothing_is_kept_if_it_is_turned_off(model_dir: Path) -> None:
    make_runner(model_dir, start_cache=False).measure_step_costs()
    assert not (model_dir / ".naiad").exists()
