"""The typed request, into which every frontend reads its clients' requests.

For each row a frontend provides a mapping from field names to plain values (numbers, strings, lists) and
the prompt's token ids. `build_request` checks them by the table of fields.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from naiad.errors import InvalidRequestError
from naiad.frontend.field import INT32_MAX, Field, FieldError, Kind, Scalar
from naiad.frontend.fields import FIELD, FIELDS
from naiad.frontend.grammar import guide_of
from naiad.frontend.limits import MAX_LOGITS_BYTES, MAX_TIMEOUT_US, ModelLimits
from naiad.frontend.prompt import EncodedPrompt
from naiad.sequence import (
    DEFAULT_KV_PRIORITY,
    BeamParams,
    EngineRequest,
    GrammarSpec,
    KVRetention,
    SamplingParams,
    TextContext,
    TopPDecay,
)

# TensorRT-LLM's defaults: no length penalty, and a search ends as soon as enough beams have ended.
DEFAULT_LENGTH_PENALTY = 0.0
DEFAULT_EARLY_STOPPING = True
DEFAULT_TOP_P_MIN = 1e-6
_BYTES_PER_LOGIT = 4

_PER_REQUEST = tuple(field for field in FIELDS if field.per_request)
_OUTPUTS = {field.name: field.requested_output for field in FIELDS if field.requested_output}
_PARAMS = {
    field.name: field.parameter_of_sampling
    for field in FIELDS
    if field.is_scalar and field.parameter_of_sampling
}
_ALIASES = tuple(field for field in FIELDS if field.alias_of)
_LIMITED_WITH_BEAMS = tuple(field for field in FIELDS if field.is_scalar and field.with_beams is not None)
_LIMITED_WITHOUT_BEAMS = tuple(field for field in FIELDS if field.without_beams is not None)
_FILTERS = tuple(field for field in FIELDS if field.filters)
_RETENTION = tuple(field for field in FIELDS if field.sets == "retention")
_GUIDES = frozenset(field.name for field in FIELDS if field.sets == "grammar")
_STARTS, _ENDS, _PRIORITIES, _DURATIONS, _DECODE_PRIORITY, _DECODE_DURATION = _RETENTION
# TensorRT-LLM's value for a range without an end and for a retention without a duration.
_NONE = -1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutputs:
    """The outputs that a request asks for; they are the same for all of its rows.

    Attributes:
        num_log_probs: number of best tokens sent for each new token's position; 0 = none.
        num_prompt_log_probs: number of best tokens sent for each prompt token's position; −1 = not even the
            prompt token's own log-probability.
        beam_width: number of beams for each prompt; 1 = no beam search.
        num_return_sequences: number of sequences sent for each prompt, ≥ 1.
    """

    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    num_cached_tokens: bool = False
    log_probs: bool = False
    num_log_probs: int = 0
    num_prompt_log_probs: int = -1
    context_logits: bool = False
    generation_logits: bool = False
    perf_metrics: bool = False
    num_return_sequences: int = 1
    beam_width: int = 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences for each prompt; a beam search may have more than are sent."""
        return max(self.beam_width, self.num_return_sequences)

    @property
    def num_engine_log_probs(self) -> int:
        """The value for `SamplingParams.num_log_probs`; −1 = no log-probabilities at all."""
        return self.num_log_probs if self.log_probs or self.num_log_probs else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One prompt: its ids, its parameters and, if a detokenizer follows, its text context.

    Attributes:
        tenant: who gets a fair share of the engine; None: the salt is the tenant.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    text: TextContext | None
    cache_salt: str
    tenant: str | None = None
    beam: BeamParams | None = None
    draft_token_ids: tuple[int, ...] = ()
    retention: KVRetention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request: its rows, and the outputs that it asks for.

    Attributes:
        joins_sequences: whether each row gets a single response, when all of its sequences have ended.
    """

    request_id: str
    rows: list[RequestRow]
    timeout_s: float | None
    streaming: bool
    exclude_input: bool
    outputs: RequestedOutputs
    joins_sequences: bool = False

    @property
    def num_sequences(self) -> int:
        """Number of sequences of all rows."""
        return len(self.rows) * self.outputs.num_sequences

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(row.prompt_token_ids) for row in self.rows)

    def engine_requests(self, first_id: int) -> list[EngineRequest]:
        """Make an engine request for each row.

        Args:
            first_id: the id of the first row's first sequence; the others have the ids that follow, row by
                row.
        """
        width = self.outputs.num_sequences
        return [
            EngineRequest(
                sequence_id=start,
                sibling_ids=tuple(range(start + 1, start + width)),
                prompt_token_ids=row.prompt_token_ids,
                params=row.params,
                text=row.text,
                timeout_s=self.timeout_s,
                cache_salt=row.cache_salt,
                tenant=row.tenant,
                beam=row.beam,
                draft_token_ids=row.draft_token_ids,
                retention=row.retention,
            )
            for row, start in zip(
                self.rows, range(first_id, first_id + self.num_sequences, width), strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request with `stop` = true: cancel every live request of this id."""

    request_id: str


