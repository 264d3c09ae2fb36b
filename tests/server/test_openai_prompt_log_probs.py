"""What the OpenAI API says of a prompt's tokens: an echo's `logprobs`, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from helpers.openai_api import CHAT, COMPLETIONS, MODEL, post, refused, streamed, whole
from helpers.server import Leaving, Server, running
from helpers.tiny_repository import create_repository

TOLERANCE = 2e-3
END = "</s>"
SPECIAL = ("<s>", END, "<|im_start|>", "<|im_end|>")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "The quick brown fox",
    "Emoji 😀👨‍👩‍👧‍👦 are",
    "你好，世界",
    "e\u0301 a\u0308",
    "<s>The dog</s>\n  it's",
]


@pytest.fixture(scope="module")
def api(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("openai") / "repository"
    # Prompts are computed in several steps.
    create_repository(repository, tiny_dir, "--kv-cache-bytes", "64000000", "--max-num-batched-tokens", "64")
    with running(leaving, repository, "--openai-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def client(api: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=api.openai, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)


def ask(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    status, _, raw = post(server, path, {"model": MODEL, **fields})
    assert status == 200, raw
    answer: dict[str, Any] = json.loads(raw)
    return answer


def chunks_of(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    status, _, raw = post(server, path, {"model": MODEL, "stream": True, **fields})
    assert status == 200, raw
    events = raw.decode().removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def ids_of(server: Server, text: str) -> list[int]:
    ids: list[int] = ask(server, "/tokenize", prompt=text)["tokens"]
    return ids


def table_of(reference: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids) − 1, vocabulary]: the log-probabilities after each id but the last."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits.log_softmax(1)[:-1]


class Evaluation:
    """Log-likelihoods as lm-eval's `local-completions` asks for them and reads them."""

    def __init__(self, client: openai.OpenAI, **fields: Any) -> None:
        self.client = client
        self.fields: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "seed": 1234,
            **fields,
        }

    def log_likelihoods(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        prompts = [context + continuation for context, continuation in pairs]
        answer = self.client.completions.create(model=MODEL, prompt=prompts, echo=True, **self.fields)
        found = []
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        for choice, (context, _) in zip(choices, pairs, strict=True):
            log_probs: Any = choice.logprobs
            # A token that was made after the prompt is left out.
            end = -1 if self.fields["max_tokens"] else None
            values = log_probs.token_logprobs[len(context) : end]
            tops = log_probs.top_logprobs[len(context) : end]
            is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
            found.append((sum(values), is_greedy))
        return found


def drawn_pairs(reference: Any) -> list[tuple[list[int], list[int]]]:
    """Contexts with random continuations, and with those that the model would choose."""
    draw = random.Random(1)
    pairs = []
    for length in (1, 2, 7, 30, 64, 65, 150):
        context = [draw.randrange(5, 300) for _ in range(length)]
        pairs.append((context, [draw.randrange(5, 300) for _ in range(1 + length % 5)]))
        chosen = list(context)
        for _ in range(3):
            with torch.inference_mode():
                chosen.append(int(reference(torch.tensor([chosen])).logits[0, -1].argmax()))
        pairs.append((context, chosen[length:]))
    return pairs


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 0},
        # The model ends the text at once: the answer has one token more than the prompt all the same.
        {"logit_bias": {"1": 1000}},
        {"max_tokens": 0, "logit_bias": {"1": 1000}},
    ],
    ids=["one token", "no token", "the end", "no token, the end"],
)
def test_log_likelihoods_are_those_of_transformers(
    client: openai.OpenAI, reference: Any, fields: dict[str, Any]
) -> None:
    pairs = drawn_pairs(reference)
    found = Evaluation(client, **fields).log_likelihoods(pairs)
    greedy = []
    for (value, is_greedy), (context, continuation) in zip(found, pairs, strict=True):
        table = table_of(reference, context + continuation)[len(context) - 1 :]
        own = table[range(len(continuation)), continuation]
        assert value == pytest.approx(float(own.sum()), abs=TOLERANCE)
        assert is_greedy == bool((table.argmax(1) == torch.tensor(continuation)).all())
        greedy.append(is_greedy)
    assert set(greedy) == {True, False}


@pytest.mark.parametrize("text", TEXTS)
def test_an_echo_is_described_from_its_first_token(api: Server, reference: Any, text: str) -> None:
    asked = {"prompt": text, "echo": True, "logprobs": 3, "max_tokens": 6, "return_token_ids": True, **GREEDY}
    (choice,) = ask(api, COMPLETIONS, **asked)["choices"]
    log_probs, ids = choice["logprobs"], ids_of(api, text)
    assert choice["prompt_token_ids"] == ids
    assert {len(each) for each in log_probs.values()} == {len(ids) + 6}
    assert (log_probs["token_logprobs"][0], log_probs["top_logprobs"][0]) == (None, None)
    table = table_of(reference, ids + choice["token_ids"])
    own = table[range(len(table)), (ids + choice["token_ids"])[1:]].tolist()
    assert log_probs["token_logprobs"][1:] == pytest.approx(own, abs=TOLERANCE)
    for tops, token, value, row in zip(
        *(log_probs[name][1:] for name in ("top_logprobs", "tokens", "token_logprobs")), table, strict=True
    ):
        assert tops[token] >= value
        assert max(tops.values()) == pytest.approx(float(row.max()), abs=TOLERANCE)
    assert choice["text"].startswith(text)
    for place, token in zip(log_probs["text_offset"], log_probs["tokens"], strict=True):
        if "\ufffd" not in token and token not in SPECIAL:
            assert choice["text"].startswith(token, place)
    assert log_probs["text_offset"] == sorted(log_probs["text_offset"])


