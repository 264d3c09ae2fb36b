"""One request by every door: ensemble, its three steps taken by the client, text model, vLLM's shape."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from helpers.raw_grpc import Outcome, ask, text_inputs
from helpers.server import Server, start_repository
from helpers.tiny_repository import create_repository, tiny_checkpoint

PROMPTS = (
    "The quick brown fox",
    "  leading spaces,\tand a tab",
    "你好，世界。我们",
    "👍🏽 👩‍👩‍👧 🇫🇷",
    "It's 12 o'clock!\n" * 9,
    "<|im_start|>user\nstop STOP<|im_end|>",
)
STRINGS = ("e", "qu", " the", "。", "o'", "stop")
WISHES = ("finish_reason", "num_input_tokens", "num_output_tokens")
PAIRS = {
    "embedding_bias": ("embedding_bias_words", "embedding_bias_weights"),
    "logit_bias": ("logit_bias_ids", "logit_bias_values"),
}
VLLM_NAMES = {
    **{name: name for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
    **{name: name for name in ("stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos")},
    **{name: name for name in ("include_stop_str_in_output", "seed", "num_draft_tokens", "priority")},
    "stop_words": "stop",
    "num_return_sequences": "n",
}
Texts = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A repository of all models, with one of vLLM's shape for the same engine."""
    folder = tmp_path_factory.mktemp("doors_agree")
    checkpoint = tiny_checkpoint(folder / "checkpoint")
    create_repository(folder / "repository", checkpoint, "--drafter", "ngram")
    create_repository(folder / "vllm", checkpoint, "--preset", "vllm")
    shutil.copytree(folder / "vllm" / "vllm_model", folder / "repository" / "vllm_model")
    running = start_repository("--model-repository", str(folder / "repository"))
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])


def draw(number: int) -> tuple[str, dict[str, Any]]:
    """A prompt, and fields in the names of `ensemble`: each is there in some requests."""
    rng = random.Random(number)

    def ids(count: int) -> list[int]:
        return [rng.randrange(5, 390) for _ in range(count)]

    max_tokens = rng.randrange(1, 25)
    fields: dict[str, Any] = {
        "top_k": rng.choice([1, 0, 5, 40]),
        "top_p": rng.choice([0.5, 0.9]),
        "min_p": rng.choice([0.0, 0.02]),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "repetition_penalty": rng.uniform(0.8, 1.5),
        "min_tokens": rng.randrange(max_tokens),
        "stop_words": rng.sample(STRINGS, 2),
        "include_stop_str_in_output": True,
        "bad_words": rng.sample(STRINGS, 2),
        "stop_token_ids": ids(20),
        "allowed_token_ids": ids(60),
        "ignore_eos": True,
        "num_return_sequences": rng.randrange(1, 4),
        "num_draft_tokens": rng.randrange(4),
        "priority": rng.randrange(-3, 3),
        "cache_salt": f"tenant {rng.randrange(3)}",
        "embedding_bias": (rng.sample(STRINGS, 2), [2.0, -2.0]),
        "logit_bias": (ids(4), [3.0, -3.0, 1.0, 2.0]),
        "end_id": rng.randrange(5, 390),
        "messages": json.dumps([{"role": "user", "content": PROMPTS[0]}]),
    }
    chosen = {name: value for name, value in fields.items() if rng.random() < 0.35}
    return rng.choice(PROMPTS), {
        "max_tokens": max_tokens,
        "temperature": rng.choice([0.0, 0.7, 2.5]),
        "seed": number,
        **chosen,
    }


def tensors(prompt: str, fields: dict[str, Any], stream: bool) -> dict[str, Any]:
    """As clients of the ensemble send them."""
    inputs = text_inputs(prompt, 1) | fields | {"stream": stream}
    inputs |= {f"return_{name}": True for name in (*WISHES, "log_probs")}
    inputs["seed"] = np.array([[fields["seed"]]], dtype=np.uint64)
    if "messages" in inputs:
        del inputs["text_input"]
    for pair, names in PAIRS.items():
        inputs |= zip(names, inputs.pop(pair, ()), strict=False)
    return inputs


@pytest.fixture(scope="module")
def steps(doors: Server) -> list[dict[str, Any]]:
    """Of the ensemble, as its configuration has them."""
    with triton.InferenceServerClient(doors.grpc) as client:
        config = client.get_model_config("ensemble", as_json=True)["config"]
    found: list[dict[str, Any]] = config["ensemble_scheduling"]["step"]
    return found


