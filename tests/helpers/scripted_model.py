"""The OpenAI server in this process, whose model says what a test has written, token by token."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.grammar.compiler import refusal
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.api.parsing.output_parser import grammar_of
from naiad.openai_server.api.reading import AskedGeneration, RequestReader
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.engines.local_generation import LocalGeneration
from naiad.openai_server.generate import GenerateRoutes
from naiad.openai_server.guard import Guard
from naiad.openai_server.metrics.http_metrics import HTTPMetrics
from naiad.openai_server.model_routes import ModelRoutes
from naiad.openai_server.route import add_routes
from naiad.openai_server.streams import StreamWatch
from naiad.outputs import RequestOutput, TokenLogProbs, error_output
from naiad.sequence import FinishReason, SamplingParams
from naiad.tokenization import Tokenizer
from naiad.tokenization.text_decoder import context_ids
from naiad.tracing.request_trace import Tracer

WINDOW = 4096
# A chat template that shows tools, calls and results as JSON.
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "#{{ call.id }}</tool_call>{% endfor %}"
    "{% if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REASONING_TEMPLATE = TOOL_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n{# </think> #}{% endif %}")


@dataclass
class Scripted:
    """What the model says, and what it has been asked.

    Attributes:
        openai: the address of the API, as `helpers.server.Server` has it.
        texts: what the sequences of the next request say, each to its end.
        reason: why they end.
        stop: the stop string that follows what they say, and ends them; "": none does.
        num_at_once: tokens of a step.
        problem: the engine refuses grammars because of this; "": it takes them.
        asked: the requests.
        prompts: their first prompts as text.
    """

    openai: str = ""
    texts: Sequence[str] = ("Hello",)
    reason: FinishReason = FinishReason.STOP
    stop: str = ""
    num_at_once: int = 1
    problem: str = ""
    asked: list[AskedGeneration] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the last request."""
        return self.asked[-1].request.rows[0].params


class _Model:
    """See `Model` of the server's engines."""

    engine = "scripted"
    has_token_ids = True
    info: Any = SimpleNamespace(
        max_model_len=WINDOW,
        vocab_size=400,
        created_s=0,
        checkpoint=SimpleNamespace(served_name="first"),
    )
    max_model_len = WINDOW

    def __init__(self, script: Scripted, tokenizer: Tokenizer, families: FamilyChoices) -> None:
        limits = ModelLimits(
            max_model_len=WINDOW, vocab_size=410, eos_token_ids=(1,), exclude_input_in_output=True
        )
        self._script = script
        self._tokenizer = tokenizer
        encoder = PromptEncoder(tokenizer, WINDOW, 410)
        self.reader = RequestReader(encoder, limits, grammar_of(tokenizer, families))

    async def loaded(self) -> Any:
        return SimpleNamespace(
            tokenizer=self._tokenizer,
            reader=self.reader,
            texts=ChunkTexts(self._tokenizer.table),
            info=self.info,
        )

    async def begin(
        self, loaded: Any, read: Callable[[RequestReader], AskedGeneration]
    ) -> tuple[AskedGeneration, LocalGeneration]:
        asked = await asyncio.to_thread(read, loaded.reader)
        self._script.asked.append(asked)
        ids = asked.request.rows[0].prompt_token_ids
        self._script.prompts.append(self._tokenizer_text(ids))
        generation = LocalGeneration(
            asked.request, 1, loaded.texts, lambda *_: None, asked.parsers(), asked.trace
        )
        # Without a reference the event loop may forget a task.
        self._task = asyncio.create_task(self._speak(asked, generation))
        return asked, generation

    def _tokenizer_text(self, ids: Sequence[int]) -> str:
        table = self._tokenizer.table
        return b"".join(table.visible_bytes(each, skip_special_tokens=False) for each in ids).decode()

    async def _speak(self, asked: AskedGeneration, generation: LocalGeneration) -> None:
        grammar = asked.request.rows[0].params.grammar
        if self._script.problem and grammar is not None:
            error = refusal(grammar, self._script.problem)
            generation.take(error_output(1, error.status, str(error)))
            generation.wake()
            return
        for index in range(asked.request.num_sequences):
            text = self._script.texts[index % len(self._script.texts)]
            for output in self._outputs(asked, index + 1, text):
                generation.take(output)
                generation.wake()
                await asyncio.sleep(0)

    def _outputs(self, asked: AskedGeneration, sequence_id: int, text: str) -> Iterator[RequestOutput]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        before = list(asked.request.rows[0].prompt_token_ids)
        size = self._script.num_at_once
        for begin in range(0, len(ids), size):
            new = ids[begin : begin + size]
            log_probs = [
                TokenLogProbs(-float(each), top_token_ids=[each], top_log_probs=[-float(each)])
                for each in new
            ]
            yield RequestOutput(
                sequence_id,
                new,
                window_ids=list(context_ids(self._tokenizer.table, before, True)),
                log_probs=log_probs if asked.num_log_probs is not None else [],
            )
            before += new
        window = list(context_ids(self._tokenizer.table, before, True))
        stop = self._script.stop
        yield RequestOutput(
            sequence_id,
            [],
            window_ids=window,
            num_chars=0 if stop else -1,
            is_cut=bool(stop),
            finish_reason=self._script.reason,
            stop_reason=stop,
        )


@contextlib.contextmanager
def scripted_model(
    folder: Path,
    template: str = TOOL_TEMPLATE,
    families: FamilyChoices | None = None,
    tracer: Tracer | None = None,
) -> Iterator[Scripted]:
    """Serve in a thread of its own; the model is called `first`."""
    tokenizer = Tokenizer.from_directory(write_tokenizer(folder, byte_level_tokenizer(), template))
    script, loop = Scripted(), asyncio.new_event_loop()
    model = _Model(script, tokenizer, families or FamilyChoices("auto", "hermes"))
    models: Any = SimpleNamespace(observes=True, get=lambda _name: model, by_name=lambda: {"first": model})
    pool = ThreadPoolExecutor(2)
    bodies = BodyReader(pool, is_lenient=False)
    guard = Guard((), ())
    app = web.Application(middlewares=[HTTPMetrics().middleware, guard.middleware])
    watch = StreamWatch(60, 60)
    generate = GenerateRoutes(models, bodies, watch, tracer)
    routes = [*generate.routes(), *ModelRoutes(models, bodies, pool).routes()]
    add_routes(app, routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    loop.run_until_complete(start())
    script.openai = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        pool.shutdown()