def test_tokens_as_ids_do_not_move_the_offsets(api: Server) -> None:
    asked = {"prompt": "The quick brown fox", "echo": True, "logprobs": 1, "max_tokens": 6, **GREEDY}
    plain = ask(api, COMPLETIONS, **asked)["choices"][0]["logprobs"]
    by_id = ask(api, COMPLETIONS, return_tokens_as_token_ids=True, **asked)["choices"][0]["logprobs"]
    assert by_id["text_offset"] == plain["text_offset"]
    assert by_id["tokens"][0].startswith("token_id:")


def test_without_an_echo_only_new_tokens_are_described(api: Server) -> None:
    asked = {"prompt": "The quick brown fox", "logprobs": 1, "max_tokens": 6, **GREEDY}
    (choice,) = ask(api, COMPLETIONS, **asked)["choices"]
    (echoed,) = ask(api, COMPLETIONS, echo=True, **asked)["choices"]
    assert choice["logprobs"]["tokens"] == echoed["logprobs"]["tokens"][-6:]
    assert choice["logprobs"]["text_offset"][0] == 0


def test_the_id_that_ends_an_echoed_text_is_its_last_token(api: Server) -> None:
    asked = {"prompt": "Hello", "logprobs": 1, "max_tokens": 6, "logit_bias": {"1": 1000}, "temperature": 0}
    (choice,) = ask(api, COMPLETIONS, echo=True, **asked)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")
    assert choice["logprobs"]["tokens"][-1] == END
    assert choice["logprobs"]["text_offset"][-1] == len("Hello")
    assert ask(api, COMPLETIONS, **asked)["choices"][0]["logprobs"]["tokens"] == []


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the chunks of each choice of a completion add up to."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            made = found.setdefault(choice["index"], {"text": "", "logprobs": {}, "listed": []})
            made["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                made["logprobs"].setdefault(name, []).extend(values)
            if "prompt_logprobs" in choice:
                made["listed"].append(choice["prompt_logprobs"])
    return found


@pytest.mark.parametrize("max_tokens", [0, 8])
@pytest.mark.parametrize(
    "asks", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}, {}], ids=["echo", "", "both"]
)
def test_a_stream_says_the_same(api: Server, max_tokens: int, asks: dict[str, Any]) -> None:
    asks = asks or {"echo": True, "logprobs": 1, "prompt_logprobs": 3}
    asked = {"prompt": TEXTS, "n": 2, "max_tokens": max_tokens, "seed": 3, **asks}
    expected = ask(api, COMPLETIONS, **asked)["choices"]
    found = joined(chunks_of(api, COMPLETIONS, **asked))
    assert len(expected) == 2 * len(TEXTS)
    for choice in expected:
        made = found[choice["index"]]
        assert made["text"] == choice["text"]
        expected_log_probs = choice["logprobs"] or {}
        assert set(made["logprobs"]) == set(expected_log_probs)
        for name in ("tokens", "text_offset"):
            assert made["logprobs"].get(name) == expected_log_probs.get(name)
        numbers = [
            [value for value in each.get("token_logprobs", []) if value is not None]
            for each in (made["logprobs"], expected_log_probs)
        ]
        assert numbers[0] == pytest.approx(numbers[1], abs=TOLERANCE)
        listed = [choice["prompt_logprobs"]] if "prompt_logprobs" in choice else []
        assert [shape(each) for each in made["listed"]] == [shape(each) for each in listed]


def shape(listed: list[dict[str, Any] | None]) -> list[Any]:
    return [each and {key: each[key]["decoded_token"] for key in sorted(each)} for each in listed]


