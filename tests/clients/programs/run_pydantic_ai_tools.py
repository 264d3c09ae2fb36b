"""Pydantic AI's typed answers, by a tool that has to be called and by a format."""

import asyncio
from typing import Literal

from naiad_server import KEY, MODEL, QUESTION, URL
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=URL, api_key=KEY)


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]
    is_dry: bool


async def main() -> None:
    for make_model in (OpenAIChatModel, OpenAIResponsesModel):
        model = make_model(MODEL, provider=PROVIDER)
        for output in (ToolOutput(Weather), NativeOutput(Weather)):
            settings = {"max_tokens": 300, "parallel_tool_calls": False}
            asks = Agent(model, output_type=output, model_settings=settings, retries=0)
            answer = await asks.run(QUESTION)
            assert isinstance(answer.output, Weather)
            async with asks.run_stream(QUESTION) as stream:
                assert isinstance(await stream.get_output(), Weather)


asyncio.run(main())
