"""How the fields for filtering and drawing set the engine's parameters."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.triton_server_doubles import LIMITS, llm_source
from naiad.frontend.request import GenerateRequest
from naiad.sequence import SamplingParams, TopPDecay
from naiad.triton_server.requests.llm import read_request


def read(**fields: Any) -> SamplingParams:
    request = read_request(llm_source(**fields), LIMITS)
    assert isinstance(request, GenerateRequest)
    return request.rows[0].params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0.0),
        ({"temperature": 1.0}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.0, "runtime_top_k": 5}, 0.0),
        ({"runtime_top_k": 1, "temperature": 0.7}, 0.0),
        ({"runtime_top_k": 5}, 1.0),
        ({"runtime_top_p": 0.5}, 1.0),
        ({"runtime_top_p": 1.0}, 1.0),
        ({"runtime_top_p": 0.0}, 0.0),
        ({"runtime_top_p": -1.0, "temperature": 1.0}, 0.0),
        ({"min_p": 0.1}, 1.0),
        ({"min_p": 0.0}, 0.0),
    ],
)
def test_greedy_rule_of_tensorrt_llm(fields: dict[str, Any], expected: float) -> None:
    assert read(**fields).temperature == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, None),
        ({"runtime_top_p_decay": 1.0, "runtime_top_p_min": 0.5, "runtime_top_p_reset_ids": 3}, None),
        ({"runtime_top_p_decay": 0.5, "runtime_top_p": 1.0}, TopPDecay(0.5, 1e-6)),
        (
            {
                "runtime_top_p": 0.75,
                "runtime_top_p_decay": 0.5,
                "runtime_top_p_min": 0.25,
                "runtime_top_p_reset_ids": 3,
            },
            TopPDecay(0.5, 0.25, 3),
        ),
    ],
)
def test_a_decay_of_top_p(sent: dict[str, Any], expected: TopPDecay | None) -> None:
    assert read(**sent).top_p_decay == expected