def stop_request(request_id: str) -> StopRequest:
    """Make the request to cancel all requests of this id.

    Raises:
        InvalidRequestError: the id is empty.
    """
    if not request_id:
        raise InvalidRequestError("A request id must be provided for request cancellation")
    return StopRequest(request_id)


def build_request(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[EncodedPrompt],
    limits: ModelLimits,
    *,
    request_id: str,
    timeout_us: Any,
    grammars: Sequence[GrammarSpec | None] = (),
) -> GenerateRequest:
    """Check all fields and build the request.

    Args:
        rows: the fields that were sent for each row; the fields of the prompt and its words are not read.
        prompts: the encoded prompt of each row.
        limits: limits of the model.
        request_id: the client's id; may be empty.
        timeout_us: the deadline in µs from now; 0 = none.
        grammars: what the output of each row has to look like, where the fields do not say; empty: anything.

    Raises:
        InvalidRequestError: a row is invalid; it refuses the whole request.
    """
    checked = [_checked(row, limits.vocab_size) for row in rows]
    common = {field.name: _same_in_all_rows(field, checked) for field in _PER_REQUEST}
    outputs = _requested_outputs(common)
    is_streaming = bool(common["stream"])
    if not limits.is_decoupled:
        _check_has_one_response(is_streaming, len(rows), outputs)
    grammars = grammars or [None] * len(rows)
    built = [
        _row(values, prompt, grammar, limits, outputs)
        for values, prompt, grammar in zip(checked, prompts, grammars, strict=True)
    ]
    _check_logits_size(built, outputs, limits.vocab_size, is_streaming)
    exclude_input = common["exclude_input_in_output"]
    return GenerateRequest(
        request_id=request_id,
        rows=built,
        timeout_s=_timeout_s(timeout_us),
        streaming=is_streaming,
        exclude_input=limits.exclude_input_in_output if exclude_input is None else bool(exclude_input),
        outputs=outputs,
    )


