"""The models of a remote Triton server, and generations on its streams, with a server that a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from helpers.fake_triton import FakeTriton, response, shipped_config
from helpers.tiny_repository import tiny_checkpoint
from naiad.cli.control_key import grpc_metadata
from naiad.errors import EngineAwayError, InternalError, InvalidRequestError, NaiadError, UnavailableError
from naiad.frontend.field import FieldError
from naiad.openai_server.api.bodies import ChatBody, CompletionBody
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.api.tally import Tally
from naiad.openai_server.engines.remote.models import RemoteModels, RemoteServer
from naiad.openai_server.engines.remote.shape import NoTextModelError, models_behind, read_shape, takes_text
from naiad.tracing.trace_context import NO_TRACE, TraceContext

SHIPPED = ("ensemble", "tokenizer", "llm", "detokenizer", "text")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("remote") / "checkpoint")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@asynccontextmanager
async def remote(checkpoint: Path, **options: Any) -> AsyncIterator[tuple[FakeTriton, RemoteModels]]:
    fake = FakeTriton(*SHIPPED)
    await fake.start()
    pool = ThreadPoolExecutor(1)
    server = RemoteServer.open(
        f"127.0.0.1:{fake.port}", checkpoint, **{"families": FamilyChoices(), **options}
    )
    models = RemoteModels(server, pool)
    await models.look()
    try:
        yield fake, models
    finally:
        await models.close()
        await fake.stop()
        pool.shutdown()


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def generate(models: RemoteModels, trace: TraceContext = NO_TRACE, **fields: Any) -> Tally:
    """Ask `text` and take all deltas."""
    model = models.get("text")
    body = CompletionBody(model="text", **{"prompt": "Hello", **fields})
    asked, generation = await model.begin(
        await model.loaded(), lambda reader: replace(reader.completion(body, "id"), context=trace)
    )
    tally = Tally(asked.request)
    try:
        while not tally.is_complete:
            for delta in await generation.next():
                tally.keep(delta)
    finally:
        generation.close()
    return tally


def part(text: str, num_tokens: int, reason: str = "", **more: Any) -> Any:
    sent = {"text_output": text, "num_output_tokens": num_tokens, "finish_reason": reason, "stop_reason": ""}
    return response(more.pop("request_id", "id"), **{**sent, **more})


def test_models_that_take_text_are_found_and_lost(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            assert set(models.by_name()) == {"ensemble", "text"}
            fake.ready.remove("text")
            await models.look()
            assert set(models.by_name()) == {"ensemble"}
            with pytest.raises(EngineAwayError):
                models.get("text")
            with pytest.raises(APIError) as unknown:
                models.get("llm")
            assert unknown.value.status == 404
            fake.ready.append("text")
            await models.look()
            assert models.get("text").info.checkpoint.served_name == "text"

    run(test)


def test_a_list_that_needs_a_key(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    (key,) = grpc_metadata("0123456789abcdef-XYZ")

    async def looked(**options: Any) -> set[str]:
        async with remote(checkpoint, **options) as (fake, models):
            fake.control = key
            for _ in range(3):
                await models.look()
            return set(models.by_name())

    async def test() -> None:
        assert await looked(control_headers=dict([key])) == {"ensemble", "text"}
        assert caplog.messages == []
        assert await looked() == set()
        (message,) = caplog.messages
        assert "was sent no key: --model-control-key FILE" in message
        assert await looked(control_headers={key[0]: "another"}) == set()
        assert "another key than --model-control-key" in caplog.messages[-1]
        assert "another" not in caplog.messages[0]

    run(test)


def test_a_server_that_lists_its_models_for_nobody(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "naiad.openai_server")

    async def looked(**options: Any) -> set[str]:
        async with remote(checkpoint, **options) as (fake, models):
            fake.lists_models = False
            await models.look()
            names = set(models.by_name())
            fake.ready.remove("text")
            await models.look()
            assert set(models.by_name()) == names - {"text"}
            return names

    async def test() -> None:
        assert await looked() == {"ensemble", "text"}
        (message,) = caplog.messages
        assert (
            "does not list its models: it is asked for ensemble, text; others are named with --model"
            in message
        )
        assert await looked(model_names=("text", "missing")) == {"text"}

    run(test)


def test_a_server_that_is_away_is_found_when_it_comes_back(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            await fake.stop()
            await models.look()
            for name in ("text", "never seen", None):
                with pytest.raises(EngineAwayError):
                    models.get(name)
            await fake.start()
            while not models.by_name():
                await models.look()
            assert models.get("text").engine == "text"

    run(test)


def test_one_model_under_another_name(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint, model_names=("text",), served_name="org/name") as (_, models):
            assert list(models.by_name()) == ["org/name"]
            assert models.get(None).engine == "text"

    run(test)


def test_a_model_that_was_asked_for_and_can_not_be_offered_is_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with remote(checkpoint, model_names=("llm",)) as (_, models):
            assert models.by_name() == {}

    run(test)
    assert "the model llm is not offered: it has no input max_tokens" in caplog.text


def test_a_trace_is_passed_on(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script = [part("a", 1, "length")]
            await generate(models, TraceContext("00-trace", "a=1,b=2"))
            await generate(models)
            traced, other = fake.metadata
            assert (traced["traceparent"], traced["tracestate"]) == ("00-trace", "a=1,b=2")
            assert not {"traceparent", "tracestate"} & other.keys()

    run(test)


def test_what_is_sent(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script = [part("a", 1, "length"), part("b", 1, "length", request_id="id/1")]
            tally = await generate(models, prompt=["Hello", "World"], seed=5, stop=["x"], timeout_s=2.5)
            assert [choice.text for choice in tally.choices] == ["a", "b"]
            first, second = fake.requests
            assert (first.model_name, first.id, second.id) == ("text", "id", "id/1")
            assert first.parameters["timeout"].int64_param == 2_500_000
            shapes = {each.name: (each.datatype, list(each.shape)) for each in first.inputs}
            assert shapes["text_input"] == shapes["stop_words"] == ("BYTES", [1, 1])
            assert shapes["seed"] == ("UINT64", [1, 1])
            assert shapes["temperature"] == ("FP32", [1, 1])
            assert shapes["return_finish_reason"] == ("BOOL", [1, 1])
            assert "priority" not in shapes
            assert "cache_salt" not in shapes

    run(test)


def test_responses_become_deltas(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script = [
                part("one", 2, sequence_index=1, num_cached_tokens=4),
                part("a", 1, sequence_index=0),
                response("id"),
                part("b", 3, "stop", stop_reason="x", sequence_index=0, total_draft_tokens=5),
                part("", 0, "stop", stop_reason="7", sequence_index=1, total_accepted_draft_tokens=2),
            ]
            tally = await generate(models, n=2, stop="x", stop_token_ids=[7])
            assert [choice.text for choice in tally.choices] == ["ab", "one"]
            lasts = [choice.last for choice in tally.choices]
            assert [each and each.stop_reason([7]) for each in lasts] == ["x", 7]
            usage = tally.usage
            assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (6, 4)
            assert usage.completion_tokens_details.accepted_prediction_tokens == 2

    run(test)


ERRORS: dict[str, tuple[Any, type[NaiadError]]] = {
    "invalid": ([response("id", "top_k = -1: expected a number ≥ 0")], InvalidRequestError),
    "full": ([response("id", "Exceeds maximum queue size, the queue is full: …")], UnavailableError),
    "away": (
        [response("id", "in ensemble 'a', the engine is restarting; try again in a few seconds")],
        UnavailableError,
    ),
    "unloaded": (
        [response("id", "Request for unknown model: 'text' is not found")],
        UnavailableError,
    ),
    "failed": ([response("id", "NaN logits")], InternalError),
    "ended early": ([part("a", 1)], InternalError),
    "unreadable": ([part("a", 1, request_id="another")], InternalError),
    "odd reason": ([part("a", 1, "because")], InternalError),
    "ended by an error": ([part("", 0, "error")], InternalError),
}


def test_a_grammar_that_the_remote_engine_refuses_names_the_clients_field(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script = [
                response("id", "guided_decoding_guide (json_schema) is refused: no text satisfies it")
            ]
            with pytest.raises(FieldError) as raised:
                await generate(models, structured_outputs={"json": {"enum": []}})
            assert raised.value.field_name == "structured_outputs"
            assert str(raised.value).startswith("structured_outputs.json (json_schema) is refused: ")

    run(test)


@pytest.mark.parametrize("case", ERRORS)
def test_errors_in_streams(checkpoint: Path, case: str) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script, kind = ERRORS[case]
            fake.is_held = case not in ("ended early",)
            with pytest.raises(NaiadError) as raised:
                await generate(models)
            assert type(raised.value) is kind
            # The call is cancelled, although the server would go on.
            await eventually(lambda: fake.num_open == 0)

    run(test)


def test_a_response_that_can_not_be_read_is_told_by_its_place_alone(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script = [part("a", 1, request_id="a secret")]
            with pytest.raises(InternalError):
                await generate(models)

    run(test)
    (said,) = caplog.messages
    assert said.startswith("a response can not be read: KeyError at remote/generation.py:")
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("status", "begun", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, False, EngineAwayError),
        (grpc.StatusCode.UNAVAILABLE, True, InternalError),
        (grpc.StatusCode.INVALID_ARGUMENT, False, InvalidRequestError),
        (grpc.StatusCode.INTERNAL, False, InternalError),
    ],
)
def test_calls_that_fail(
    checkpoint: Path, status: grpc.StatusCode, begun: bool, kind: type[NaiadError]
) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script, fake.breaks = [part("a", 1)] if begun else [], status
            with pytest.raises(NaiadError) as raised:
                await generate(models)
            assert type(raised.value) is kind

    run(test)


def test_a_reader_that_leaves_cancels_the_call(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script, fake.is_held = [part("a", 1)], True
            asking = asyncio.create_task(generate(models))
            await eventually(lambda: fake.num_open == 1)
            asking.cancel()
            await eventually(lambda: fake.num_open == 0)

    run(test)


async def begin_chat(models: RemoteModels, name: str = "text", **fields: Any) -> Any:
    model = models.get(name)
    body = ChatBody(model=name, messages=[{"role": "user", "content": "Hello"}], **fields)
    return await model.begin(await model.loaded(), lambda reader: reader.chat(body, "id"))


def test_reasoning_is_taken_apart(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint, families=FamilyChoices(reasoning="think")) as (fake, models):
            fake.script = [part("<thi", 1), part("nk>why</th", 3), part("ink>yes", 3), part("!", 1, "stop")]
            asked, generation = await begin_chat(models)
            tally = Tally(asked.request)
            while not tally.is_complete:
                for delta in await generation.next():
                    tally.keep(delta)
            assert (tally.choices[0].reasoning, tally.choices[0].text) == ("why", "yes!")
            assert tally.usage.completion_tokens == 8

    run(test)


def test_a_chat_goes_as_messages_or_as_text_that_means_the_same_tokens(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            fake.script = [part("", 1, "length")]
            _, plain = await begin_chat(models)
            _, rendered = await begin_chat(models, add_generation_prompt=False)
            for generation in (plain, rendered):
                await generation.next()
            inputs = [{each.name for each in request.inputs} for request in fake.requests]
            assert [each & {"messages", "text_input"} for each in inputs] == [{"messages"}, {"text_input"}]

    run(test)


def test_an_input_that_the_model_lacks_is_refused_by_name(checkpoint: Path) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            config = fake.configs["text"]
            kept = [each for each in config.input if each.name != "min_p"]
            del config.input[:]
            config.input.extend(kept)
            fake.ready.remove("text")
            await models.look()
            fake.ready.append("text")
            await models.look()
            with pytest.raises(APIError) as refused:
                await generate(models, min_p=0.5)
            assert (refused.value.status, refused.value.param) == (400, "min_p")

    run(test)


def test_a_model_that_is_loaded_anew_between_two_looks_is_read_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with remote(checkpoint) as (fake, models):
            before = models.get("text")
            fake.configs["text"].parameters["max_model_len"].string_value = "20"
            await models.look()
            assert models.get("text") is before
            monkeypatch.setattr(models, "_read_again_s", 0.0)
            kept = models.get("ensemble")
            await models.look()
            assert models.get("text").max_model_len == 20
            assert models.get("ensemble") is kept

    run(test)


def shape_of(config: Any, *behind: Any) -> Any:
    return read_shape(config, behind)


def test_shapes_of_the_shipped_models() -> None:
    assert [name for name in SHIPPED if takes_text(shipped_config(name))] == ["ensemble", "text"]
    assert models_behind(shipped_config("ensemble")) == ["tokenizer", "llm", "detokenizer"]
    assert models_behind(shipped_config("text")) == ["llm"]
    text, llm, detokenizer = map(shipped_config, ("text", "llm", "detokenizer"))
    text.parameters["max_model_len"].string_value = "4096"
    llm.parameters["max_model_len"].string_value = "1024"
    detokenizer.parameters["skip_special_tokens"].string_value = "false"
    assert shape_of(text, llm).max_model_len == 1024
    assert shape_of(text, llm).skips_special_tokens
    ensemble = shape_of(shipped_config("ensemble"), llm, detokenizer)
    assert (ensemble.skips_special_tokens, ensemble.adds_special_tokens) == (False, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config: config.model_transaction_policy.Clear(), "not decoupled"),
        (lambda config: config.ClearField("output"), "no output"),
        (
            lambda config: setattr(config.parameters["accumulate_tokens"], "string_value", "true"),
            "accumulate_tokens",
        ),
    ],
)
def test_models_that_can_not_be_offered(change: Callable[[Any], None], reason: str) -> None:
    config = shipped_config("text")
    change(config)
    with pytest.raises(NoTextModelError, match=reason):
        read_shape(config, [])
