"""Top-n-sigma: which tokens it keeps, and how clients of each frontend request it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.sampling_rows import make_row
from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import LIMITS, FakeSource, llm_source
from helpers.vllm_requests import make_reader, source
from naiad.errors import InvalidRequestError
from naiad.frontend.prompt import PromptEncoder
from naiad.frontend.request import GenerateRequest, StopRequest
from naiad.sampling.logits_processors import LOGITS_PROCESSORS, apply_processors
from naiad.sequence import SamplingParams
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.llm import read_request
from naiad.triton_server.requests.text import TextRequestReader

LOGITS = [0.0, 1.0, 2.0, 3.0, 10.0]


def kept(logits: list[float], **params: float) -> list[int]:
    """The ids that remain possible."""
    changed = torch.tensor([logits])
    apply_processors(LOGITS_PROCESSORS, changed, [make_row(**params)])
    return changed[0].isfinite().nonzero().flatten().tolist()  # type: ignore[no-any-return]


def deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


@pytest.mark.parametrize(
    ("distance", "expected"),
    [(9.9, [1, 2, 3, 4]), (8.5, [2, 3, 4]), (7.5, [3, 4]), (6.5, [4]), (10.1, [0, 1, 2, 3, 4])],
)
def test_tokens_within_n_deviations_of_the_greatest_are_kept(distance: float, expected: list[int]) -> None:
    assert kept(LOGITS, top_n_sigma=distance / deviation(LOGITS)) == expected


def test_impossible_tokens_do_not_count() -> None:
    possible = [*LOGITS, -math.inf, -math.inf]
    assert kept(possible, top_n_sigma=7.5 / deviation(LOGITS)) == [3, 4]


def test_tokens_that_other_fields_exclude_do_not_count() -> None:
    allowed = (0, 1, 4)
    limit = 9.5 / deviation([LOGITS[each] for each in allowed])
    changed = torch.tensor([LOGITS])
    apply_processors(LOGITS_PROCESSORS, changed, [make_row(allowed_token_ids=allowed, top_n_sigma=limit)])
    assert changed[0].isfinite().nonzero().flatten().tolist() == [1, 4]


def test_equal_logits_are_all_kept() -> None:
    assert kept([2.0, 2.0, 2.0], top_n_sigma=0.5) == [0, 1, 2]


def test_a_row_without_it_is_left_alone() -> None:
    def changed(rows: list[float]) -> Tensor:
        logits = torch.tensor([LOGITS] * len(rows))
        apply_processors(
            LOGITS_PROCESSORS, logits, [make_row(index, top_n_sigma=each) for index, each in enumerate(rows)]
        )
        return logits

    both = changed([0.0, 1.0])
    assert both[0].tolist() == LOGITS
    assert torch.equal(both[1], changed([1.0])[0])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_directory(write_tokenizer(folder, tiny_tokenizer("byte_level")))


WAYS = ("llm", "llm's parameter", "text", "text's parameter", "vLLM's key", "vLLM's parameter")


def asked(way: str, value: float, tokenizer: Tokenizer) -> SamplingParams:
    """The sampling parameters of a row whose client sends this value."""
    tensor = np.array([[value]], dtype=np.float32)
    texts = {"text_input": np.array([[b"Hi"]], dtype=np.object_), "max_tokens": np.array([[4]])}
    text = TextRequestReader(PromptEncoder(tokenizer, LIMITS.max_model_len, LIMITS.vocab_size))
    vllm = make_reader(tokenizer)
    parameters = {"top_n_sigma": value}
    read: GenerateRequest | StopRequest
    match way:
        case "llm":
            read = read_request(llm_source(top_n_sigma=tensor), LIMITS)
        case "llm's parameter":
            read = read_request(llm_source(parameters=parameters), LIMITS)
        case "text":
            read = text.read(FakeSource(texts | {"top_n_sigma": tensor}), LIMITS)
        case "text's parameter":
            read = text.read(FakeSource(texts, parameters), LIMITS)
        case "vLLM's key":
            read = vllm.read(source(parameters), LIMITS)
        case _:
            read = vllm.read(source(None, parameters), LIMITS)
    assert isinstance(read, GenerateRequest)
    return read.rows[0].params


@pytest.mark.parametrize("way", WAYS)
def test_each_frontend_takes_it_and_then_draws(tokenizer: Tokenizer, way: str) -> None:
    params = asked(way, 1.5, tokenizer)
    assert (params.top_n_sigma, params.temperature) == (1.5, 1.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_what_keeps_nothing_is_refused(tokenizer: Tokenizer, way: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^top_n_sigma = {value}: expected a finite number > 0$"):
        asked(way, value, tokenizer)


def test_it_is_off_when_nobody_asks() -> None:
    read = read_request(llm_source(), LIMITS)
    assert isinstance(read, GenerateRequest)
    assert read.rows[0].params.top_n_sigma == 0


def test_beams_do_not_go_with_it() -> None:
    with pytest.raises(InvalidRequestError, match=r"^top_n_sigma = 2.0 is not supported with beam_width = 2"):
        read_request(llm_source(top_n_sigma=2.0, beam_width=2), LIMITS)
