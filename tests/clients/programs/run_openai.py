"""The official Python client."""

import asyncio

import openai
from naiad_server import KEY, MANY_TOKENS, MESSAGES, MODEL, URL, expect_running, refused
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import TypeAdapter

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


def chat() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "seed": 3}
    raw = client.chat.completions.with_raw_response.create(**asked)
    TypeAdapter(ChatCompletion).validate_json(raw.text, strict=True)
    answer = raw.parse()
    assert raw.headers["x-request-id"]
    text = answer.choices[0].message.content
    assert text
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def whole_chat() -> None:
    # The client's helper raises if the text was cut off.
    asked = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert final.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(**asked)
    assert final.choices[0].message.content == answer.choices[0].message.content


def completions() -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "seed": 3, "logprobs": 2}
    raw = client.completions.with_raw_response.create(**asked)
    TypeAdapter(Completion).validate_json(raw.text, strict=True)
    choice = raw.parse().choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def choices_and_log_probs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, n=3, logprobs=True, top_logprobs=4, seed=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 4
            assert token.top_logprobs[0].logprob >= token.logprob


def errors() -> None:
    def ask(model: str, **fields: object) -> object:
        return client.chat.completions.create(model=model, messages=MESSAGES, extra_body=fields)

    assert refused(openai.NotFoundError, lambda: ask("other")).code == "model_not_found"
    assert refused(openai.BadRequestError, lambda: ask(MODEL, temprature=1)).param == "temprature"


def cancellation() -> None:
    asked = {"max_tokens": MANY_TOKENS, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **asked)
    next(iter(stream))
    expect_running(1)
    stream.close()
    expect_running(0)


async def many_at_once() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as several:

        async def one(number: int) -> str:
            asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "seed": number % 2}
            stream = await several.chat.completions.create(**asked, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*map(one, range(8)))
        assert texts == texts[:2] * 4
        assert [model.id async for model in several.models.list()] == [MODEL]
        asked = {"max_tokens": MANY_TOKENS, "extra_body": {"ignore_eos": True}}
        waiting = asyncio.create_task(
            several.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
        )
        await asyncio.to_thread(expect_running, 1)
        waiting.cancel()
        await asyncio.to_thread(expect_running, 0)


chat()
whole_chat()
completions()
choices_and_log_probs()
errors()
cancellation()
asyncio.run(many_at_once())
