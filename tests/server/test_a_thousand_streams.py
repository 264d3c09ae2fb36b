"""A thousand streams at once on one server: each whole, each with one end, and nothing is held afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from perf.server.load import arrays, llm_inputs, text_inputs, timed_messages
from perf.server.sse_load import event_streams
from tritonclient.grpc import service_pb2

from helpers.server import Server, start_server

NUM_STREAMS = 1000
TOKENS = 24
PROMPTS = ("Hello", "The quick brown fox", "你好，世界", "  two spaces", "a longer text about nothing")
OPTIONS = ("--max-num-seqs", "64", "--max-queued-requests", "2000", "--kv-cache-bytes", "64000000")
DOORS = ("ensemble", "text", "llm", "openai")


@pytest.fixture(scope="module")
def roomy(tiny_dir: Path) -> Iterator[Server]:
    served = start_server(tiny_dir, *OPTIONS, "--served-name", "tiny", "--openai-port", "0")
    yield served
    assert served.stop() == 0, "\n".join(served.lines[-40:])


def answers(server: Server, door: str, numbers: range) -> list[Any]:
    """Ask as many prompts at once; return text or ids of each."""
    if door == "openai":
        sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        bodies = [{"model": "tiny", "prompt": PROMPTS[n % len(PROMPTS)], **sampling} for n in numbers]
        address = server.openai.removeprefix("http://").removesuffix("/v1")
        streams = event_streams(address, "/v1/completions", bodies)
        for events in streams:
            assert sum(choice["finish_reason"] is not None for e in events for choice in e["choices"]) == 1
        return ["".join(choice["text"] for e in events for choice in e["choices"]) for events in streams]
    if door == "llm":
        asked = [llm_inputs([5 + n % len(PROMPTS), 7, 9], TOKENS) for n in numbers]
    else:
        asked = [text_inputs(PROMPTS[n % len(PROMPTS)], TOKENS) for n in numbers]
    found = []
    for stream in timed_messages(server.grpc, door, asked):
        messages = [message for _, message in stream]
        assert sum(map(is_final, messages)) == 1
        assert is_final(messages[-1])
        pieces = arrays(messages, "output_ids" if door == "llm" else "text_output")
        found.append([value for piece in pieces for value in piece.tolist()])
    return found


def is_final(message: bytes) -> bool:
    answer = service_pb2.ModelStreamInferResponse.FromString(message)
    return bool(answer.infer_response.parameters["triton_final_response"].bool_param)


@pytest.mark.slow
@pytest.mark.parametrize("doors", [(door,) for door in DOORS] + [DOORS], ids="-".join)
def test_a_thousand_streams_end_whole(roomy: Server, doors: tuple[str, ...]) -> None:
    alone = {door: [answers(roomy, door, range(n, n + 1))[0] for n in range(len(PROMPTS))] for door in doors}
    share = NUM_STREAMS // len(doors)
    with ThreadPoolExecutor(len(doors)) as threads:
        asked = {door: threads.submit(answers, roomy, door, range(share)) for door in doors}
        found = {door: each.result() for door, each in asked.items()}
    for door in doors:
        joined = [flat(each) for each in found[door]]
        assert joined == [flat(alone[door][n % len(PROMPTS)]) for n in range(share)], door
    assert roomy.settled("vllm:num_requests_running") == 0
    assert roomy.used_blocks() == 0


def flat(answer: Any) -> Any:
    """A text in one piece, whatever pieces it came in."""
    return b"".join(answer) if answer and isinstance(answer[0], bytes) else answer
