"""Instructor's models, by a tool that has to be called and by a format."""

from typing import Literal

import instructor
import openai
from naiad_server import KEY, MESSAGES, MODEL, URL
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]
    is_dry: bool


CLIENT = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)

for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    found = instructor.from_openai(CLIENT, mode=mode).chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Weather, max_tokens=200, max_retries=0, seed=3
    )
    assert isinstance(found, Weather), mode