def _checked(sent: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Check the bounds of a row's fields; return the values by the fields' own names."""
    values: dict[str, Any] = {}
    for name, value in sent.items():
        field = FIELD[name]
        if field.sets == "prompt" or (field.kind is Kind.STRING and not field.is_scalar):
            continue
        if field.sets == "retention":
            values[name] = value
        elif field.is_scalar:
            values[name] = field.check(value)
        else:
            _check_list(field, value, vocab_size)
            values[name] = value
    return merge_aliases(values)


def _check_list(field: Field, values: Sequence[Any], vocab_size: int) -> None:
    if field.kind is Kind.FP32:
        field.check_numbers(values)
        return
    most = field.max_items or vocab_size
    if len(values) > most:
        raise field.error(f" has {len(values)} ids: at most {most} are allowed")
    field.check_token_ids(values, vocab_size)


def merge_aliases(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the values by the fields' own names.

    Args:
        values: field name → checked value; names may be aliases.

    Raises:
        FieldError: a field and its alias have different values.
    """
    merged = dict(values)
    for alias in _ALIASES:
        if alias.name not in merged:
            continue
        value = merged.pop(alias.name)
        sent = merged.setdefault(alias.alias_of, value)
        if sent != value:
            raise FieldError(
                alias.alias_of,
                f" = {sent} and {alias.name} = {value}: expected one of them, or the same value",
            )
    return merged


def required(sent: Mapping[str, T], name: str) -> T:
    """Return a required field; the server's core also passes on requests without it.

    Raises:
        FieldError: the field was not sent.
    """
    if name not in sent:
        raise FieldError(name, " is missing: it is required")
    return sent[name]


def _same_in_all_rows(field: Field, rows: Sequence[Mapping[str, Any]]) -> Scalar | None:
    values = {row.get(field.name) for row in rows}
    if len(values) > 1:
        raise field.error(" differs between the rows of the request: expected one value for all")
    return values.pop()


def _requested_outputs(common: Mapping[str, Any]) -> RequestedOutputs:
    beam_width = common["beam_width"] or 1
    asked = {attribute: common[name] for name, attribute in _OUTPUTS.items() if common[name] is not None}
    return RequestedOutputs(
        **asked,
        num_return_sequences=common["num_return_sequences"] or beam_width,
        beam_width=beam_width,
    )


def _check_has_one_response(is_streaming: bool, num_rows: int, outputs: RequestedOutputs) -> None:
    if is_streaming:
        raise InvalidRequestError("Streaming is only supported in decoupled mode.")
    num_responses = num_rows * (1 if outputs.beam_width > 1 else outputs.num_return_sequences)
    if num_responses > 1:
        raise InvalidRequestError(
            f"the request asks for {num_responses} responses, its rows times num_return_sequences: "
            "expected 1, as this model is not decoupled"
        )


def _check_logits_size(
    rows: Sequence[RequestRow], outputs: RequestedOutputs, vocab_size: int, is_streaming: bool
) -> None:
    """Refuse a request that asks for too many logits."""
    num_positions = 0
    if outputs.context_logits:
        num_times = 2 if is_streaming else 1  # with the first response and with the last
        num_positions += num_times * sum(len(row.prompt_token_ids) for row in rows)
    if outputs.generation_logits:
        num_positions += outputs.num_return_sequences * sum(row.params.max_tokens for row in rows)
    num_bytes = num_positions * vocab_size * _BYTES_PER_LOGIT
    if num_bytes > MAX_LOGITS_BYTES:
        raise InvalidRequestError(
            f"return_context_logits and return_generation_logits ask for {num_bytes} bytes "
            f"({num_positions} positions of {vocab_size} logits): at most {MAX_LOGITS_BYTES} are allowed"
        )


def _timeout_s(value: Any) -> float | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TIMEOUT_US:
        raise FieldError("timeout", f" = {repr(value)[:40]}: expected whole µs, 0 (none) … {MAX_TIMEOUT_US}")
    return value / 1e6 if value else None


def _row(
    values: Mapping[str, Any],
    prompt: EncodedPrompt,
    grammar: GrammarSpec | None,
    limits: ModelLimits,
    outputs: RequestedOutputs,
) -> RequestRow:
    _check_prompt(prompt.token_ids, limits)
    check_beams(values)
    text = prompt.text
    if text is not None and values.get("include_stop_str_in_output"):
        text = msgspec.structs.replace(text, includes_stop_string=True)
    beam = _beam_params(values, outputs.beam_width)
    params = _sampling_params(values, prompt, limits, outputs)
    if grammar is None and not _GUIDES.isdisjoint(values):
        grammar = guide_of(values)
    if grammar is not None:
        if beam is not None:
            raise FIELD["beam_width"].error(f" = {outputs.beam_width}: expected 1 with {grammar.field}")
        params = msgspec.structs.replace(params, grammar=grammar)
    drafts = values.get("draft_input_ids", ())
    if beam is not None:
        if drafts:
            problem = f" has {len(drafts)} ids: expected none with beam_width = {outputs.beam_width}"
            raise FIELD["draft_input_ids"].error(problem)
        params = _without_drawing(params)
    return RequestRow(
        prompt_token_ids=prompt.token_ids,
        text=text,
        params=params,
        cache_salt=values.get("cache_salt", ""),
        beam=beam,
        draft_token_ids=tuple(drafts),
        retention=read_retention(values),
    )


def _check_prompt(ids: list[int], limits: ModelLimits) -> None:
    if not ids:
        raise InvalidRequestError("the prompt is empty: expected at least one token")
    if len(ids) >= limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(ids)} tokens: at most {limits.max_model_len - 1} are allowed "
            f"(max_model_len = {limits.max_model_len}, prompt and output together)"
        )
    FIELD["input_ids"].check_token_ids(ids, limits.vocab_size)


