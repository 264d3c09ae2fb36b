"""What a client got, brought into one form, and the comparison with what it gets alone."""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from helpers.frontend_calls import OF_THE_MOMENT, flat
from helpers.mixes.drawn import Asked, Door

# (row, sequence) → output → values.
Answers = dict[tuple[int, int], dict[str, Any]]

_ADDED = {
    *("output_ids", "output_log_probs", "generation_logits", "top_log_prob_ids", "top_log_probs"),
    *("token_ids", "logprobs", "text_output"),
}
_SUMMED = {"num_output_tokens", "sequence_length"}
_INDICES = {"batch_index", "sequence_index"}
# How a request ends whose client has left or stopped it, and one whose deadline has passed before it began.
# The last event of a stream that fails has no status, but a type.
_CANCELLED = {("CANCELLED", "the client is gone"), ("CANCELLED", "Request was cancelled")}
_LATE_STATUSES = {"UNAVAILABLE", 503, "service_unavailable_error"}
_LATE = "timeout: the request was not started within"
_TOKEN_IDS = {"output_ids", "token_ids"}
_LOSS_STATUSES, _AWAY_STATUSES = {"INTERNAL", 500, "server_error"}, {"UNAVAILABLE", 503}


# An engine finds this out as it generates; other refusals come before.
_NO_TOKEN = "no token is possible"


class Meets(enum.Enum):
    """What a request meets of the loss of the engine."""

    ENGINE = "none of it"
    LOSS = "it is running then"
    NOBODY = "there is no engine when it comes"


@dataclass
class Reply:
    """What came back for one request.

    Attributes:
        responses: output → values, flattened, of each response in order.
        errors: status and message of each error.
        num_finals: number of times that the client was told that this is all.
        has_left: whether the client is gone.
    """

    responses: list[dict[str, Any]] = field(default_factory=list)
    errors: list[tuple[Any, str]] = field(default_factory=list)
    num_finals: int = 0
    has_left: bool = False

    def add(self, tensors: dict[str, Any]) -> None:
        """Keep the tensors of a response."""
        self.responses.append(flat(tensors))

    def answers(self) -> Answers:
        """The responses of each sequence, joined however they were divided."""
        found: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for each in self.responses:
            key = (each.get("batch_index", [0])[0], each.get("sequence_index", [0])[0])
            found.setdefault(key, []).append(each)
        return {key: _joined(pieces) for key, pieces in found.items()}


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for name in sorted({name for piece in pieces for name in piece} - _INDICES - OF_THE_MOMENT):
        values = [piece[name] for piece in pieces if name in piece]
        if name == "text_output":
            answer[name] = ["".join(parts) for parts in zip(*values, strict=True)]
        elif name == "logprobs" and values[0] and isinstance(values[0][0], str):
            lists = [[json.loads(each) or [] for each in value] for value in values]
            answer[name] = [list(itertools.chain(*parts)) for parts in zip(*lists, strict=True)]
        elif name in _ADDED:
            answer[name] = [value for each in values for value in each]
        elif name in _SUMMED:
            answer[name] = sum(value for each in values for value in each)
        else:
            answer[name] = values[-1]
    return answer


def check_reply(
    asked: Asked,
    found: Reply,
    alone: Reply,
    meets: Meets = Meets.ENGINE,
    row_alone: Callable[[int], Reply] | None = None,
) -> None:
    """Compare a reply with that to the same request alone, which nobody cancelled and no loss met.

    Args:
        asked: the request.
        found: its reply.
        alone: its reply alone.
        meets: what it met of the loss of the engine.
        row_alone: gives the reply to one row of it alone; None: the whole request is one row.

    Raises:
        AssertionError: it is wrong.
    """
    assert alone.num_finals == 1, "alone: not exactly one FINAL"
    assert found.num_finals == 1, f"{found.num_finals} FINALs"
    assert len(found.errors) <= 1, f"several errors: {found.errors}"
    answers, expected = found.answers(), alone.answers()
    if (answers, found.errors) == (expected, alone.errors):
        return
    if found.errors and found.errors == alone.errors:
        # One row is refused in the end; how far the others have come by then is a matter of the steps.
        return
    problem = f"{found.errors or answers}\n  but alone\n{alone.errors or expected}"
    is_of_loss = bool(found.errors) and _is_of_loss(found, meets)
    assert asked.may_end_early or is_of_loss, f"another answer than alone:\n{problem}"
    if found.errors:
        assert is_of_loss or _is_early(asked, *found.errors[0]), f"another error than alone:\n{problem}"
    elif alone.errors:
        # It ended before the engine could refuse it, or the row of it that is refused.
        expected = {}
        for (row, index), answer in answers.items():
            of_row = alone if row_alone is None else row_alone(row)
            expected[row, index] = {} if of_row.errors else of_row.answers()[0, index]
            may_begin = not of_row.errors or _NO_TOKEN in of_row.errors[0][1]
            assert may_begin or _has_no_token(asked, row, answer), problem
    assert answers.keys() <= expected.keys(), problem
    has_beams = asked.rows[0].get("beam_width", 1) > 1
    for key, answer in answers.items():
        if answer != expected[key]:
            reasons = answer.get("finish_reason", [])
            assert found.errors or not reasons or not _early_reasons(asked).isdisjoint(reasons), (
                f"ended early as {reasons}: {problem}"
            )
            assert has_beams or _is_beginning(asked, answer, expected[key]), f"no beginning: {problem}"


