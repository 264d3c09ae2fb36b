"""Tools with Anthropic's Python client: a call that is asked for, streamed and not, and its result."""

import json

import anthropic
from naiad_server import KEY, MESSAGES, MODEL, URL

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
TOOL = {"name": "get_weather", "description": "Says the weather.", "input_schema": PARAMETERS}
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)


def check(message: anthropic.types.Message) -> anthropic.types.ToolUseBlock:
    """Return the message's one call."""
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert call.input["city"] in ("Oslo", "Rome")
    assert call.input["days"] in (1, 2, 3)
    return call


for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
    asked["extra_body"] = {"seed": 3}
    answer = client.messages.create(**asked)
    call = check(answer)
    parts = []
    with client.messages.stream(**asked) as stream:
        for event in stream:
            if event.type == "input_json":
                parts.append(event.partial_json)
        streamed = check(stream.get_final_message())
    assert streamed.input == call.input == json.loads("".join(parts))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    said = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(model=MODEL, messages=said, max_tokens=16, tools=[TOOL])
    assert after.stop_reason in ("end_turn", "max_tokens")
