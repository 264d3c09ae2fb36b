"""The routes that describe the server and its models: models, tokens, version."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from aiohttp import web

import naiad
from naiad.errors import NaiadError
from naiad.frontend.field import shown
from naiad.openai_server.api.answers import (
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    encode,
)
from naiad.openai_server.api.anthropic.body import CountBody, TokenCount, num_tokens
from naiad.openai_server.api.anthropic.errors import MessageError
from naiad.openai_server.api.bodies import DetokenizeBody, TokenizeBody
from naiad.openai_server.api.errors import APIError, unknown_model
from naiad.openai_server.api.log_probs import LogProbWriter
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.engines.interface import LoadedCheckpoint, Model, Models
from naiad.openai_server.route import Route
from naiad.tokenization import decode

# How many times the window's tokens may be turned into text at once.
_MAX_WINDOWS = 4
# What says how messages are rendered.
_CHAT_FIELDS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_CAPABILITIES = {"completion": True, "chat": True, "vision": False}


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    """Handlers of requests that generate nothing.

    Attributes:
        models: the models to describe.
        bodies: reads bodies.
        pool: runs what would hold up the event loop.
    """

    models: Models
    bodies: BodyReader
    pool: Executor

    def routes(self) -> list[Route]:
        """The routes that these handlers answer."""
        return [
            Route(
                method="GET",
                path="/v1/models",
                handler=self.list_models,
                summary="Lists the models that serve now.",
                answer=ModelList,
            ),
            Route(
                method="GET",
                path="/v1/models/{name:.+}",
                handler=self.one_model,
                summary="Describes one model.",
                answer=ModelCard,
            ),
            Route(
                method="POST",
                path="/v1/messages/count_tokens",
                handler=self.count_tokens,
                summary="Counts the tokens of a prompt of Anthropic's API.",
                body=CountBody,
                example={"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]},
                answer=TokenCount,
                failure=MessageError,
            ),
            Route(
                method="POST",
                path="/tokenize",
                handler=self.tokenize,
                summary="Turns a prompt or a chat into token ids.",
                body=TokenizeBody,
                example={"model": "NAME", "prompt": "Hello", "return_token_strs": True},
                answer=TokenizeAnswer,
            ),
            Route(
                method="POST",
                path="/detokenize",
                handler=self.detokenize,
                summary="Turns token ids into text.",
                body=DetokenizeBody,
                example={"model": "NAME", "tokens": [1, 2, 3]},
                answer=DetokenizeAnswer,
            ),
            Route(
                method="GET",
                path="/version",
                handler=self.version,
                summary="Says the version of the server.",
                answer=dict[str, str],
            ),
        ]

    async def list_models(self, _request: web.Request) -> web.Response:
        """Answer `GET /v1/models`."""
        cards = [await _card(name, model) for name, model in self.models.by_name().items()]
        return _json(encode(ModelList(data=[card for card in cards if card is not None])))

    async def one_model(self, request: web.Request) -> web.Response:
        """Answer `GET /v1/models/{name}`; a name may hold slashes."""
        name = request.match_info["name"]
        card = await _card(name, self.models.get(name))
        if card is None:
            raise unknown_model(name)
        return _json(encode(card))

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer `POST /tokenize`."""
        body = await self.bodies.read(request, TokenizeBody)
        loaded = await self.models.get(body.model).loaded()
        loop = asyncio.get_running_loop()
        async with self.bodies.turn(request):
            raw = await loop.run_in_executor(self.pool, lambda: encode(_tokenized(body, loaded)))
        return _json(raw)

    async def detokenize(self, request: web.Request) -> web.Response:
        """Answer `POST /detokenize`."""
        body = await self.bodies.read(request, DetokenizeBody)
        loaded = await self.models.get(body.model).loaded()
        loop = asyncio.get_running_loop()
        async with self.bodies.turn(request):
            raw = await loop.run_in_executor(self.pool, lambda: encode(_detokenized(body, loaded)))
        return _json(raw)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer `POST /v1/messages/count_tokens`."""
        body = await self.bodies.read(request, CountBody)
        loaded = await self.models.get(body.model).loaded()
        loop = asyncio.get_running_loop()
        async with self.bodies.turn(request):
            count = await loop.run_in_executor(self.pool, num_tokens, loaded.reader, body)
        return _json(encode(count))

    async def version(self, _request: web.Request) -> web.Response:
        """Answer `GET /version`."""
        return _json(encode({"version": naiad.__version__}))


def _tokenized(body: TokenizeBody, loaded: LoadedCheckpoint) -> TokenizeAnswer:
    ids = _token_ids(body, loaded)
    tokens = LogProbWriter(loaded.tokenizer.table, 0)
    return TokenizeAnswer(
        count=len(ids),
        max_model_len=loaded.info.max_model_len,
        tokens=ids,
        token_strs=[tokens.token(each) for each in ids] if body.return_token_strs else None,
    )


def _detokenized(body: DetokenizeBody, loaded: LoadedCheckpoint) -> DetokenizeAnswer:
    size, most = loaded.info.vocab_size, _MAX_WINDOWS * loaded.info.max_model_len
    if len(body.tokens) > most:
        message = f"tokens holds {len(body.tokens)} ids: at most {most} are allowed."
        raise APIError(400, message, param="tokens")
    bad = next((each for each in body.tokens if not 0 <= each < size), None)
    if bad is not None:
        raise APIError(400, f"tokens holds {bad}: expected token ids in [0, {size}).", param="tokens")
    return DetokenizeAnswer(decode(loaded.tokenizer.table, body.tokens, skip_special_tokens=False))


def _token_ids(body: TokenizeBody, loaded: LoadedCheckpoint) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "expected either prompt or messages.", param="prompt")
    if body.prompt == "":
        raise APIError(400, "prompt is empty: expected at least one character.", param="prompt")
    encoder = loaded.reader.encoder
    if body.messages is not None:
        return loaded.reader.chat_token_ids(body, body.messages)
    for name in _CHAT_FIELDS:
        value = getattr(body, name)
        if value not in (None, False, [], {}):
            message = f"{name} = {shown(value)}: expected messages with it, not a prompt."
            raise APIError(400, message, param=name)
    written = replace(encoder.check({"text_input": body.prompt}), add_special_tokens=body.add_special_tokens)
    return encoder.token_ids(written)


async def _card(name: str, model: Model) -> ModelCard | None:
    info = model.info
    if info is None:
        return None
    takes_tools = False
    # One whose files can not be read is listed all the same: its requests say why.
    with contextlib.suppress(NaiadError):
        loaded = await model.loaded()
        takes_tools = loaded.reader.grammar.calls is not None and loaded.tokenizer.takes_tools
    return ModelCard(
        id=name,
        created=info.created_s,
        root=info.checkpoint.served_name,
        max_model_len=info.max_model_len,
        capabilities={**_CAPABILITIES, "logprobs": model.has_token_ids, "tools": takes_tools},
    )


def _json(raw: bytes) -> web.Response:
    return web.Response(body=raw, content_type="application/json")