def _is_early(asked: Asked, status: Any, message: str) -> bool:
    """Whether a request ends with this error because its client or its deadline has ended it."""
    is_late = asked.may_be_late and status in _LATE_STATUSES and message.startswith(_LATE)
    return is_late or (asked.ending is not None and (status, message) in _CANCELLED)


def _early_reasons(asked: Asked) -> set[str]:
    """The finish reasons of what its client or its deadline has ended; the OpenAI API has none for these."""
    reasons = {"cancelled"} if asked.ending is not None else set()
    if asked.may_be_late:
        reasons.add("length" if asked.door.is_openai else "timeout")
    return reasons


def _has_no_token(asked: Asked, row: int, answer: dict[str, Any]) -> bool:
    """Whether the ids of an answer, each beam's, are at most those of its prompt."""
    prompt = asked.rows[row].get("input_ids", [])
    return answer.get("output_ids", []) in ([], prompt, prompt * asked.rows[row].get("beam_width", 1))


def _is_of_loss(found: Reply, meets: Meets) -> bool:
    """Whether a reply ends with the error of a request that the loss of the engine meets so."""
    ((status, message),) = found.errors
    if meets is Meets.LOSS:
        return status in _LOSS_STATUSES and "the engine process ended while this request" in message
    is_away = status in _AWAY_STATUSES and ("restarting" in message or "does not serve now" in message)
    return meets is Meets.NOBODY and is_away and not found.responses


def _is_beginning(asked: Asked, answer: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether what was made before an early end is how the whole answer begins."""
    if not expected:
        return True
    stop_words = [word for row in asked.rows for word in row.get("stop_words", [])]
    for name in _ADDED & answer.keys():
        whole, part = expected.get(name, []), answer[name]
        if name == "text_output":
            if not all(_begins(text, *pair, stop_words) for text, *pair in zip(part, whole, strict=True)):
                return False
        elif asked.door.is_openai and name == "logprobs":
            # What an echo says of a prompt that was not computed to its end is null.
            if not all(
                each in (of_all, (of_all[0], None)) for each, of_all in zip(part, whole, strict=False)
            ):
                return False
        elif asked.door is Door.VLLM and name == "logprobs":
            if not all(each == all_of[: len(each)] for each, all_of in zip(part, whole, strict=True)):
                return False
        elif not _values_begin(name, part, whole, stop_words):
            return False
    return True


def _values_begin(name: str, part: list[Any], whole: list[Any], stop_words: list[str]) -> bool:
    """Whether values are how others begin; those of tokens that were held back may follow.

    A token that is held back has at least a byte of a stop string, or of half a character before one.
    """
    if len(part) > len(whole):
        most = max((len(word.encode()) + 3 for word in stop_words), default=0)
        if not most or (name in _TOKEN_IDS and len(part) - len(whole) > most):
            return False
    num_common = min(len(part), len(whole))
    return part[:num_common] == whole[:num_common]


def _begins(text: str, whole: str, stop_words: list[str]) -> bool:
    """Whether a text is how another begins.

    An early end sends text that was held back: the beginning of what may have become a stop string, or the
    bytes of half a character.
    """
    text = text.rstrip("\ufffd")
    if whole.startswith(text):
        return True
    return text.startswith(whole) and any(word.startswith(text[len(whole) :]) for word in stop_words)
