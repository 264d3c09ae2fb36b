"""A generation over one gRPC stream, on which every prompt is a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc.aio import InferenceServerClient

from naiad.errors import InternalError, NaiadError, place_of
from naiad.openai_server.api.constraints.grammar_errors import about_field
from naiad.openai_server.api.reading import AskedGeneration
from naiad.openai_server.engines.generation import Generation
from naiad.openai_server.engines.remote.errors import error_in_stream, error_of_call
from naiad.openai_server.engines.remote.inputs import GUIDE_FIELD
from naiad.openai_server.engines.remote.outputs import parsed, read_response

logger = logging.getLogger(__name__)


class RemoteGeneration(Generation):
    """Belongs to the event loop, which reads the stream, too."""

    def __init__(
        self, client: InferenceServerClient, asked: AskedGeneration, requests: Sequence[Mapping[str, Any]]
    ) -> None:
        """Send the requests.

        Args:
            client: connected to the server.
            asked: what they ask for.
            requests: the arguments of an inference for each prompt.
        """
        super().__init__(asked.request.num_sequences, asked.trace)
        self._client = client
        self._width = asked.request.outputs.num_sequences
        self._firsts = {each["request_id"]: index * self._width for index, each in enumerate(requests)}
        self._stop_words: list[str] = list(asked.text_form.fields.get("stop_words", ()))
        self._parsers = asked.parsers()
        self._context = asked.context
        # Equal for all prompts.
        self._grammar = asked.request.rows[0].params.grammar
        # Without a reference the event loop may forget a task.
        self._reading = asyncio.get_running_loop().create_task(self._read(requests))

    def close(self) -> None:
        """See `Generation`: the server ends the sequences of a cancelled call."""
        if self._open:
            self._reading.cancel()

    async def _read(self, requests: Sequence[Mapping[str, Any]]) -> None:
        stream = self._client.stream_infer(_each(requests), headers=dict(self._context.headers))
        try:
            async for result, error in stream:
                if error is not None:
                    raise about_field(error_in_stream(error.message()), self._grammar, GUIDE_FIELD)
                self._take(result)
                self.wake()
            if self._open:
                raise InternalError("the Triton server ended the stream before the text")
        except NaiadError as error:
            self.fail(error)
        except grpc.RpcError as error:
            status = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "UNKNOWN"
            details = (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else ""
            self.fail(error_of_call(status, details, has_begun=self._has_begun))
        except Exception as error:  # noqa: BLE001 — whatever is wrong with a response fails this call alone
            logger.error("a response can not be read: %s", place_of(error))
            self.fail(InternalError("the answer of the Triton server can not be read"))
        finally:
            stream.cancel()
            self.wake()

    def _take(self, result: Any) -> None:
        response = result.get_response()
        if not response.outputs:
            return
        delta = read_response(result, self._firsts[response.id], self._stop_words)
        if self._parsers and not self._parsers[delta.index].has_only_content_left:
            delta = parsed(delta, self._parsers[delta.index])
        if self.trace is not None:
            self.trace.take(delta.index // self._width, delta.output)
        self.add(delta)


async def _each(requests: Sequence[Mapping[str, Any]]) -> AsyncIterator[Mapping[str, Any]]:
    for request in requests:
        # The client adds to what it gets.
        yield dict(request)
