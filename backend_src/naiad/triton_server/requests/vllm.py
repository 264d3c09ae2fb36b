"""A request of the vLLM backend's shape: rank 1, sampling parameters as JSON whose values may be strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from naiad.config.probe import PROBE_REQUEST_ID
from naiad.errors import InvalidRequestError
from naiad.frontend.limits import ModelLimits
from naiad.frontend.request import GenerateRequest, StopRequest
from naiad.triton_server.requests.fields import INT32_MAX, decoded, num_utf8_bytes, refuse_unknown_parameters
from naiad.triton_server.requests.source import Array, RequestSource, VLLMRequest
from naiad.triton_server.requests.text import ReadSource, TextRequestReader

_FLAGS = ("stream", "exclude_input_in_output", "return_cumulative_logprob", "return_logprobs")
_REFUSED = ("image", "embedding_request")
# Tensors that the text level does not know.
_OWN = (*_REFUSED, "sampling_parameters", "return_cumulative_logprob", "return_logprobs")
_PARAMETERS = frozenset(
    {
        *_FLAGS,
        *("text_input", "messages", "cache_salt", "priority", "num_draft_tokens", "min_length"),
        *("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"),
        "return_num_cached_tokens",
    }
)

# Fields of the text level that have another name here.
_CLIENTS_NAMES: Mapping[str, str] = {
    "num_return_sequences": "n",
    "stop_words": "stop",
    "num_log_probs": "logprobs",
    "logit_bias_ids": "logit_bias",
    "logit_bias_values": "logit_bias",
}


class VLLMRequestReader:
    """Reads requests of this shape as those of the text level they stand for."""

    def __init__(self, texts: TextRequestReader) -> None:
        """Take the text level's reader."""
        self._texts = texts

    def read(self, source: RequestSource, limits: ModelLimits) -> VLLMRequest | StopRequest:
        """Check everything that was sent and build the row.

        Raises:
            InvalidRequestError: names what is wrong.
        """
        if source.request_id == PROBE_REQUEST_ID:
            # A model of this shape can not be asked to stop something.
            return StopRequest(PROBE_REQUEST_ID)
        tensors, parameters = source.tensors(), source.parameters()
        refuse_unknown_parameters(parameters, _PARAMETERS | KNOWN, limits.forwarded_headers)
        _refuse_unserved(tensors)
        flags = {name: _read_flag(name, tensors, parameters) for name in _FLAGS}
        is_streaming = bool(flags["stream"])
        if is_streaming and flags["exclude_input_in_output"] is False:
            raise InvalidRequestError("When streaming, `exclude_input_in_output` = False is not allowed.")
        sampling = read_sampling_parameters(tensors.get("sampling_parameters"), parameters)
        sampled = text_fields(sampling, is_streaming=is_streaming)
        made = as_rows(sampled)
        made |= {name: tensor[None] for name, tensor in tensors.items() if name not in _OWN}
        is_echoing = not is_streaming and not flags["exclude_input_in_output"]
        # A text that was sent stands before the answer as it was sent; of messages it is what they make.
        prompt_text = _prompt_text(tensors, parameters) if is_echoing else ""
        made |= as_rows({"exclude_input_in_output": bool(prompt_text) or not is_echoing})
        if flags["return_cumulative_logprob"]:
            made |= as_rows({"return_log_probs": True})
        others = {name: value for name, value in parameters.items() if name not in KNOWN | frozenset(_FLAGS)}
        others |= {"stream": is_streaming} if "stream" not in tensors else {}
        try:
            request = self._texts.read(ReadSource(source.request_id, source.timeout_us, others, made), limits)
        except InvalidRequestError as error:
            raise _in_clients_names(error, sampled) from None
        assert isinstance(request, GenerateRequest), "a stop that nobody asked for"
        return VLLMRequest(
            **{each.name: getattr(request, each.name) for each in fields(GenerateRequest)}
            | {"joins_sequences": request.outputs.num_return_sequences > 1},
            prompt_text=prompt_text,
            returns_log_probs=bool(flags["return_logprobs"]),
            returns_cum_log_prob=bool(flags["return_cumulative_logprob"]),
            num_log_probs=request.outputs.num_log_probs if sampling.get("logprobs") is not None else None,
        )


