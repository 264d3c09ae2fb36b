"""OpenAI's Agents SDK with its model of chat completions and plain text."""

import asyncio

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from naiad_server import KEY, MANY_TOKENS, MODEL, QUESTION, URL, expect_running

set_tracing_disabled(True)
CLIENT = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)


def agent(model: str = MODEL, **settings: object) -> Agent:
    return Agent(
        name="Brief",
        instructions="You are brief.",
        model=OpenAIChatCompletionsModel(model=model, openai_client=CLIENT),
        model_settings=ModelSettings(**settings),
    )


async def chat() -> None:
    asks = agent(max_tokens=16, include_usage=True, extra_args={"seed": 3})
    answer = await Runner.run(asks, QUESTION)
    assert answer.final_output
    assert answer.context_wrapper.usage.output_tokens > 0
    stream = Runner.run_streamed(asks, QUESTION)
    deltas = [event.data async for event in stream.stream_events() if event.type == "raw_response_event"]
    text = "".join(each.delta for each in deltas if each.type == "response.output_text.delta")
    assert text == answer.final_output == stream.final_output
    assert stream.context_wrapper.usage.output_tokens == answer.context_wrapper.usage.output_tokens
    second = await Runner.run(asks, [*answer.to_input_list(), {"role": "user", "content": "Again."}])
    assert second.context_wrapper.usage.input_tokens > answer.context_wrapper.usage.input_tokens


async def errors() -> None:
    for model, settings, expected in (
        ("other", {}, openai.NotFoundError),
        (MODEL, {"temperature": -2.0}, openai.BadRequestError),
    ):
        try:
            await Runner.run(agent(model, **settings), QUESTION)
        except expected:
            continue
        raise AssertionError(f"{model} {settings} was accepted")


async def cancellation() -> None:
    asks = agent(max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    stream = Runner.run_streamed(asks, QUESTION)
    async for event in stream.stream_events():
        if event.type == "raw_response_event":
            await asyncio.to_thread(expect_running, 1)
            stream.cancel()
    await asyncio.to_thread(expect_running, 0)


async def main() -> None:
    await chat()
    await errors()
    await cancellation()


asyncio.run(main())
