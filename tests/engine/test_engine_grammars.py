"""Outputs follow their grammars, and are the same whatever else happens in the engine."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from helpers import drafting_engines
from helpers.drafting_engines import write_first_layers
from helpers.grammars import (
    EOS_IDS,
    FIXED,
    PERSON,
    SPECS,
    check_text,
    grammar_checkpoint,
    regex,
    schema,
    text_of,
    tiny_grammars,
)
from naiad.engine import Engine
from naiad.errors import InvalidRequestError
from naiad.grammar import CompiledGrammar, Grammars
from naiad.model_runner import ModelRunner
from naiad.outputs import RequestOutput
from naiad.sampling.grammar_mask import GrammarMask
from naiad.sampling.noise import sibling_seed
from naiad.sequence import (
    BeamParams,
    EngineRequest,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    SamplingParams,
)
from naiad_kernels.native.variants import best_variant

Made = dict[int, list[RequestOutput]]
PROMPT = [40, 41, 42, 43, 44, 45, 46]
MAX_TOKENS = 40


def engine_parts(model_dir: Path, **settings: Any) -> tuple[Engine, ModelRunner]:
    # A tiny model gains nothing from more threads.
    return drafting_engines.engine_parts(model_dir, cpu_threads=1, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    grammar_checkpoint(directory / "target")
    write_first_layers(directory / "target", directory / "draft", 1)
    return directory


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return tiny_grammars(folder / "target")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))


def request(number: int, spec: GrammarSpec | None, **params: Any) -> EngineRequest:
    sampled = {"max_tokens": MAX_TOKENS, "stop_token_ids": EOS_IDS, "seed": number, **params}
    prompt = [*PROMPT, number % 7 + 30]
    return EngineRequest(
        sequence_id=number, prompt_token_ids=prompt, params=SamplingParams(grammar=spec, **sampled)
    )


def run(engine: Engine, requests: list[EngineRequest]) -> Made:
    for each in requests:
        engine.add_request(each)
    made: Made = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            made[output.sequence_id].append(output)
    assert engine.stats().num_used_blocks == 0
    return made


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    assert outputs[-1].finish_reason is not None
    return [token_id for output in outputs for token_id in output.token_ids]


def said(made: Made) -> dict[int, tuple[list[int], FinishReason | None, str]]:
    return {
        each: (ids_of(outputs), outputs[-1].finish_reason, outputs[-1].error_message)
        for each, outputs in made.items()
    }


def every_request() -> list[EngineRequest]:
    """Each grammar, greedily and drawn, and rows without one."""
    specs: list[GrammarSpec | None] = [*SPECS, None]
    drawn = {"temperature": 1.3, "top_p": 0.95}
    return [request(2 * place + 1, spec) for place, spec in enumerate(specs)] + [
        request(2 * place + 2, spec, **drawn) for place, spec in enumerate(specs)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, tuple[list[int], FinishReason | None, str]]:
    """What each request says alone, without drafts and without a prefix cache."""
    engine, _ = engine_parts(folder / "target", is_cached=False, drafter="none")
    made: Made = {}
    for each in every_request():
        made |= run(engine, [replace(each, params=replace(each.params, num_draft_tokens=0))])
    return said(made)


def test_outputs_follow_their_grammars(
    expected: dict[int, Any], grammars: Grammars, tokenizer: Tokenizer
) -> None:
    reasons = set()
    for each in every_request():
        token_ids, reason, error = expected[each.sequence_id]
        assert error == ""
        if each.params.grammar is not None:
            check_text(grammars, tokenizer, each.params.grammar, token_ids, reason)
            reasons.add(reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "none", "is_cached": False},
        {"drafter": "suffix"},
        {"drafter": "ngram", "num_speculative_tokens": 9},
        {"drafter": "suffix", "num_blocks": 12},
        {"drafter": "none", "num_blocks": 9, "budget": 20},
        {"drafter": "suffix", "cpu_kernels": "torch"},
    ],
    ids=str,
)
def test_nothing_changes_what_is_said(
    folder: Path, expected: dict[int, Any], settings: dict[str, Any]
) -> None:
    engine, _ = engine_parts(folder / "target", **settings)
    made = run(engine, every_request())
    assert said(made) == expected
    assert sum(outputs[-1].num_accepted_tokens for outputs in made.values()) > 0
    assert (engine.stats().total_preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_the_call_that_computes_logits_picks_what_torch_picks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, drafter: str
) -> None:
    """A batch of masked and free rows, greedy and drawn: most masks are not filled, and no bit differs."""
    settings = {"dtype": dtype, "drafter": drafter, "cpu_kernels": "native"}
    engine, runner = engine_parts(folder / "target", **settings)
    monkeypatch.setattr(GrammarMask, "apply", None)
    in_one_call = said(run(engine, every_request()))
    monkeypatch.undo()
    engine, runner = engine_parts(folder / "target", **settings)
    monkeypatch.setattr(runner._sampler, "_pick", None)
    monkeypatch.setattr(runner._sampler, "takes_best", lambda rows: False)
    assert said(run(engine, every_request())) == in_one_call


@pytest.mark.parametrize("drafter", ["draft_model", "self"])
def test_a_models_drafts_change_nothing(folder: Path, expected: dict[int, Any], drafter: str) -> None:
    settings: dict[str, Any] = {"num_draft_layers": 1}
    if drafter == "draft_model":
        settings = {"draft_model": str(folder / "draft")}
    engine, _ = engine_parts(folder / "target", drafter=drafter, **settings)
    assert said(run(engine, every_request())) == expected
    assert engine.stats().total_draft_failures == 0


def test_forced_tokens_save_steps(folder: Path) -> None:
    engine, _ = engine_parts(folder / "target", drafter="none", num_speculative_tokens=8)
    num_steps = []
    for num_drafts in (0, -1):
        before = engine.stats().total_steps
        made = run(engine, [request(1, FIXED, num_draft_tokens=num_drafts, max_tokens=100)])
        assert made[1][-1].finish_reason is FinishReason.STOP
        num_steps.append(engine.stats().total_steps - before)
    assert num_steps[1] < num_steps[0] / 2


@pytest.mark.parametrize("mark", ["</s>", "a<|im_end|>", "<|im_start|>", "<tool → call>b"])
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_the_text_of_special_tokens_is_written_like_other_text(
    folder: Path, tokenizer: Tokenizer, drafter: str, mark: str
) -> None:
    """Tokens that end a text, others, and ones that are special for llguidance alone."""
    engine, _ = engine_parts(folder / "target", drafter=drafter)
    texts = {
        schema({mark: {"const": mark}}): json.dumps({mark: mark}, ensure_ascii=False),
        GrammarSpec(kind=GrammarKind.CHOICE, source=json.dumps([mark])): mark,
        regex(f"{re.escape(mark)}x"): f"{mark}x",
    }
    for spec, text in texts.items():
        for drafts in (0, -1):
            outputs = run(engine, [request(1, spec, num_draft_tokens=drafts, max_tokens=90)])[1]
            token_ids = ids_of(outputs)
            assert (outputs[-1].finish_reason, outputs[-1].error_message) == (FinishReason.STOP, "")
            if token_ids[-1] in EOS_IDS:
                token_ids.pop()
            assert text_of(tokenizer, token_ids) == text


def test_siblings_say_what_their_seeds_say_alone(folder: Path) -> None:
    engine, _ = engine_parts(folder / "target", drafter="suffix")
    together = replace(request(1, PERSON, temperature=1.0), sibling_ids=(2, 3))
    made = run(engine, [together])
    for index in (1, 2):
        alone = replace(request(1, PERSON, temperature=1.0, seed=sibling_seed(1, index)), sequence_id=9)
        assert ids_of(run(engine, [alone])[9]) == ids_of(made[1 + index])


def test_a_grammar_that_allows_everything_changes_nothing(folder: Path, tokenizer: Tokenizer) -> None:
    engine, _ = engine_parts(folder / "target", drafter="none")
    # Special tokens and incomplete characters are not text.
    ids = tuple(each for each in range(4, 350) if text_of(tokenizer, [each]).isascii())
    for params in ({}, {"temperature": 1.0}):
        free = request(1, None, allowed_token_ids=ids, stop_token_ids=(), **params)
        masked = replace(free, params=replace(free.params, grammar=regex(r"(?s:.*)")))
        plain = ids_of(run(engine, [free])[1])
        assert ids_of(run(engine, [masked])[1]) == plain
        assert len(plain) == MAX_TOKENS


@pytest.mark.parametrize("num_draft_tokens", [0, -1])
def test_the_grammars_end_wins_over_min_tokens_and_ignore_eos(folder: Path, num_draft_tokens: int) -> None:
    engine, _ = engine_parts(folder / "target", drafter="suffix")
    spec = GrammarSpec(kind=GrammarKind.CHOICE, source='["yes"]')
    for params in ({"min_tokens": 30}, {"stop_token_ids": ()}, {"min_tokens": 30, "stop_token_ids": ()}):
        made = run(engine, [request(1, spec, num_draft_tokens=num_draft_tokens, **params)])
        assert made[1][-1].finish_reason is FinishReason.STOP, params
        assert made[1][-1].error_message == ""


def test_min_tokens_delays_an_end_that_may_be_delayed(folder: Path, tokenizer: Tokenizer) -> None:
    engine, _ = engine_parts(folder / "target", drafter="none")
    for params in ({"min_tokens": 12}, {"stop_token_ids": ()}):
        # Nothing but an end or more of the same is likely.
        biased = request(1, regex("a*"), logit_bias=((EOS_IDS[0], 100.0),), max_tokens=12, **params)
        made = run(engine, [biased])
        assert len(ids_of(made[1])) == 12
        assert made[1][-1].finish_reason is FinishReason.LENGTH


def test_a_stop_id_of_the_client_ends_the_text_early(folder: Path, tokenizer: Tokenizer) -> None:
    engine, _ = engine_parts(folder / "target", drafter="none")
    colon = tokenizer.token_to_id(":")
    made = run(engine, [request(1, PERSON, stop_token_ids=(*EOS_IDS, colon), bad_words=())])
    reason = made[1][-1]
    assert (reason.finish_reason, reason.stop_reason) in (
        (FinishReason.STOP, str(colon)),
        (FinishReason.STOP, str(EOS_IDS[0])),
        (FinishReason.LENGTH, ""),
    )


def test_an_empty_intersection_ends_the_request_alone(folder: Path) -> None:
    engine, _ = engine_parts(folder / "target", drafter="suffix")
    other = request(2, PERSON)
    alone = said(run(engine, [other]))
    made = run(engine, [request(1, FIXED, allowed_token_ids=(50,)), other])
    assert made[1][-1].finish_reason is FinishReason.ERROR
    assert made[1][-1].error_status == "INVALID_ARG"
    assert "a grammar, allowed_token_ids" in made[1][-1].error_message
    assert said({2: made[2]}) == alone


def test_beams_are_refused_by_name(folder: Path) -> None:
    engine, _ = engine_parts(folder / "target", drafter="none")
    beams = replace(request(1, PERSON), sibling_ids=(2,), beam=BeamParams())
    with pytest.raises(InvalidRequestError, match="beam_width = 2: expected 1 with grammar"):
        engine.add_request(beams)
    assert not engine.has_work


def test_a_grammar_that_goes_too_far_ends_its_sequence_alone(folder: Path, tokenizer: Tokenizer) -> None:
    """This expression compiles, but a text in it soon needs more states than allowed."""
    hostile = regex(r"((((a{1,100}){1,100}){1,100}){1,100})b")
    engine, _ = engine_parts(folder / "target", drafter="suffix")
    other = request(2, PERSON, temperature=1.0)
    alone = said(run(engine, [other]))
    always_a = ((tokenizer.token_to_id("a"), 100.0),)
    made = run(engine, [request(1, hostile, max_tokens=200, logit_bias=always_a), other])
    assert said({2: made[2]}) == alone
    last = made[1][-1]
    assert last.error_status == "INVALID_ARG"
    assert last.error_message.startswith("the output cannot follow the grammar any further: ")
    # What has failed is not used again.
    assert engine.grammars is not None
    assert engine.grammars.find(hostile) is None
    always_b = ((tokenizer.token_to_id("b"), 100.0), (tokenizer.token_to_id("a"), 50.0))
    made = run(engine, [request(3, hostile, logit_bias=always_b)])
    assert made[3][-1].finish_reason is FinishReason.STOP


def test_who_waits_with_a_grammar_that_another_has_worn_out_goes_on_with_it(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled while steps wait for it; a request that comes later gets the grammar anew."""
    compiled: list[GrammarSpec] = []
    compile_one = Grammars._compile

    def counted(grammars: Grammars, spec: GrammarSpec) -> CompiledGrammar:
        compiled.append(spec)
        return compile_one(grammars, spec)

    monkeypatch.setattr(Grammars, "_compile", counted)
    source = f'start: "x" | "long" y\ny: {"x? " * 1_500}\nx: "a" /[0-9]+/ ","'
    shared = GrammarSpec(kind=GrammarKind.LARK, source=source)
    likely = {"l": 100.0, ",": 95.0, "a": 90.0, "1": 50.0}
    too_far = tuple((tokenizer.token_to_id(each), bias) for each, bias in likely.items())
    short = ((tokenizer.token_to_id("x"), 100.0),)
    # One sequence runs at a time.
    engine, _ = engine_parts(folder / "target", drafter="none", num_blocks=16, budget=1)
    made = run(engine, [request(1, shared, logit_bias=too_far), request(2, shared, logit_bias=short)])
    assert "at one place of the text it has too many ways to go on" in made[1][-1].error_message
    assert text_of(tokenizer, ids_of(made[2])) == "x"
    assert made[2][-1].finish_reason is FinishReason.STOP
    assert compiled == [shared]
    # Nobody holds it any more.
    made = run(engine, [request(3, shared, logit_bias=short)])
    assert text_of(tokenizer, ids_of(made[3])) == "x"
    assert compiled == [shared] * 2
    # It may also be worn out after it was compiled for a request, and before the engine takes that.
    assert engine.grammars is not None
    held = engine.grammars.get(shared)
    engine.grammars.forget(held)
    made = run(engine, [request(4, shared, logit_bias=short)])
    assert text_of(tokenizer, ids_of(made[4])) == "x"
    assert compiled == [shared] * 2


