"""LangChain's ChatOpenAI and OpenAI."""

import asyncio

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from naiad_server import KEY, MANY_TOKENS, MODEL, QUESTION, URL, expect_running, refused

SERVER = {"base_url": URL, "api_key": KEY, "model": MODEL, "max_retries": 0}
MESSAGES = [SystemMessage("You are brief."), HumanMessage(QUESTION)]


def chat() -> None:
    model = ChatOpenAI(**SERVER, max_tokens=16, seed=3, stream_usage=True)
    answer = model.invoke(MESSAGES)
    assert answer.content
    assert answer.usage_metadata["total_tokens"] > answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream(MESSAGES))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    whole = sum(chunks[1:], chunks[0])
    assert whole.usage_metadata == answer.usage_metadata
    assert whole.response_metadata["finish_reason"] == answer.response_metadata["finish_reason"]
    assert [each.content for each in model.batch([MESSAGES, MESSAGES])] == [answer.content] * 2


def choices_and_log_probs() -> None:
    model = ChatOpenAI(**SERVER, max_tokens=8, n=2, logprobs=True, top_logprobs=3)
    generations = model.generate([MESSAGES]).generations[0]
    assert len(generations) == 2
    for each in generations:
        for token in each.generation_info["logprobs"]["content"]:
            assert len(token["top_logprobs"]) == 3


def completions() -> None:
    model = OpenAI(**SERVER, max_tokens=8, seed=3)
    text = model.invoke("Once upon a time")
    assert text
    assert "".join(model.stream("Once upon a time")) == text


def errors() -> None:
    def ask(**fields: object) -> object:
        return ChatOpenAI(**{**SERVER, **fields}).invoke(MESSAGES)

    assert refused(openai.NotFoundError, lambda: ask(model="other")).code == "model_not_found"
    assert refused(openai.BadRequestError, lambda: ask(temperature=-2)).param == "temperature"


async def asynchronously() -> None:
    model = ChatOpenAI(**SERVER, max_tokens=8, seed=3)
    texts = [answer.content for answer in await model.abatch([MESSAGES] * 4)]
    assert texts == texts[:1] * 4
    endless = ChatOpenAI(**SERVER, max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    stream = endless.astream(MESSAGES)
    await anext(stream)
    await asyncio.to_thread(expect_running, 1)
    await stream.aclose()
    await asyncio.to_thread(expect_running, 0)


chat()
choices_and_log_probs()
completions()
errors()
asyncio.run(asynchronously())
