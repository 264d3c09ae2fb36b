"""`Client`: any number of generations at the same time, over gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from naiad_client.generation import Chunk, Generation
from naiad_client.grpc_door import GRPCDoor
from naiad_client.http_door import HTTPDoor
from naiad_client.wire import Message, TensorValue, encode_messages

__all__ = ["DEFAULT_URL", "Chunk", "Client", "Generation"]

DEFAULT_URL = "localhost:8001"


class Client:
    """A client of one server; thread-safe."""

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", llm_model: str = "llm") -> None:
        """Set up; it connects on first use.

        Args:
            url: HOST:PORT of the server's gRPC endpoint, or http://HOST:PORT of its HTTP endpoint.
            model: the text model that `generate` calls.
            llm_model: the token model that `cancel` calls.

        Raises:
            ValueError: the url is neither.
        """
        self.url = url
        self.model = model
        self.llm_model = llm_model
        is_http = url.startswith(("http://", "https://"))
        self._door: HTTPDoor | GRPCDoor = HTTPDoor(url) if is_http else GRPCDoor(url)

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
            ServerError: the HTTP endpoint can not be reached.
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
        return self._door.start(self.model, tensors, request_id)

    def cancel(self, request_id: str) -> None:
        """Cancel every live request of this id, from any client.

        Raises:
            ServerError: the id is empty, or the server cannot be reached.
        """
        # The token model requires the lengths even in a request that only stops another one.
        tensors = {"input_lengths": 1, "request_output_len": 1, "stop": True}
        for _ in self._door.start(self.llm_model, tensors, request_id):
            pass

    def close(self) -> None:
        """Close the channel of gRPC; its running generations end with an error."""
        self._door.close()

    def __enter__(self) -> Client:
        """Enter a `with` block; leaving it closes the channel."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the channel."""
        self.close()
