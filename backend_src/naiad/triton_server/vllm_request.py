"""A request of the vLLM backend's shape: rank 1, sampling parameters as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from naiad.config.probe import PROBE_REQUEST_ID
from naiad.errors import InvalidRequestError
from naiad.triton_server.request_fields import Array, decoded, refuse_unknown_parameters
from naiad.triton_server.request_limits import ModelLimits
from naiad.triton_server.request_reader import GenerateRequest, RequestSource, StopRequest
from naiad.triton_server.text_request import ReadSource, TextRequestReader
from naiad.triton_server.vllm_sampling import (
    KNOWN,
    as_rows,
    read_sampling_parameters,
    text_fields,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMRequest(GenerateRequest):
    """What its responses need besides.

    Attributes:
        prompt_text: stands before an unstreamed text; "" when it is excluded.
        returns_log_probs: the output `logprobs` is wanted.
        returns_cum_log_prob: the output `cumulative_logprob` is wanted.
        num_log_probs: best tokens at each place; None: no log-probabilities were asked for.
    """

    prompt_text: str
    returns_log_probs: bool
    returns_cum_log_prob: bool
    num_log_probs: int | None


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
        flags = {name: _flag(name, tensors, parameters) for name in _FLAGS}
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
            | {"joins_sequences": request.wishes.num_return_sequences > 1},
            prompt_text=prompt_text,
            returns_log_probs=bool(flags["return_logprobs"]),
            returns_cum_log_prob=bool(flags["return_cumulative_logprob"]),
            num_log_probs=request.wishes.num_log_probs if sampling.get("logprobs") is not None else None,
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


def _flag(name: str, tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> bool | None:
    value = tensors[name].item() if name in tensors else parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name} = {repr(value)[:80]}: expected true or false")
    return value


def _prompt_text(tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> str:
    if "text_input" in tensors:
        return decoded("text_input", tensors["text_input"].item())
    return str(parameters.get("text_input", ""))