def test_listed_log_probs_of_a_prompt(api: Server, reference: Any) -> None:
    ids = ids_of(api, TEXTS[0])
    (choice,) = ask(api, COMPLETIONS, prompt=ids, prompt_logprobs=2, max_tokens=1)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for each, row, token_id in zip(others, table_of(reference, ids), ids[1:], strict=True):
        best = row.topk(2).indices.tolist()
        assert list(each) == [str(n) for n in dict.fromkeys([token_id, *best])]
        for key, entry in each.items():
            assert entry["logprob"] == pytest.approx(float(row[int(key)]), abs=TOLERANCE)
            assert entry["rank"] == int((row > row[int(key)]).sum()) + 1
            assert set(entry) == {"logprob", "rank", "decoded_token"}
    alone = ask(api, COMPLETIONS, prompt=ids, prompt_logprobs=0, max_tokens=1)["choices"][0]
    assert [list(each) for each in alone["prompt_logprobs"][1:]] == [[str(n)] for n in ids[1:]]
    assert "prompt_logprobs" not in ask(api, COMPLETIONS, prompt=ids, max_tokens=1)["choices"][0]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_chats_list_them_too(api: Server, client: openai.OpenAI, max_tokens: int) -> None:
    ids = ask(api, "/tokenize", messages=MESSAGES)["tokens"]
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": max_tokens, "n": 2, "prompt_logprobs": 1}
    answer = ask(api, CHAT, **asked)
    expected = ask(api, COMPLETIONS, prompt=ids, max_tokens=1, prompt_logprobs=1)["choices"][0]
    assert shape(answer["prompt_logprobs"]) == shape(expected["prompt_logprobs"])
    assert len(answer["prompt_logprobs"]) == len(ids)
    chunks = chunks_of(api, CHAT, **asked)
    (listed,) = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert shape(listed) == shape(expected["prompt_logprobs"])
    del asked["prompt_logprobs"]
    parsed = client.chat.completions.create(model=MODEL, extra_body={"prompt_logprobs": 1}, **asked)
    assert shape(parsed.prompt_logprobs) == shape(expected["prompt_logprobs"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_without_new_tokens(api: Server, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": MESSAGES}
    # The bias ends the text in its first token, and the stop string in any.
    asked = {**prompt, "prompt_logprobs": 0, "max_tokens": 0, "logit_bias": {"1": 1000}, "stop": ["e"]}
    for said in (whole(api, path, **asked), streamed(api, path, **asked)):
        assert (said.texts, said.token_ids, said.reasons) == ([""], [[]], ["length"])
        assert said.stop_reasons == [None]
        assert said.usage["completion_tokens"] == 0
        assert said.usage["total_tokens"] == said.usage["prompt_tokens"]


def test_a_truncated_prompt_is_echoed_as_it_was_computed(api: Server) -> None:
    asked = {"prompt": "one two three four", "truncate_prompt_tokens": 3, "max_tokens": 0}
    (choice,) = ask(api, COMPLETIONS, echo=True, logprobs=0, **asked)["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert "one two three four".endswith(choice["text"])


def test_a_cached_prompt_is_described_whole(api: Server) -> None:
    prompt = "A prompt of more than one block, which is cached. " * 4
    counts = []
    for asks in ({}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {}):
        answer = ask(api, COMPLETIONS, prompt=prompt, max_tokens=1, **asks)
        counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        for choice in answer["choices"]:
            described = choice.get("prompt_logprobs") or (choice["logprobs"] or {}).get("token_logprobs")
            assert not asks or None not in described[1:]
    assert counts[0] == counts[1] == counts[2] == 0 < counts[3]


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "too many": ({"prompt_logprobs": 21}, "prompt_logprobs"),
    "no number": ({"prompt_logprobs": True}, "prompt_logprobs"),
    "a text": ({"prompt_logprobs": "1"}, "prompt_logprobs"),
    "negative with an echo": ({"prompt_logprobs": -2, "echo": True, "logprobs": 2}, "prompt_logprobs"),
    "too many of an echo": ({"echo": True, "logprobs": 21, "prompt_logprobs": 1}, "logprobs"),
    "negative of an echo": ({"echo": True, "logprobs": -1}, "logprobs"),
    "no token": ({"max_tokens": 0}, "max_tokens"),
    "no token, no echo": ({"max_tokens": 0, "echo": False, "logprobs": 1}, "max_tokens"),
    "a huge answer": ({"prompt_logprobs": 20, "n": 16, "prompt": [7] * 5000}, "prompt_logprobs"),
    "a huge echo": ({"echo": True, "logprobs": 20, "prompt": [[7] * 5000] * 16}, "logprobs"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(api: Server, case: str) -> None:
    fields, param = REFUSALS[case]
    status, error = refused(api, COMPLETIONS, {"model": MODEL, "prompt": "Hello", **fields})
    assert (status, error["param"]) == (400, param), error
    assert error["message"].startswith(param)


def test_chats_without_new_tokens_are_refused_unless_the_prompt_is_described(api: Server) -> None:
    body = {"model": MODEL, "messages": MESSAGES}
    for name in ("max_tokens", "max_completion_tokens"):
        assert refused(api, CHAT, {**body, name: 0})[1]["param"] == name


def test_a_deadline_in_the_prompt_leaves_nothing_to_say(api: Server) -> None:
    """Whether the prompt is computed in time is open; either way the answer has one entry for each token."""
    prompt = [5 + n % 200 for n in range(3000)]
    asked = {"prompt": prompt, "timeout_s": 0.05, "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2}
    status, _, raw = post(api, COMPLETIONS, {"model": MODEL, **asked})
    if status == 200:
        for choice in json.loads(raw)["choices"]:
            assert len(choice["logprobs"]["tokens"]) in (3000, 3001)
    else:
        assert status == 503, raw