def check_beams(values: Mapping[str, Scalar]) -> None:
    """Refuse scalars that cannot be combined with beam search, or that need beam search if there is none.

    Args:
        values: field name → checked value.

    Raises:
        FieldError: a value is not allowed; the message names the field, its value and what is allowed.
    """
    width = int(values.get("beam_width", 1))
    if width == 1:
        for field in _LIMITED_WITHOUT_BEAMS:
            allowed = field.without_beams or ()
            if values.get(field.name, *allowed[:1]) not in allowed:
                raise _not_allowed(field, values, allowed, "without beams (beam_width > 1)")
        return
    for field in _LIMITED_WITH_BEAMS:
        value = values.get(field.name)
        allowed = field.with_beams or ()
        if not value or value in allowed or field.is_off(value):
            continue
        if not allowed:
            problem = f" = {value!r} is not supported with beam_width = {width}: do not send it"
            raise field.error(problem)
        raise _not_allowed(field, values, allowed, f"with beam_width = {width}, as nothing is drawn")
    num_sequences = int(values.get("num_return_sequences", 1))
    if num_sequences > width:
        problem = f" = {num_sequences}: expected at most {width} with beam_width = {width}"
        raise FIELD["num_return_sequences"].error(problem)


def _not_allowed(
    field: Field, values: Mapping[str, Scalar], allowed: tuple[Scalar, ...], where: str
) -> FieldError:
    expected = [str(value) for value in allowed]
    if field.off is not None and field.off not in allowed:
        expected.append(f"at most {field.off}" if field.off_includes_less else str(field.off))
    return field.error(f" = {values[field.name]!r}: expected {' or '.join(expected)} {where}")


def _beam_params(values: Mapping[str, Any], beam_width: int) -> BeamParams | None:
    """Return the parameters of a row's beam search; None without one."""
    if beam_width == 1:
        return None
    return BeamParams(
        length_penalty=values.get("length_penalty", DEFAULT_LENGTH_PENALTY),
        stops_early=values.get("early_stopping", DEFAULT_EARLY_STOPPING),
        diversity_rate=values.get("beam_search_diversity_rate", 0.0),
    )


def _without_drawing(params: SamplingParams) -> SamplingParams:
    """Return a row's parameters for beam search, which does not draw and has no packed stop words."""
    if params.stop_sequences:
        raise FIELD["stop_words_list"].error(
            " is not supported with beam_width > 1: expected no words (stop_token_ids end a beam)"
        )
    return msgspec.structs.replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def _sampling_params(
    values: Mapping[str, Any], prompt: EncodedPrompt, limits: ModelLimits, outputs: RequestedOutputs
) -> SamplingParams:
    """Make a row's sampling parameters, including those that depend on several fields."""
    room = limits.max_model_len - len(prompt.token_ids)
    max_tokens: int = required(values, "max_tokens")
    min_tokens: int = values.get("min_tokens", 0)
    if min_tokens > max_tokens:
        problem = f" = {min_tokens}: expected at most max_tokens = {max_tokens}"
        raise FIELD["min_tokens"].error(problem)
    top_p: float = values.get("top_p", 0.0)
    made: dict[str, Any] = {attribute: values[name] for name, attribute in _PARAMS.items() if name in values}
    made |= {
        "max_tokens": min(max_tokens, room),
        "min_tokens": min(min_tokens, room),
        "temperature": _temperature(values),
        "top_k": min(values.get("top_k", 0), limits.vocab_size),
        "top_p": top_p if top_p > 0 else 1.0,
        "top_p_decay": _top_p_decay(values, top_p),
        "seed": values["seed"] if "seed" in values else secrets.randbits(64),
        "stop_token_ids": _stop_token_ids(values, limits),
        "stop_sequences": tuple(prompt.stop_sequences) if prompt.text is None else (),
        "bad_words": tuple(dict.fromkeys(prompt.bad_words)),
        "logit_bias": _logit_bias(values, prompt),
        "allowed_token_ids": tuple(dict.fromkeys(values.get("allowed_token_ids", ()))),
        "num_log_probs": outputs.num_engine_log_probs,
        "num_prompt_log_probs": outputs.num_prompt_log_probs,
        "returns_context_logits": outputs.context_logits,
        "returns_generation_logits": outputs.generation_logits,
        "returns_perf_metrics": outputs.perf_metrics,
    }
    return SamplingParams(**made)


def _temperature(values: Mapping[str, Any]) -> float:
    """Apply TensorRT-LLM's rule: without any filter, an absent temperature or one of 1.0 means greedy.

    A top_p of 1.0 counts as a filter if it was sent, as by Triton's OpenAI frontend.
    """
    temperature: float = values.get("temperature", 1.0)
    has_filter = any(values.get(field.name, 0) > 0 for field in _FILTERS)
    if values.get("top_k") == 1 or (temperature == 1.0 and not has_filter):
        return 0.0
    return temperature


