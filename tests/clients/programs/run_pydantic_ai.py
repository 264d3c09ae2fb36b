"""Pydantic AI's agent with plain text."""

import asyncio

from naiad_server import KEY, MANY_TOKENS, MODEL, QUESTION, URL, expect_running
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=URL, api_key=KEY)


def agent(model: str = MODEL, **settings: object) -> Agent:
    return Agent(
        OpenAIChatModel(model, provider=PROVIDER), instructions="You are brief.", model_settings=settings
    )


async def chat() -> None:
    asks = agent(max_tokens=16, seed=3)
    answer = await asks.run(QUESTION)
    assert answer.output
    assert answer.usage.output_tokens > 0
    async with asks.run_stream(QUESTION) as stream:
        text = "".join([part async for part in stream.stream_text(delta=True, debounce_by=None)])
    assert text == answer.output
    assert stream.usage.output_tokens == answer.usage.output_tokens
    second = await asks.run("Say it again.", message_history=answer.all_messages())
    assert second.usage.input_tokens > answer.usage.input_tokens


async def errors() -> None:
    for model, settings, status in (("other", {}, 404), (MODEL, {"temperature": -2.0}, 400)):
        found = None
        try:
            await agent(model, **settings).run(QUESTION)
        except ModelHTTPError as error:
            found = error.status_code
        assert found == status


async def cancellation() -> None:
    asks = agent(max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    running = asyncio.create_task(asks.run(QUESTION))
    await asyncio.to_thread(expect_running, 1)
    running.cancel()
    await asyncio.to_thread(expect_running, 0)


async def main() -> None:
    await chat()
    await errors()
    await cancellation()


asyncio.run(main())