def by_steps(server: Server, steps: list[dict[str, Any]], inputs: dict[str, Any]) -> Outcome:
    """What the ensemble does, done by the client."""
    first, second, last = steps

    def take(step: dict[str, Any], values: dict[str, Any]) -> list[dict[str, Any]]:
        names = {inner: outer for inner, outer in step["input_map"].items() if outer in values}
        sent = {inner: values[outer] for inner, outer in names.items()}
        outcome = ask(server.grpc, step["model_name"], sent)
        assert (outcome.errors, outcome.num_finals) == ([], 1)
        outer_names = step["output_map"]
        return [
            {outer_names[name]: array for name, array in response.items() if name in outer_names}
            for response in outcome.responses
        ]

    (tokenized,) = take(first, inputs)
    generated = take(second, inputs | tokenized)
    return Outcome([each for chunk in generated for each in take(last, chunk)], [], 1)


def by_vllm(server: Server, prompt: str, fields: dict[str, Any]) -> Texts:
    sampling = {VLLM_NAMES[name]: value for name, value in fields.items() if name in VLLM_NAMES}
    if "logit_bias" in fields:
        sampling["logit_bias"] = {
            str(token_id): value for token_id, value in zip(*fields["logit_bias"], strict=True)
        }
    inputs: dict[str, Any] = {
        "text_input": np.array([prompt.encode()], dtype=np.object_),
        "sampling_parameters": np.array([json.dumps(sampling).encode()], dtype=np.object_),
        "exclude_input_in_output": np.array([True]),
        **{f"return_{name}": np.array([True]) for name in WISHES},
    }
    if "messages" in fields:
        del inputs["text_input"]
        inputs["messages"] = np.array([fields["messages"].encode()], dtype=np.object_)
    outcome = ask(server.grpc, "vllm_model", inputs)
    assert outcome.errors == []
    (response,) = outcome.responses
    names = ("text_output", "finish_reason", "stop_reason", "num_output_tokens")
    told = zip(*(response[name].tolist() for name in names), strict=True)
    prompt_tokens = {"num_input_tokens": int(response["num_input_tokens"].item())}
    return {index: dict(zip(names, each, strict=True)) | prompt_tokens for index, each in enumerate(told)}


def whole(outcome: Outcome) -> Texts:
    """What each sequence was told, whatever it was cut into."""
    assert (outcome.errors, outcome.num_finals, outcome.call_error) == ([], 1, "")
    found: Texts = {}
    for response in outcome.responses:
        index = int(response["sequence_index"].item()) if "sequence_index" in response else 0
        told = found.setdefault(
            index, {"text_output": b"", "num_output_tokens": 0, "output_log_probs": [], "cum_log_probs": 0.0}
        )
        told["text_output"] += response["text_output"].item()
        told["num_output_tokens"] += int(response["num_output_tokens"].item())
        told["output_log_probs"] += response["output_log_probs"].reshape(-1).tolist()
        told["cum_log_probs"] = float(response["cum_log_probs"].item())
        for name in ("finish_reason", "stop_reason", "num_input_tokens"):
            told[name] = response[name].item()
    return found


def without(texts: Texts, *names: str) -> Texts:
    return {
        index: {name: value for name, value in told.items() if name not in names}
        for index, told in texts.items()
    }


@pytest.mark.parametrize("num_requests", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_every_door_says_the_same(doors: Server, steps: list[dict[str, Any]], num_requests: int) -> None:
    num_compared_with_vllm = num_sequences = 0
    for number in range(num_requests):
        prompt, fields = draw(number)
        told = (number, fields)
        plain, streamed = (tensors(prompt, fields, stream) for stream in (False, True))
        expected = whole(ask(doors.grpc, "ensemble", plain))
        assert len(expected) == fields.get("num_return_sequences", 1), told
        num_sequences += len(expected)
        others = {
            "ensemble streamed": ask(doors.grpc, "ensemble", streamed),
            "by steps": by_steps(doors, steps, streamed if number % 4 else plain),
            "text": ask(doors.grpc, "text", plain),
            "text streamed": ask(doors.grpc, "text", streamed),
        }
        numbers = ("output_log_probs", "cum_log_probs")
        for way, outcome in others.items():
            found = whole(outcome)
            assert without(found, *numbers) == without(expected, *numbers), (way, told)
            for index, each in found.items():
                for name in numbers:
                    assert each[name] == pytest.approx(expected[index][name], abs=1e-3), (way, name, told)
        # These have other defaults or no name there.
        if not {"embedding_bias", "end_id"} & fields.keys():
            num_compared_with_vllm += 1
            assert by_vllm(doors, prompt, fields) == without(expected, *numbers), told
    assert num_compared_with_vllm > num_requests / 5
    print(f"{num_sequences} sequences of {num_requests} requests, {num_compared_with_vllm} in vLLM's shape")
