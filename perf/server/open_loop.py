"""Open-loop load on `llm`: requests are sent when they are due, regardless of earlier ones.

Times count from the moment a request was due, not from when it was sent, so that a late load generator
does not hide waiting time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from perf.common.token_times import TokenTimes
from perf.server.load import llm_inputs, responses

from naiad.errors import InternalError

_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to send.

    Attributes:
        due_s: seconds from the start of the run.
        prompt_token_ids, num_tokens: the prompt, and the number of tokens to generate.
        tenant: the cache_salt; "" = none is sent.
    """

    due_s: float
    prompt_token_ids: list[int]
    num_tokens: int
    tenant: str = ""


@dataclass(slots=True)
class Answer:
    """The outcome of a request; times in seconds since it was due.

    Attributes:
        sent_s: when it was sent, which shows how late the generator was.
        times: when its tokens arrived.
        end_s: when the last response or the error arrived.
        error: "" = it was served completely.
    """

    arrival: Arrival
    sent_s: float = 0.0
    times: TokenTimes = field(default_factory=TokenTimes)
    end_s: float = 0.0
    error: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether the server refused the request because its queue was full."""
        return bool(self.error) and "queue is full" in self.error


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of one kind that arrive at random (Poisson).

    Attributes:
        rate: requests per second.
        duration_s: time over which they arrive.
        prompt_tokens, output_tokens: lengths of each request.
    """

    rate: float
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""


def poisson(shape: Shape, vocab_size: int, seed: int) -> list[Arrival]:
    """Draw arrivals with distinct prompts; the same arguments give the same arrivals."""
    draw = random.Random(f"{shape} {seed}")
    arrivals = []
    due_s = draw.expovariate(shape.rate)
    while due_s < shape.duration_s:
        prompt = [draw.randrange(1000, vocab_size) for _ in range(shape.prompt_tokens)]
        arrivals.append(Arrival(due_s, prompt, shape.output_tokens, shape.tenant))
        due_s += draw.expovariate(shape.rate)
    return arrivals


def run(url: str, arrivals: Sequence[Arrival]) -> list[Answer]:
    """Send everything when it is due and wait for all answers."""
    return asyncio.run(_run(url, sorted(arrivals, key=lambda arrival: arrival.due_s)))


@dataclass(slots=True)
class Summary:
    """Figures of one run.

    Attributes:
        span_s: time from the first due request to the last answer.
        goodput: tokens per second, over that time, of requests that were served completely.
    """

    num_sent: int
    num_served: int
    num_refused: int
    num_failed: int
    span_s: float
    goodput: float
    first_token_s: list[float] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)


def summarize(answers: Sequence[Answer]) -> Summary:
    """Summarise a run; answers with an error other than a full queue count as failed."""
    served = [answer for answer in answers if not answer.error]
    refused = [answer for answer in answers if answer.is_refused]
    span_s = max(answer.arrival.due_s + answer.end_s for answer in answers) - answers[0].arrival.due_s
    return Summary(
        num_sent=len(answers),
        num_served=len(served),
        num_refused=len(refused),
        num_failed=len(answers) - len(served) - len(refused),
        span_s=span_s,
        goodput=sum(answer.times.num_tokens for answer in served) / span_s,
        first_token_s=[answer.times.first_s for answer in served if answer.times.first_s is not None],
        refusal_s=[answer.end_s for answer in refused],
    )


async def _run(url: str, arrivals: Sequence[Arrival]) -> list[Answer]:
    clients = [triton.InferenceServerClient(url) for _ in range(_CONNECTIONS)]
    start_s = time.perf_counter()
    try:
        return await asyncio.gather(
            *(
                _send(clients[index % _CONNECTIONS], arrival, start_s)
                for index, arrival in enumerate(arrivals)
            )
        )
    finally:
        for client in clients:
            await client.close()


async def _send(client: Any, arrival: Arrival, start_s: float) -> Answer:
    await asyncio.sleep(max(0.0, start_s + arrival.due_s - time.perf_counter()))
    due_s = start_s + arrival.due_s
    answer = Answer(arrival, sent_s=time.perf_counter() - due_s)
    inputs = llm_inputs(arrival.prompt_token_ids, arrival.num_tokens)
    if arrival.tenant:
        inputs["cache_salt"] = np.array([[arrival.tenant.encode()]], dtype=np.object_)
    try:
        async for result in responses(client, "llm", inputs):
            answer.times.take(result.as_numpy("output_ids").size, time.perf_counter() - due_s)
    except InternalError as error:
        answer.error = str(error)
    answer.end_s = time.perf_counter() - due_s
    if not answer.error and answer.times.num_tokens != arrival.num_tokens:
        answer.error = f"{answer.times.num_tokens} tokens instead of {arrival.num_tokens}"
    return answer