class _Fuzz:
    """Random requests, aborts and deadlines on a small pool; every output is replayed."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.engine, _ = engine_parts(
            folder / "target",
            num_blocks=rng.choice((9, 14, 40)),
            budget=rng.choice((8, 24, 64)),
            is_cached=rng.random() < 0.5,
            drafter=rng.choice(("none", "suffix", "ngram")),
            num_speculative_tokens=rng.choice((1, 4, 12)),
        )
        self.specs: dict[int, GrammarSpec | None] = {}
        self.made: Made = defaultdict(list)

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            roll = self.rng.random()
            if roll < 0.3:
                self._add()
            elif roll < 0.36 and self.specs:
                aborted = self.engine.abort(self.rng.choice(list(self.specs)))
                if aborted is not None:
                    self.made[aborted.sequence_id].append(aborted)
            else:
                self._step()
        while self.engine.has_work:
            self._step()
        assert self.engine.stats().num_used_blocks == 0

    def _step(self) -> None:
        for output in self.engine.step():
            self.made[output.sequence_id].append(output)

    def _add(self) -> None:
        number = len(self.specs)
        spec = self.rng.choice((*SPECS, None))
        num_siblings = self.rng.choice((0, 0, 1, 2))
        params: dict[str, Any] = self.rng.choice(
            (
                {},
                {"temperature": 1.0},
                {"temperature": 1.5, "top_k": 30, "repetition_penalty": 1.1},
                {"temperature": 1.0, "num_log_probs": 2, "presence_penalty": 0.5},
                {"min_tokens": 6, "bad_words": ((44,), (45, 46))},
                {"stop_token_ids": (), "temperature": 0.7},
            )
        )
        added = request(number, spec, **params | {"max_tokens": self.rng.randint(1, 50)})
        siblings = tuple(range(number + 1, number + 1 + num_siblings))
        timeout_s = self.rng.uniform(0.0, 0.3) if self.rng.random() < 0.1 else None
        self.engine.add_request(replace(added, sibling_ids=siblings, timeout_s=timeout_s))
        self.specs |= dict.fromkeys((number, *siblings), spec)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_output_follows_its_grammar(
    folder: Path, grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    fuzz = _Fuzz(folder, random.Random(seed))
    fuzz.run(120)
    assert fuzz.made.keys() == fuzz.specs.keys()
    for sequence_id, outputs in fuzz.made.items():
        finals = [output for output in outputs if output.finish_reason is not None]
        assert finals == outputs[-1:]
        assert finals[0].finish_reason is not FinishReason.ERROR, finals[0].error_message
        spec = fuzz.specs[sequence_id]
        if spec is not None:
            check_text(grammars, tokenizer, spec, ids_of(outputs), finals[0].finish_reason)
