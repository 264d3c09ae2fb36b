from __future__ import annotations

import math

from naiad.openai_server.api.log_probs import LogProbWriter, with_first
from naiad.outputs import TokenLogProbs
from naiad.tokenization import TokenTable

# Tokens 2 and 3 are parts of characters, which are shown in the same way.
TABLE = TokenTable([b"a", b"b", b"\xe4", b"\xf0"], {}, frozenset())


def test_tokens_of_the_same_text_have_the_value_of_the_best() -> None:
    each = TokenLogProbs(-3.0, [3, 1], [-0.1, -2.5], rank=3)
    found = LogProbWriter(TABLE, 2).completion([2], [each], [0])
    assert found.top_logprobs == [{"\ufffd": -0.1, "b": -2.5}]
    assert found.token_logprobs == [-3.0]


def test_a_token_that_is_not_among_the_best_comes_last() -> None:
    each = TokenLogProbs(-3.0, [1], [-0.1], rank=2)
    (found,) = LogProbWriter(TABLE, 1).completion([0], [each], [0]).top_logprobs
    assert found is not None
    assert list(found.items()) == [("b", -0.1), ("a", -3.0)]


def test_listed_tokens_have_their_ranks_and_the_prompts_own_comes_first() -> None:
    each = TokenLogProbs(-3.0, [1, 2], [-0.1, -math.inf], rank=9)
    first, second = LogProbWriter(TABLE, 2).prompt([1, 0], [None, each])
    assert first is None
    assert second is not None
    assert [(token_id, entry.rank, entry.logprob) for token_id, entry in second.items()] == [
        (0, 9, -3.0),
        (1, 1, -0.1),
        (2, 2, -9999.0),
    ]
    assert [entry.decoded_token for entry in second.values()] == ["a", "b", "\ufffd"]


def test_fewer_best_tokens_than_were_computed() -> None:
    each = TokenLogProbs(-0.1, [1, 0, 2], [-0.1, -1.0, -2.0], rank=1)
    (found,) = LogProbWriter(TABLE, 0).prompt([1], [each])
    assert found is not None
    assert list(found) == [1]


def test_a_prompt_that_was_not_computed_has_an_entry_for_each_token() -> None:
    assert with_first([1, 2, 3], []) == [None, None, None]
    each = TokenLogProbs(-1.0)
    assert with_first([1, 2], [each]) == [None, each]
