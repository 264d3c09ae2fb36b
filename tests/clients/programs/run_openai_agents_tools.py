"""OpenAI's Agents SDK with a tool that has to be called, and with a typed answer, over both of its APIs."""

import asyncio
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from naiad_server import KEY, MODEL, QUESTION, URL
from pydantic import BaseModel

set_tracing_disabled(True)
CLIENT = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


@function_tool
def get_weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Says the weather.

    Args:
        city: the city.
        days: number of days.
    """
    return f"rain in {city} for {days} days"


async def main() -> None:
    for make_model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = make_model(model=MODEL, openai_client=CLIENT)
        caller = Agent(
            name="Caller",
            model=model,
            tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200),
        )
        answer = await Runner.run(caller, QUESTION)
        assert answer.final_output.startswith("rain in ")
        stream = Runner.run_streamed(caller, QUESTION)
        async for _ in stream.stream_events():
            pass
        assert stream.final_output.startswith("rain in ")
        typed = Agent(
            name="Typed", model=model, output_type=Weather, model_settings=ModelSettings(max_tokens=200)
        )
        assert isinstance((await Runner.run(typed, QUESTION)).final_output, Weather)


asyncio.run(main())
