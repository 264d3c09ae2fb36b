"""Anthropic's Python client."""

import asyncio

import anthropic
from anthropic.types import Message
from naiad_server import KEY, MANY_TOKENS, MESSAGES, MODEL, URL, expect_running, refused
from pydantic import TypeAdapter

ROOT = URL.removesuffix("/v1")
client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0)


def messages() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "system": "Be brief."}
    sampled = asked | {"extra_body": {"seed": 3}}
    raw = client.messages.with_raw_response.create(**sampled)
    TypeAdapter(Message).validate_json(raw.text(), strict=True)
    answer = raw.parse()
    (block,) = answer.content
    assert block.text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached
    with client.messages.stream(**sampled) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == block.text
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == answer.usage.output_tokens


def more_fields() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    asked = {"model": MODEL, "messages": begun, "max_tokens": 30, "stop_sequences": ["."]}
    # The client has no arguments of its own for these any more.
    answer = client.messages.create(**asked, extra_body={"temperature": 0, "top_k": 5})
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == "."
    assert "Paris" in answer.content[0].text


def errors() -> None:
    def ask(model: str, **fields: object) -> object:
        return client.messages.create(model=model, messages=MESSAGES, max_tokens=4, extra_body=fields)

    assert refused(anthropic.NotFoundError, lambda: ask("other")).body["error"]["type"] == "not_found_error"
    error = refused(anthropic.BadRequestError, lambda: ask(MODEL, temprature=1)).body["error"]
    assert error["type"] == "invalid_request_error"
    assert "temprature" in error["message"]


def cancellation() -> None:
    asked = {"max_tokens": MANY_TOKENS, "extra_body": {"ignore_eos": True}}
    stream = client.messages.create(model=MODEL, messages=MESSAGES, stream=True, **asked)
    next(iter(stream))
    expect_running(1)
    stream.close()
    expect_running(0)


async def several_at_once() -> None:
    async with anthropic.AsyncAnthropic(base_url=ROOT, api_key=KEY, max_retries=0) as several:

        async def one(number: int) -> str:
            asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8}
            async with several.messages.stream(**asked, extra_body={"seed": number % 2}) as stream:
                return "".join([text async for text in stream.text_stream])

        texts = await asyncio.gather(*map(one, range(6)))
        assert texts == texts[:2] * 3


messages()
more_fields()
errors()
cancellation()
asyncio.run(several_at_once())
