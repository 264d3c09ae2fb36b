"""Reads requests as the vLLM backend takes them: tensors of rank 1, sampling parameters as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from naiad.config.probe import PROBE_REQUEST_ID
from naiad.errors import InvalidRequestError
from naiad.frontend.field import INT32_MAX, Field, FieldError, Frontend, Kind, shown
from naiad.frontend.fields import FIELD, FIELDS, fields_at
from naiad.frontend.grammar import structured_output_of
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import EncodedPrompt, PromptEncoder
from naiad.frontend.request import GenerateRequest, StopRequest, build_request
from naiad.sequence import GrammarSpec
from naiad.triton_server.requests.tensors import (
    Array,
    RequestSource,
    refuse_unknown_parameters,
    refuse_unserved,
    sent_parameters,
    sent_rows,
    timeout_us,
)

_TENSORS = fields_at(Frontend.VLLM)
_KEYS = fields_at(Frontend.SAMPLING_PARAMETERS)
_SERVED_KEYS = ", ".join(sorted(name for name, field in _KEYS.items() if field.served))
_DEFAULTS = {field.name: field.key_default for field in FIELDS if field.key_default is not None}
_FLAGS = ("stream", "exclude_input_in_output", "return_cumulative_logprob", "return_logprobs")
_GRAMMAR_KEYS = ("structured_outputs", "guided_decoding")
# Tensors that are not fields of the typed request.
_APART = ("sampling_parameters", *_FLAGS)

_decoder = msgspec.json.Decoder()
_TRUTHS = {"true": True, "false": False}
_TYPES: Mapping[Kind, tuple[type[Any], str]] = {
    Kind.BOOL: (bool, "true or false"),
    Kind.FP32: (float, "a number"),
    Kind.INT32: (int, "a whole number"),
    Kind.UINT64: (int, "a whole number"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMRequest(GenerateRequest):
    """A request with what the vLLM backend's responses need in addition.

    Attributes:
        prompt_text: the prompt that an unstreamed text begins with; "" if it is excluded.
        returns_log_probs: whether the output `logprobs` is requested.
        returns_cum_log_prob: whether the output `cumulative_logprob` is requested.
        num_log_probs: number of best tokens at each position; None: no log-probabilities were requested.
    """

    prompt_text: str
    returns_log_probs: bool
    returns_cum_log_prob: bool
    num_log_probs: int | None


class VLLMRequestReader:
    """Reads and tokenizes requests as the vLLM backend takes them."""

    def __init__(self, encoder: PromptEncoder) -> None:
        """Use `encoder` to turn prompts and words into token ids."""
        self._encoder = encoder

    def read(self, source: RequestSource, limits: ModelLimits) -> VLLMRequest | StopRequest:
        """Check the whole request and build its one row.

        Raises:
            InvalidRequestError: the request is invalid; the message says why.
        """
        if source.request_id == PROBE_REQUEST_ID:
            # Requests of this model cannot stop others; a probe has nothing else to do here.
            return StopRequest(PROBE_REQUEST_ID)
        tensors, parameters = source.tensors(), source.parameters()
        refuse_unknown_parameters(parameters, Frontend.VLLM, limits.forwarded_headers)
        refuse_unserved(tensors, _TENSORS)
        refuse_unserved(parameters)
        flags = {name: _flag(name, tensors, parameters) for name in _FLAGS}
        is_streaming = bool(flags["stream"])
        if is_streaming and flags["exclude_input_in_output"] is False:
            raise InvalidRequestError("When streaming, `exclude_input_in_output` = False is not allowed.")
        keys = _sampling_parameters(tensors.get("sampling_parameters"), parameters)
        sampled, key_of = _sampled_fields(keys, is_streaming=is_streaming)
        grammar = _grammar(keys)
        by_row = {name: tensor[None] for name, tensor in tensors.items()}
        others = {
            name: value for name, value in parameters.items() if name not in _KEYS and name not in _FLAGS
        }
        (sent,) = sent_rows(by_row, {}, Frontend.VLLM, 1, apart=_APART)
        sent = sent_parameters(others) | sampled | sent
        is_echoing = not is_streaming and not flags["exclude_input_in_output"]
        # `text_input` is echoed exactly as it was sent; messages are echoed as the chat template renders
        # them.
        prompt_text = sent.get("text_input", "") if is_echoing else ""
        sent["stream"] = is_streaming
        sent["exclude_input_in_output"] = bool(prompt_text) or not is_echoing
        if flags["return_cumulative_logprob"]:
            sent["return_log_probs"] = True
        try:
            request = self._build(sent, grammar, source, limits, timeout_us(source, parameters))
        except FieldError as error:
            # The message must name the key that the client sent.
            raise error.named(key_of.get(error.field_name, error.field_name)) from None
        return VLLMRequest(
            **{each.name: getattr(request, each.name) for each in fields(GenerateRequest)}
            | {"joins_sequences": request.outputs.num_return_sequences > 1},
            prompt_text=prompt_text,
            returns_log_probs=bool(flags["return_logprobs"]),
            returns_cum_log_prob=bool(flags["return_cumulative_logprob"]),
            num_log_probs=request.outputs.num_log_probs if keys.get("logprobs") is not None else None,
        )

    def _build(
        self,
        sent: dict[str, Any],
        grammar: GrammarSpec | None,
        source: RequestSource,
        limits: ModelLimits,
        timeout: Any,
    ) -> GenerateRequest:
        prompt: EncodedPrompt = self._encoder.encode(self._encoder.check(sent))
        sent.setdefault("end_id", self._encoder.known_id(self._encoder.tokenizer.eos_id))
        return build_request(
            [sent], [prompt], limits, request_id=source.request_id, timeout_us=timeout, grammars=[grammar]
        )


def _flag(name: str, tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> bool | None:
    value = tensors[name].item() if name in tensors else parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise FieldError(name, f" = {shown(value)}: expected true or false")
    return value


def _sampling_parameters(tensor: Array | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that were sent, by vLLM's names, not yet checked.

    Args:
        tensor: `sampling_parameters`, a JSON object; None if it was not sent.
        parameters: the request's parameters, which may be sampling parameters too. If one is sent both
            ways, the object wins.

    Raises:
        InvalidRequestError: the tensor does not hold a JSON object.
    """
    sent = {name: value for name, value in parameters.items() if name in _KEYS}
    if tensor is None:
        return sent
    text = FIELD["sampling_parameters"].decoded(tensor.item())
    try:
        read = _json(text) if text.strip() else {}
    except ValueError as error:
        raise InvalidRequestError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise InvalidRequestError("sampling_parameters: expected a JSON object")
    return sent | read


