"""`Client`: one gRPC channel, any number of generations at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from naiad_client.errors import ServerError
from naiad_client.wire import (
    Message,
    TensorValue,
    build_request,
    encode_messages,
    is_final,
    read_int,
    read_text,
)

DEFAULT_URL = "localhost:8001"

# Echoed prompts may be longer than gRPC's default limit of 4 MiB.
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of the server.

    Attributes:
        text: new text; may be empty on the last chunk.
        finish_reason: "stop", "length", "timeout", "cancelled"; None before the last chunk.
        num_output_tokens: new tokens of this chunk; 0 if not requested.
        num_input_tokens: tokens of the prompt; 0 if not requested.
    """

    text: str
    finish_reason: str | None = None
    num_output_tokens: int = 0
    num_input_tokens: int = 0


class Generation(Iterator[Chunk]):
    """A running request. Iterate over its chunks; closing it early cancels it."""

    def __init__(self, call: Any, url: str) -> None:
        """Wrap a call of `ModelStreamInfer`; error messages name the url."""
        self._call = call
        self._url = url
        self._is_done = False

    def __next__(self) -> Chunk:
        """Return the next chunk.

        Raises:
            ServerError: the request failed; the error has the server's message.
        """
        while not self._is_done:
            message = self._receive()
            if message is None:
                break
            if message.error_message:
                self.close()
                raise ServerError(message.error_message)
            response = message.infer_response
            if is_final(response):
                self._is_done = True
            if response.outputs:
                return _chunk(response)
        raise StopIteration

    def cancel(self) -> None:
        """Cancel the request at the server; no more chunks come."""
        self._is_done = True
        self._call.cancel()

    def close(self) -> None:
        """Cancel a running generation; do nothing if it has ended."""
        if not self._is_done:
            self.cancel()

    def __enter__(self) -> Generation:
        """Enter a `with` block; leaving it cancels a running generation."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel a running generation."""
        self.close()

    def __del__(self) -> None:
        """Cancel a generation that is no longer referenced, so that it stops running in the server."""
        self.close()

    def _receive(self) -> Any | None:
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            was_cancelled = self._is_done
            self._is_done = True
            if was_cancelled:
                return None
            raise _call_error(error, self._url) from None


class Client:
    """A client of one server; thread-safe."""

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", llm_model: str = "llm") -> None:
        """Prepare a channel; it connects on first use.

        Args:
            url: HOST:PORT of the server's gRPC endpoint.
            model: the text model that `generate` calls.
            llm_model: the token model that `cancel` calls.
        """
        self.url = url
        self.model = model
        self.llm_model = llm_model
        self._channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int = 128,
        stream: bool = True,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        min_tokens: int | None = None,
        stop_words: Sequence[str] | None = None,
        bad_words: Sequence[str] | None = None,
        ignore_eos: bool | None = None,
        exclude_input_in_output: bool | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        return_finish_reason: bool | None = True,
        return_num_input_tokens: bool | None = True,
        return_num_output_tokens: bool | None = True,
        request_id: str = "",
    ) -> Generation:
        """Start a generation; the server begins at once.

        A value of None is not sent, so the server's default applies. Without top_k, top_p and
        min_p, an absent temperature or one of 1.0 means greedy.

        Args:
            prompt: text, or the messages of a chat for the checkpoint's template.
            max_tokens: maximum new tokens.
            stream: yield chunks as they are generated; False: one chunk, which also holds the prompt
                unless `exclude_input_in_output` is true.
            temperature: 0 = greedy.
            top_k: keep the k best tokens.
            top_p: keep the smallest set of best tokens whose total probability is at least this.
            min_p: keep the tokens with at least this fraction of the best token's probability.
            seed: the same seed gives the same text.
            repetition_penalty: 1 = off.
            presence_penalty: 0 = off.
            frequency_penalty: 0 = off.
            min_tokens: minimum new tokens before the text may end.
            stop_words: strings that end the text; they are not part of it.
            bad_words: words that are never written.
            ignore_eos: continue to max_tokens.
            exclude_input_in_output: leave the prompt out of an unstreamed answer.
            priority: smaller values are served first.
            cache_salt: only prompts with the same salt share cached KV.
            return_finish_reason: fill this field of the chunks.
            return_num_input_tokens: fill this field of the chunks.
            return_num_output_tokens: fill this field of the chunks.
            request_id: id by which `cancel` finds the request.

        Raises:
            ValueError: a value does not fit its tensor's type.
        """
        tensors: dict[str, TensorValue | None] = {
            "text_input": prompt if isinstance(prompt, str) else None,
            "messages": None if isinstance(prompt, str) else encode_messages(prompt),
            "max_tokens": max_tokens,
            "stream": stream,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "min_tokens": min_tokens,
            "stop_words": stop_words or None,
            "bad_words": bad_words or None,
            "ignore_eos": ignore_eos,
            "exclude_input_in_output": exclude_input_in_output,
            "priority": priority,
            "cache_salt": cache_salt,
            "return_finish_reason": return_finish_reason,
            "return_num_input_tokens": return_num_input_tokens,
            "return_num_output_tokens": return_num_output_tokens,
        }
        return self._start(build_request(self.model, tensors, request_id))

    def cancel(self, request_id: str) -> None:
        """Cancel every live request of this id, from any client.

        Raises:
            ServerError: the id is empty, or the server cannot be reached.
        """
        # The token model requires the lengths even in a request that only stops another one.
        tensors = {"input_lengths": 1, "request_output_len": 1, "stop": True}
        for _ in self._start(build_request(self.llm_model, tensors, request_id)):
            pass

    def close(self) -> None:
        """Close the channel; running generations end with an error."""
        self._channel.close()

    def __enter__(self) -> Client:
        """Enter a `with` block; leaving it closes the channel."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the channel."""
        self.close()

    def _start(self, request: Any) -> Generation:
        return Generation(self._stub.ModelStreamInfer(iter([request])), self.url)


def _chunk(response: Any) -> Chunk:
    return Chunk(
        text=read_text(response, "text_output") or "",
        finish_reason=read_text(response, "finish_reason") or None,
        num_output_tokens=read_int(response, "num_output_tokens") or 0,
        num_input_tokens=read_int(response, "num_input_tokens") or 0,
    )


def _call_error(error: Any, url: str) -> ServerError:
    status = error.code()
    if status is grpc.StatusCode.UNAVAILABLE:
        return ServerError(f"no server can be reached at {url}: {error.details()}", status.name)
    return ServerError(error.details() or status.name, status.name)
