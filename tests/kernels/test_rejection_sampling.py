from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from rejection_cases import MarkovModel
from scipy.stats import chi2

from naiad.sampling.noise import noise_key
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams, Sequence
from naiad_kernels.kept_threshold import RowFilters, kept_threshold
from naiad_kernels.rejection_sampling import Drafts, TargetRows, reference, rejection_sampling

NUM_DRAWS = 60_000
FIRST_TOKEN = 1
# One in ten thousand right rules would be called wrong; the seeds are fixed.
SIGNIFICANCE = 1e-4


@lru_cache
def keys_of(num_positions: int) -> torch.Tensor:
    """`[NUM_DRAWS, num_positions]`: a seed for each draw."""
    keys = [noise_key(seed, position) for seed in range(NUM_DRAWS) for position in range(num_positions)]
    return torch.tensor(keys).view(NUM_DRAWS, num_positions)


def target_model(vocab_size: int) -> MarkovModel:
    """Its temperature and its threshold, which makes some tokens impossible, are not the drafters'."""
    torch.manual_seed(vocab_size)
    return MarkovModel(torch.randn(vocab_size, vocab_size) * 0.8, temperature=0.9, threshold=-1.5)


def drafter(kind: str, target: MarkovModel) -> MarkovModel:
    torch.manual_seed(100)
    noise = torch.randn_like(target.logits)
    logits = {
        "equal": target.probs.float().log(),
        "good": target.logits + 0.3 * noise,
        "unrelated": 2 * noise,
        "adversarial": -6 * target.logits,
        "single": torch.zeros_like(noise).index_fill_(1, torch.tensor([0]), 40.0),
    }
    return MarkovModel(logits[kind])


def speculate(target: MarkovModel, draft: MarkovModel, num_drafts: int, has_probs: bool) -> torch.Tensor:
    """NUM_DRAWS times: drafts, one verification, and what is then missing from the target itself.

    Returns:
        `[NUM_DRAWS, num_drafts + 1]` tokens after FIRST_TOKEN.
    """
    torch.manual_seed(3)
    seen = torch.full((NUM_DRAWS, 1), FIRST_TOKEN)
    for _ in range(num_drafts):
        seen = torch.cat((seen, draft.draw(seen[:, -1])[:, None]), 1)
    rows = target.rows(seen.flatten(), keys_of(num_drafts + 1).flatten())
    drafts = torch.cat((seen[:, 1:], torch.full((NUM_DRAWS, 1), -1)), 1).flatten()
    laws = draft.probs[seen].float().flatten(0, 1) if has_probs else None
    starts = torch.arange(0, len(drafts) + 1, num_drafts + 1, dtype=torch.int32)
    _, emitted = rejection_sampling(rows, Drafts(drafts, laws), starts, num_drafts)
    for slot in range(1, num_drafts + 1):
        is_missing = emitted[:, slot] < 0
        emitted[is_missing, slot] = target.draw(emitted[is_missing, slot - 1])
    return emitted


def assert_follows(target: MarkovModel, emitted: torch.Tensor) -> None:
    """Pearson's test of the joint law of all emitted tokens."""
    vocab_size, length = len(target.logits), emitted.shape[1]
    expected = target.joint(FIRST_TOKEN, length) * len(emitted)
    places = vocab_size ** torch.arange(length - 1, -1, -1)
    counts = (emitted * places).sum(1).bincount(minlength=len(expected))
    is_possible = expected > 0
    assert counts[~is_possible].sum() == 0, "an impossible token was emitted"
    expected, counts = expected[is_possible], counts[is_possible]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < chi2.isf(SIGNIFICANCE, len(expected) - 1), statistic