def _top_p_decay(values: Mapping[str, Any], top_p: float) -> TopPDecay | None:
    """Return the decay; None if the factor is 1, in which case the other two fields have no effect."""
    factor: float = values.get("top_p_decay", 1.0)
    if factor == 1:
        return None
    if top_p <= 0:
        raise FIELD["top_p_decay"].error(f" = {factor}: expected top_p > 0 with it, which decays")
    return TopPDecay(factor, values.get("top_p_min", DEFAULT_TOP_P_MIN), values.get("top_p_reset_ids", -1))


def _stop_token_ids(values: Mapping[str, Any], limits: ModelLimits) -> tuple[int, ...]:
    ids: list[int] = []
    if not values.get("ignore_eos"):
        end_id: int = values.get("end_id", -1)
        # An id outside the vocabulary means none; benchmarks send such ids.
        ids = [*limits.eos_token_ids, *([end_id] if 0 <= end_id < limits.vocab_size else [])]
    return tuple(dict.fromkeys([*ids, *values.get("stop_token_ids", ())]))


def _logit_bias(values: Mapping[str, Any], prompt: EncodedPrompt) -> tuple[tuple[int, float], ...]:
    """Return (id, bias) pairs, sorted by id and without zeros; the biases of the same id are added up."""
    ids, numbers = values.get("logit_bias_ids", ()), values.get("logit_bias_values", ())
    if len(ids) != len(numbers):
        raise FIELD["logit_bias_ids"].error(
            f" has {len(ids)} ids and logit_bias_values {len(numbers)} values: expected as many of each"
        )
    if not ids and not prompt.biases:
        return ()
    sums: defaultdict[int, float] = defaultdict(float)
    for token_id, value in [*prompt.biases, *zip(ids, numbers, strict=True)]:
        sums[token_id] += value
    most = FIELD["logit_bias_values"].maximum
    for token_id, value in sums.items():
        if abs(value) > most:
            raise InvalidRequestError(
                f"the biases of token {token_id} add up to {value}: expected {-most} … {most}"
            )
    return tuple((token_id, value) for token_id, value in sorted(sums.items()) if value)


def read_retention(sent: Mapping[str, Any]) -> KVRetention | None:
    """Read how long a row wants its KV blocks to be kept; None if it does not say.

    Args:
        sent: the row's fields; the retention fields hold whole numbers or lists of them.

    Raises:
        FieldError: a value is not allowed; the message names the field, its value and what is allowed.
    """
    values = {field.name: sent[field.name] for field in _RETENTION if sent.get(field.name, []) != []}
    if not values:
        return None
    decode_priority = values.get(_DECODE_PRIORITY.name, DEFAULT_KV_PRIORITY)
    _check_range(_DECODE_PRIORITY, decode_priority)
    duration_s = _seconds(_DECODE_DURATION, values.get(_DECODE_DURATION.name, _NONE))
    return KVRetention(ranges=_ranges(values), decode_priority=decode_priority, decode_duration_s=duration_s)


def _ranges(values: Mapping[str, list[int]]) -> tuple[tuple[int, int, int, float], ...]:
    starts = values.get(_STARTS.name, [])
    _STARTS.check_count(len(starts), "values")
    for field in (_ENDS, _PRIORITIES, _DURATIONS):
        is_left_out = field is _DURATIONS and field.name not in values
        num_values = len(values.get(field.name, []))
        if not is_left_out and num_values != len(starts):
            raise field.error(f" has {num_values} values: expected {len(starts)}, as {_STARTS.name} has")
    ranges = []
    durations = values.get(_DURATIONS.name, [_NONE] * len(starts))
    for start, end, priority, duration_ms in zip(
        starts, values.get(_ENDS.name, []), values.get(_PRIORITIES.name, []), durations, strict=True
    ):
        _check_range(_STARTS, start)
        if end != _NONE:
            _check_range(_ENDS, end, start + 1)
        _check_range(_PRIORITIES, priority)
        ranges.append(
            (start, INT32_MAX if end == _NONE else end, priority, _seconds(_DURATIONS, duration_ms))
        )
    return tuple(ranges)


def _check_range(field: Field, value: int, least: float | None = None) -> None:
    least = field.minimum if least is None else least
    if not least <= value <= field.maximum:
        raise field.error(f" holds {value}: expected {least} … {field.maximum}")


def _seconds(field: Field, duration_ms: int) -> float:
    """Convert a duration to seconds; infinity if there is none."""
    if duration_ms == _NONE:
        return math.inf
    _check_range(field, duration_ms)
    return duration_ms / 1000
