"""LiteLLM's SDK, with its providers `openai` and `hosted_vllm`."""

import asyncio

import litellm
from naiad_server import KEY, MANY_TOKENS, MESSAGES, MODEL, URL, expect_running, refused

SERVER = {"api_base": URL, "api_key": KEY, "max_retries": 0}


def chat(provider: str) -> None:
    asked = {"model": f"{provider}/{MODEL}", "messages": MESSAGES, "max_tokens": 16, "seed": 3, **SERVER}
    answer = litellm.completion(**asked)
    text = answer.choices[0].message.content
    assert text
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    asked |= {"n": 2, "logprobs": True, "top_logprobs": 3}
    choices = litellm.completion(**asked).choices
    assert len(choices) == 2
    for choice in choices:
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)


def completions() -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 3, **SERVER}
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", **asked).choices[0].text
    stream = litellm.text_completion(model=f"text-completion-openai/{MODEL}", stream=True, **asked)
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == text


def errors(provider: str) -> None:
    def ask(model: str, **fields: object) -> object:
        return litellm.completion(model=f"{provider}/{model}", messages=MESSAGES, **fields, **SERVER)

    assert refused(litellm.NotFoundError, lambda: ask("other")).status_code == 404
    assert "temperature" in str(refused(litellm.BadRequestError, lambda: ask(MODEL, temperature=-2)))


async def cancellation() -> None:
    asked = {"model": f"openai/{MODEL}", "messages": MESSAGES, "max_tokens": MANY_TOKENS, **SERVER}
    stream = await litellm.acompletion(**asked, stream=True, extra_body={"ignore_eos": True})
    await anext(stream)
    await asyncio.to_thread(expect_running, 1)
    await stream.aclose()
    await asyncio.to_thread(expect_running, 0)


for each in ("openai", "hosted_vllm"):
    chat(each)
    errors(each)
completions()
asyncio.run(cancellation())