@pytest.mark.parametrize("kind", ["equal", "good", "unrelated", "adversarial", "single"])
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(6, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("has_probs", [True, False])
def test_emitted_tokens_follow_the_targets_joint_law(
    vocab_size: int, num_drafts: int, kind: str, has_probs: bool
) -> None:
    target = target_model(vocab_size)
    assert_follows(target, speculate(target, drafter(kind, target), num_drafts, has_probs))


def accept_by_target_alone(uniform: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    return uniform < target


def accept_too_often(uniform: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    return (0.9 * uniform * draft < target) & (target > 0)


def recover_from_the_target(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    return target


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_is_accepted", accept_by_target_alone),
        ("_is_accepted", accept_too_often),
        ("_residual", recover_from_the_target),
    ],
)
def test_a_wrong_rule_is_found(name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_model(4)
    monkeypatch.setattr(reference, name, wrong)
    emitted = speculate(target, drafter("unrelated", target), 2, True)
    with pytest.raises(AssertionError):
        assert_follows(target, emitted)


def test_noise_that_the_draft_was_drawn_with_is_found() -> None:
    """Why a drafter needs keys of its own."""
    target = MarkovModel(target_model(10).logits)
    draft = drafter("unrelated", target)
    seen = torch.full((NUM_DRAWS,), FIRST_TOKEN)
    keys = keys_of(2)
    own = draft.rows(seen, keys[:, 0].clone())
    no_rows = torch.arange(NUM_DRAWS + 1, dtype=torch.int32)
    _, drawn = rejection_sampling(own, Drafts(torch.full_like(seen, -1), None), no_rows, 0)
    rows = target.rows(torch.stack((seen, drawn[:, 0]), 1).flatten(), keys.flatten())
    drafts = torch.stack((drawn[:, 0], torch.full_like(seen, -1)), 1).flatten()
    laws = draft.probs[FIRST_TOKEN].float().expand(len(drafts), -1)
    _, emitted = rejection_sampling(rows, Drafts(drafts, laws), 2 * no_rows, 1)
    with pytest.raises(AssertionError):
        assert_follows(target, emitted[:, :1])


PARAMS = [
    SamplingParams(max_tokens=60, temperature=0.0),
    SamplingParams(max_tokens=60, temperature=0.9, seed=3),
    SamplingParams(max_tokens=60, temperature=1.4, seed=4, top_k=5, top_p=0.8),
    SamplingParams(max_tokens=60, temperature=0.6, seed=2**64 - 1, min_p=0.05),
]


def undisturbed(model: MarkovModel, params: SamplingParams, length: int) -> list[int]:
    sampler = Sampler(len(model.logits))
    sequence = Sequence(0, [FIRST_TOKEN], 1, params, 0.0)
    for _ in range(length):
        output = sampler.sample(model.logits[sequence.token_ids[-1:]].clone(), [sequence])
        sequence.token_ids.append(output.sampled_token_ids[0])
    return sequence.token_ids


def target_rows(model: MarkovModel, seen: list[int], params: SamplingParams, position: int) -> TargetRows:
    """Laws of what follows each of `seen`, the first of which is the token before `position`."""
    keys = torch.tensor([noise_key(params.seed, position + index) for index in range(len(seen))])
    logits = model.logits[seen]
    best = logits.amax(1)

    def full(value: float) -> torch.Tensor:
        return torch.full((len(seen),), value, dtype=torch.float64)

    temperature, log_min_p = full(params.temperature or 1.0), full(params.min_p).log()
    filters = RowFilters(temperature, full(params.top_k).long(), full(params.top_p), log_min_p)
    return TargetRows(logits, best, full(params.temperature), kept_threshold(logits, best, filters), keys)


@pytest.mark.parametrize("num_drafts", range(17))
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "free", "top-k and top-p", "min-p"])
def test_drafts_without_a_law_change_nothing(params: SamplingParams, num_drafts: int) -> None:
    """Guesses that are right three times out of four: the output is that of the sampler alone."""
    torch.manual_seed(num_drafts)
    model = MarkovModel(torch.randn(12, 12) * 2)
    expected = undisturbed(model, params, 80)
    seen, num_accepted, num_rows = expected[:1], 0, 0
    while len(seen) < 60:
        is_right = torch.rand(num_drafts) < 0.75
        coming = torch.tensor(expected[len(seen) : len(seen) + num_drafts], dtype=torch.int64)
        guesses = torch.where(is_right, coming, torch.randint(12, (num_drafts,))).tolist()
        rows = target_rows(model, [seen[-1], *guesses], params, len(seen))
        starts = torch.tensor([0, num_drafts + 1], dtype=torch.int32)
        drafts = Drafts(torch.tensor([*guesses, -1]), None)
        counts, emitted = rejection_sampling(rows, drafts, starts, num_drafts)
        seen = seen + [token for token in emitted[0].tolist() if token >= 0]
        num_accepted += int(counts[0])
        num_rows += num_drafts
    assert seen == expected[: len(seen)]
    assert num_accepted > 0 or num_rows == 0
