"""The fields of a beam search, and what can not be asked for together with one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from naiad.errors import InvalidRequestError
from naiad.sequence import BeamParams, SamplingParams
from naiad.triton_server.request_fields import Scalar

# The reference's own: no penalty, and the first texts that have ended are the result.
DEFAULT_LENGTH_PENALTY = 0.0
DEFAULT_EARLY_STOPPING = True

# Without a search these ask for nothing: clients send them always.
_OFF: Mapping[str, tuple[Scalar, ...]] = {
    "length_penalty": (0.0, 1.0),
    "early_stopping": (False,),
    "beam_search_diversity_rate": (0.0,),
}

# Values that neither draw nor filter. What is not here has none that beams go with.
_GREEDY: Mapping[str, tuple[Scalar, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, 1),
    "min_p": (0.0,),
    "top_p_decay": (1.0,),
}
_NOT_WITH_BEAMS = ("stream", "return_context_logits", "return_generation_logits", "num_log_probs")


def read_beam_params(scalars: Mapping[str, Scalar]) -> BeamParams | None:
    """The search that one row asks for; None without `beam_width` > 1.

    Args:
        scalars: the row's checked fields.

    Raises:
        InvalidRequestError: names the field, its value and what is allowed.
    """
    width = int(scalars.get("beam_width", 1))
    if width == 1:
        for name, allowed in _OFF.items():
            _check(scalars, name, allowed, "without beams (beam_width > 1)")
        return None
    with_beams = f"with beam_width = {width}"
    for name in _NOT_WITH_BEAMS:
        if scalars.get(name):
            raise InvalidRequestError(
                f"{name} = {scalars[name]!r} is not supported {with_beams}: do not send it"
            )
    for name, allowed in _GREEDY.items():
        _check(scalars, name, allowed, f"{with_beams}, as nothing is drawn")
    top_p = float(scalars.get("top_p", 0.0))
    if 0 < top_p < 1:
        raise InvalidRequestError(
            f"top_p = {top_p}: expected 1.0 or at most 0.0 {with_beams}, as nothing is drawn"
        )
    if int(scalars.get("num_return_sequences", 1)) > width:
        raise InvalidRequestError(
            f"num_return_sequences = {scalars['num_return_sequences']}: expected at most {width} {with_beams}"
        )
    return BeamParams(
        length_penalty=float(scalars.get("length_penalty", DEFAULT_LENGTH_PENALTY)),
        stops_early=bool(scalars.get("early_stopping", DEFAULT_EARLY_STOPPING)),
        diversity_rate=float(scalars.get("beam_search_diversity_rate", 0.0)),
    )


def without_drawing(params: SamplingParams) -> SamplingParams:
    """A row's parameters as a search needs them.

    Raises:
        InvalidRequestError: there are stop words, which a search can not end with.
    """
    if params.stop_sequences:
        raise InvalidRequestError(
            "stop_words_list is not supported with beam_width > 1: expected no words "
            "(stop_token_ids end a beam)"
        )
    return msgspec.structs.replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def _check(scalars: Mapping[str, Scalar], name: str, allowed: tuple[Scalar, ...], where: str) -> None:
    if name in scalars and scalars[name] not in allowed:
        expected = " or ".join(str(value) for value in allowed)
        raise InvalidRequestError(f"{name} = {scalars[name]!r}: expected {expected} {where}")