def _sampled_fields(keys: Mapping[str, Any], *, is_streaming: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Translate sampling parameters into fields, with vLLM's defaults; also return the key of each field.

    Args:
        keys: vLLM's names → values.
        is_streaming: whether the request streams; then only one sequence is allowed.

    Raises:
        InvalidRequestError: a parameter is unknown or invalid; the message names it, its value and what is
            allowed.
    """
    sent: dict[str, Any] = dict(_DEFAULTS)
    key_of: dict[str, str] = {}
    for name, value in keys.items():
        field = _KEYS.get(name)
        if field is None:
            raise InvalidRequestError(
                f"sampling_parameters: unknown key {name[:80]!r}: allowed are {_SERVED_KEYS}"
            )
        if not field.served:
            _check_is_off(name, field, value)
        elif value is not None and name not in _GRAMMAR_KEYS:
            made = _fields_of(name, field, value)
            sent |= made
            key_of |= dict.fromkeys(made, name)
    if keys.get("max_tokens", 0) is None:
        sent["max_tokens"] = INT32_MAX
    best_of = sent.pop("best_of", None)
    num_sequences = sent.get("num_return_sequences", 1)
    if best_of not in (None, num_sequences):
        raise FieldError("best_of", f" = {best_of}: expected n = {num_sequences}, or none")
    if is_streaming and num_sequences > 1:
        raise FieldError("n", f" = {num_sequences}: expected 1 with stream = true")
    return sent, key_of


def _grammar(keys: Mapping[str, Any]) -> GrammarSpec | None:
    """What the output has to look like; None: anything.

    Raises:
        FieldError: a value is invalid, or both names were sent.
    """
    specs = [
        spec
        for name in _GRAMMAR_KEYS
        if keys.get(name) is not None
        if (spec := structured_output_of(_KEYS[name], name, keys[name])) is not None
    ]
    if len(specs) > 1:
        raise FieldError(_GRAMMAR_KEYS[0], f" and {_GRAMMAR_KEYS[1]} were sent: expected one of them")
    return specs[0] if specs else None


def _fields_of(name: str, field: Field, value: Any) -> dict[str, Any]:
    """Translate one sampling parameter into fields: field name → value."""
    if name == "logit_bias":
        return _logit_bias(name, value)
    if not field.is_scalar:
        items = _words(name, value) if field.kind is Kind.STRING else _ids(name, value)
        return {field.name: items} if items else {}
    kind, expected = _TYPES[field.kind]
    parsed = _parsed(name, value, kind, expected)
    if parsed in field.key_off:
        return {}
    if field.key_above is not None and not field.key_above < parsed <= field.maximum:
        raise _refusal(name, value, f"{expected} > {field.key_above} and ≤ {field.maximum}")
    more = {"return_log_probs": True} if name == "logprobs" else {}
    return {field.name: parsed} | more


def _json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _parsed(name: str, value: Any, kind: type[Any], expected: str) -> Any:
    """Read a value of this type, which may be written as a string."""
    try:
        if isinstance(value, str):
            value = _TRUTHS[value.strip().lower()] if kind is bool else kind(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
    except (KeyError, ValueError, OverflowError):
        raise _refusal(name, value, expected) from None
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise _refusal(name, value, expected)
    return value


def _refusal(name: str, value: Any, expected: str) -> FieldError:
    return FieldError(name, f" = {shown(value)}: expected {expected}")


def _listed(name: str, value: Any, kind: type[Any], expected: str) -> list[Any]:
    """Read a list, which may be written as a JSON string."""
    if isinstance(value, str):
        try:
            value = _json(value)
        except ValueError:
            raise _refusal(name, value, expected) from None
    if not isinstance(value, list):
        raise _refusal(name, value, expected)
    return [_parsed(name, item, kind, expected) for item in value]


def _ids(name: str, value: Any) -> list[int]:
    return _listed(name, value, int, "a list of token ids")


def _words(name: str, value: Any) -> list[str]:
    return _written_list(value) if isinstance(value, str) else _listed(name, value, str, "a list of strings")


def _written_list(text: str) -> list[str]:
    """The strings of a JSON list of strings; any other text, such as "[INST]", is a word itself."""
    try:
        words = _json(text)
    except ValueError:
        return [text]
    is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_list else [text]


def _logit_bias(name: str, value: Any) -> dict[str, Any]:
    expected = "an object of token ids and numbers"
    if isinstance(value, str):
        try:
            value = _json(value)
        except ValueError:
            raise _refusal(name, value, expected) from None
    if not isinstance(value, dict):
        raise _refusal(name, value, expected)
    if not value:
        return {}
    return {
        "logit_bias_ids": [_parsed(name, key, int, expected) for key in value],
        "logit_bias_values": [_parsed(name, bias, float, expected) for bias in value.values()],
    }


def _check_is_off(name: str, field: Field, value: Any) -> None:
    meant = value
    if isinstance(value, str) and value:
        try:
            meant = _json(value.lower())
        except ValueError:
            meant = value
    is_off = any(type(meant) is type(each) and meant == each for each in field.key_off)
    if meant is not None and not is_off:
        raise FieldError(name, f" = {shown(value)} is not supported by this version of Naiad: do not send it")