def _in_clients_names(error: InvalidRequestError, fields: Mapping[str, Any]) -> InvalidRequestError:
    """The text level's error with the name that the client knows its field by.

    Args:
        error: begins with the field's name.
        fields: that sampling parameters were made into, by `text_fields`.
    """
    message = str(error)
    for field, name in _CLIENTS_NAMES.items():
        if field in fields and re.match(rf"{field}\b", message):
            return InvalidRequestError(name + message.removeprefix(field))
    return error


def _refuse_unserved(tensors: Mapping[str, Array]) -> None:
    for name in _REFUSED:
        if any(tensors[name].reshape(-1).tolist() if name in tensors else []):
            raise InvalidRequestError(f"{name} is not supported by this version of Naiad: do not send it")


def _read_flag(name: str, tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> bool | None:
    value = tensors[name].item() if name in tensors else parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name} = {repr(value)[:80]}: expected true or false")
    return value


def _prompt_text(tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> str:
    if "text_input" in tensors:
        return decoded("text_input", tensors["text_input"].item())
    return str(parameters.get("text_input", ""))


DEFAULT_MAX_TOKENS = 16

_decoder = msgspec.json.Decoder()
_TRUTHS = {"true": True, "false": False}


def read_sampling_parameters(tensor: Array | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that were sent, not yet checked.

    Args:
        tensor: `sampling_parameters`, a JSON object, or None when it was not sent.
        parameters: of the request; those that are sampling parameters, too. The object wins.

    Raises:
        InvalidRequestError: the tensor holds no JSON object.
    """
    sent = {name: value for name, value in parameters.items() if name in KNOWN}
    if tensor is None:
        return sent
    text = decoded("sampling_parameters", tensor.item())
    try:
        read = _json(text) if text.strip() else {}
    except ValueError as error:
        raise InvalidRequestError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise InvalidRequestError("sampling_parameters: expected a JSON object")
    return sent | read


def text_fields(sent: Mapping[str, Any], *, is_streaming: bool) -> dict[str, Any]:
    """The fields of the text level that these parameters stand for, with vLLM's defaults.

    Args:
        sent: sampling parameters by vLLM's names.
        is_streaming: then there is one sequence.

    Returns:
        Field name → bool, int, float, string, or a list of one of them.

    Raises:
        InvalidRequestError: names the parameter, its value and what is allowed.
    """
    # A top_p that was sent samples, also at a temperature of exactly 1.
    fields: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS, "top_p": 1.0}
    for name, value in sent.items():
        if name in _OFF:
            _check_is_off(name, value)
        elif name not in _READERS:
            raise InvalidRequestError(
                f"sampling_parameters: unknown key {name[:80]!r}: allowed are {', '.join(sorted(_READERS))}"
            )
        elif value is not None:
            fields |= _READERS[name](name, value)
    if sent.get("max_tokens", DEFAULT_MAX_TOKENS) is None:
        fields["max_tokens"] = INT32_MAX
    best_of = fields.pop("best_of", None)
    num_sequences = fields.get("num_return_sequences", 1)
    if best_of not in (None, num_sequences):
        raise InvalidRequestError(f"best_of = {best_of}: expected n = {num_sequences}, or none")
    if is_streaming and num_sequences > 1:
        raise InvalidRequestError(f"n = {num_sequences}: expected 1 with stream = true")
    return fields


def as_rows(fields: Mapping[str, Any]) -> dict[str, Array]:
    """The fields as tensors of one row.

    Raises:
        InvalidRequestError: a string is no valid Unicode.
    """
    return {name: _as_row(name, value) for name, value in fields.items()}


def _as_row(name: str, value: Any) -> Array:
    items = value if isinstance(value, list) else [value]
    if isinstance(items[0], str):
        for item in items:
            num_utf8_bytes(name, item)
        return np.array([[item.encode() for item in items]], dtype=np.object_)
    return np.array([items])


def _json(text: str) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _parsed(name: str, value: Any, kind: type[Any], expected: str) -> Any:
    """A value of this kind, or the text of one."""
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


def _refusal(name: str, value: Any, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} = {repr(value)[:80]}: expected {expected}")


def _integer(field: str) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, value: {field: _parsed(name, value, int, "a whole number")}


def _number(field: str) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, value: {field: _parsed(name, value, float, "a number")}


def _flag(field: str) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, value: {field: _parsed(name, value, bool, "true or false")}


def _top_p(name: str, value: Any) -> dict[str, Any]:
    top_p = _parsed(name, value, float, "a number")
    if not 0 < top_p <= 1:
        raise _refusal(name, value, "a number > 0 and ≤ 1")
    return {"top_p": top_p}


def _top_k(name: str, value: Any) -> dict[str, Any]:
    top_k = _parsed(name, value, int, "a whole number")
    return {"top_k": 0 if top_k == -1 else top_k}


def _seed(name: str, value: Any) -> dict[str, Any]:
    seed = _parsed(name, value, int, "a whole number")
    return {} if seed == -1 else {"seed": seed}


def _log_probs(name: str, value: Any) -> dict[str, Any]:
    return {
        "num_log_probs": _parsed(name, value, int, "a whole number"),
        "return_log_probs": True,
    }


def _listed(name: str, value: Any, kind: type[Any], expected: str) -> list[Any]:
    """A list, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = _json(value)
        except ValueError:
            raise _refusal(name, value, expected) from None
    if not isinstance(value, list):
        raise _refusal(name, value, expected)
    return [_parsed(name, item, kind, expected) for item in value]


def _ids(field: str) -> Callable[[str, Any], dict[str, Any]]:
    def read(name: str, value: Any) -> dict[str, Any]:
        ids = _listed(name, value, int, "a list of token ids")
        return {field: ids} if ids else {}

    return read


def _words(field: str) -> Callable[[str, Any], dict[str, Any]]:
    def read(name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, str):
            words = _written_list(value)
        else:
            words = _listed(name, value, str, "a list of strings")
        return {field: words} if words else {}

    return read


def _written_list(text: str) -> list[str]:
    """The strings of a JSON list of strings; any other text is a word itself, as "[INST]" is."""
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


_READERS: Mapping[str, Callable[[str, Any], dict[str, Any]]] = {
    "n": _integer("num_return_sequences"),
    "best_of": _integer("best_of"),
    "max_tokens": _integer("max_tokens"),
    "min_tokens": _integer("min_tokens"),
    "temperature": _number("temperature"),
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _number("min_p"),
    "seed": _seed,
    "presence_penalty": _number("presence_penalty"),
    "frequency_penalty": _number("frequency_penalty"),
    "repetition_penalty": _number("repetition_penalty"),
    "stop": _words("stop_words"),
    "stop_token_ids": _ids("stop_token_ids"),
    "bad_words": _words("bad_words"),
    "allowed_token_ids": _ids("allowed_token_ids"),
    "logit_bias": _logit_bias,
    "include_stop_str_in_output": _flag("include_stop_str_in_output"),
    "ignore_eos": _flag("ignore_eos"),
    "logprobs": _log_probs,
    "priority": _integer("priority"),
    "num_draft_tokens": _integer("num_draft_tokens"),
}

# Not served: the values that ask for nothing, besides null.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "guided_decoding": ({}, ""),
    "structured_outputs": ({}, ""),
    "lora_name": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
}

KNOWN = frozenset(_READERS) | frozenset(_OFF)


def _check_is_off(name: str, value: Any) -> None:
    off = _OFF[name]
    meant = value
    if isinstance(value, str) and value:
        try:
            meant = _json(value.lower())
        except ValueError:
            meant = value
    if meant is not None and not any(type(meant) is type(each) and meant == each for each in off):
        raise InvalidRequestError(
            f"{name} = {repr(value)[:80]} is not supported by this version of Naiad: do not send it"
        )
