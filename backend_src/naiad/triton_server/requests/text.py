"""Reads text-level tensors and parameters into the typed request, for a model that tokenizes itself."""

from __future__ import annotations

from collections.abc import Mapping

from naiad.frontend.field import Frontend
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.frontend.request import GenerateRequest, StopRequest, build_request, stop_request
from naiad.triton_server.requests.tensors import (
    Array,
    RequestSource,
    asks_to_stop,
    refuse_unknown_parameters,
    refuse_unserved,
    sent_rows,
    timeout_us,
)


class TextRequestReader:
    """Reads and tokenizes the requests of the `text` model."""

    def __init__(self, encoder: PromptEncoder) -> None:
        """Use `encoder` to turn prompts and words into token ids."""
        self._encoder = encoder

    def read(self, source: RequestSource, limits: ModelLimits) -> GenerateRequest | StopRequest:
        """Check the whole request and build its rows.

        Raises:
            InvalidRequestError: a row is invalid; it refuses the whole request.
        """
        tensors, parameters = source.tensors(), source.parameters()
        if asks_to_stop(tensors, parameters):
            return stop_request(source.request_id)
        refuse_unknown_parameters(parameters, Frontend.TEXT, limits.forwarded_headers)
        refuse_unserved(tensors)
        refuse_unserved(parameters)
        rows = sent_rows(tensors, parameters, Frontend.TEXT, num_rows(tensors))
        written = [self._encoder.check(row) for row in rows]
        prompts = [self._encoder.encode(each) for each in written]
        end_id = self._encoder.known_id(self._encoder.tokenizer.eos_id)
        return build_request(
            [{"end_id": end_id} | row for row in rows],
            prompts,
            limits,
            request_id=source.request_id,
            timeout_us=timeout_us(source, parameters),
        )


def num_rows(tensors: Mapping[str, Array]) -> int:
    """The number of rows, which is the same in all tensors; 1 if all fields were sent as parameters."""
    return max((int(tensor.shape[0]) for tensor in tensors.values()), default=1)
