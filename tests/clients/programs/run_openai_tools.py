"""Tools and formats with the official Python client: its helpers that parse, over chats and responses."""

from typing import Literal

import openai
from naiad_server import KEY, MESSAGES, MODEL, QUESTION, URL
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
ASKED = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": 200,
    "seed": 3,
    "tools": [openai.pydantic_function_tool(Weather)],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def check(completion: openai.types.chat.ParsedChatCompletion) -> Weather:
    """Return the arguments of the one call."""
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "Weather"
    assert isinstance(call.function.parsed_arguments, Weather)
    return call.function.parsed_arguments


def calls() -> None:
    found = check(client.chat.completions.parse(**ASKED))
    with client.chat.completions.stream(**ASKED) as stream:
        kinds = {event.type for event in stream}
        assert check(stream.get_final_completion()) == found
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def conversation() -> None:
    message = client.chat.completions.create(**ASKED).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    after = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, message, result], tools=ASKED["tools"], max_tokens=16
    )
    assert after.choices[0].finish_reason in ("stop", "length")


def formats() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 3}
    answer = client.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


def responses() -> None:
    answer = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=200, extra_body={"seed": 3}
    )
    assert isinstance(answer.output_parsed, Weather)
    tool = {"type": "function", "name": "Weather", "strict": True}
    tool["parameters"] = openai.pydantic_function_tool(Weather)["function"]["parameters"]
    asked = {"model": MODEL, "input": QUESTION, "tools": [tool], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "max_output_tokens": 200, "extra_body": {"seed": 3}}
    (call,) = client.responses.create(**asked).output
    with client.responses.stream(**asked) as stream:
        parts = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert call.type == "function_call"
    assert "".join(parts) == call.arguments
    Weather.model_validate_json(call.arguments)


calls()
conversation()
formats()
responses()
