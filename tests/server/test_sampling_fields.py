"""What may be asked of sampling and seen of it, through the real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from helpers.raw_grpc import Outcome, Stream, ask, chunks, llm_inputs, text_inputs
from helpers.server import Server, eventually
from naiad.tokenization import pack_word_list

VOCABULARY = 49152
PROMPT = "The capital of France is"
RANDOM = {"temperature": 0.9, "top_p": 1.0, "seed": np.array([[3]], dtype=np.uint64)}


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(default_model_dir)


@pytest.fixture(scope="module")
def prompt_ids(tokenizer: AutoTokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(PROMPT)
    return ids


@pytest.fixture(scope="module")
def greedy_ids(server: Server, prompt_ids: list[int]) -> list[int]:
    return ask(server.grpc, "llm", llm_inputs(prompt_ids, 8)).token_ids


def text(server: Server, **fields: Any) -> str:
    outcome = ask(server.grpc, "ensemble", text_inputs(PROMPT, 8) | fields)
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    return outcome.text


def generate(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"text_input": PROMPT, "max_tokens": 8, "exclude_input_in_output": True, **fields}
    status, answer = server.post("/v2/models/ensemble/generate", body)
    assert status == 200, answer
    decoded: dict[str, Any] = json.loads(answer)
    return decoded


def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    body = {"text_input": PROMPT, "max_tokens": 8, "exclude_input_in_output": True, **fields}
    status, answer = server.post("/v2/models/ensemble/generate_stream", body)
    assert status == 200, answer
    return [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]


def num_active(server: Server) -> float:
    return server.metric("nv_trt_llm_request_metrics", request_type="active")


def joined(outcome: Outcome, name: str, axis: int) -> Any:
    return np.concatenate(list(chunks(outcome, name)), axis=axis)


def test_min_p_of_one_leaves_the_best_token(server: Server) -> None:
    hot = {"temperature": 5.0, "top_p": 1.0, "seed": np.array([[1]], dtype=np.uint64)}
    assert text(server, **hot) != text(server)
    assert text(server, **hot, min_p=1.0) == text(server)
    assert generate(server, temperature=5.0, min_p=1.0)["text_output"] == text(server)


def test_min_p_as_a_parameter(server: Server) -> None:
    outcome = ask(server.grpc, "ensemble", text_inputs(PROMPT, 8, temperature=5.0), parameters={"min_p": 1.0})
    assert outcome.text == text(server)


def test_a_bad_word_is_not_written(server: Server, tokenizer: AutoTokenizer) -> None:
    word = text(server).split()[0]
    assert text(server).startswith(" " + word)
    without = text(server, bad_words=[word, ""])
    assert tokenizer.encode(" " + word)[-1] not in tokenizer.encode(without)
    assert without != text(server)
    assert generate(server, bad_words=[word])["text_output"] == without
    assert generate(server, bad_words=word)["text_output"] == without


def test_a_packed_bad_word_is_not_written(
    server: Server, prompt_ids: list[int], greedy_ids: list[int]
) -> None:
    pair = pack_word_list([greedy_ids[1:3]])[None]
    ids = ask(server.grpc, "llm", llm_inputs(prompt_ids, 8, bad_words_list=pair)).token_ids
    assert ids[:2] == greedy_ids[:2]
    assert greedy_ids[1:3] not in [ids[place : place + 2] for place in range(len(ids))]


def test_biased_words_are_written_instead(server: Server) -> None:
    bias = {"embedding_bias_words": [" dog"], "embedding_bias_weights": [100.0], "max_tokens": 3}
    assert text(server, **bias) == " dog dog dog"
    assert generate(server, **bias)["text_output"] == " dog dog dog"
    assert text(server, embedding_bias_words=[" dog"], embedding_bias_weights=[0.0]) == text(server)


def test_biases_of_ids_and_of_the_vocabulary_are_one(server: Server, prompt_ids: list[int]) -> None:
    pairs = {"logit_bias_ids": [77, 77], "logit_bias_values": [60.0, 40.0]}
    dense = np.zeros((1, VOCABULARY), dtype=np.float32)
    dense[0, 77] = 100.0
    for bias in (pairs, {"embedding_bias": dense}):
        assert ask(server.grpc, "llm", llm_inputs(prompt_ids, 3, **bias)).token_ids == [77] * 3
    assert (
        ask(server.grpc, "llm", llm_inputs(prompt_ids, 3, **pairs, embedding_bias=-dense)).token_ids
        != [77] * 3
    )


def test_only_allowed_ids_are_written(server: Server, prompt_ids: list[int]) -> None:
    allowed = {"allowed_token_ids": [55, 66, 77], "temperature": 5.0, "runtime_top_p": 1.0}
    ids = ask(server.grpc, "llm", llm_inputs(prompt_ids, 40, **allowed)).token_ids
    assert len(ids) == 40
    assert set(ids) == {55, 66, 77}


def test_ids_that_end_a_text(server: Server, prompt_ids: list[int], greedy_ids: list[int]) -> None:
    inputs = llm_inputs(prompt_ids, 8, stop_token_ids=[greedy_ids[3]], return_finish_reason=True)
    outcome = ask(server.grpc, "llm", inputs)
    assert outcome.token_ids == greedy_ids[: greedy_ids.index(greedy_ids[3])]
    assert outcome.responses[-1]["stop_reason"].item() == str(greedy_ids[3]).encode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_may_be_part_of_the_text(server: Server, stream: bool) -> None:
    whole = text(server)
    stop = whole[4:9]
    end = whole.index(stop)
    cut = {"stop_words": [stop], "stream": stream}
    assert text(server, **cut) == whole[:end]
    assert text(server, **cut, include_stop_str_in_output=True) == whole[: end + len(stop)]
    answer = generate(server, stop_words=[stop], include_stop_str_in_output=True)
    assert answer["text_output"] == whole[: end + len(stop)]


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_log_probs_streamed_and_unstreamed(server: Server, prompt_ids: list[int], model: str) -> None:
    wishes = {"return_log_probs": True, "num_log_probs": 3}
    streamed_inputs = (
        llm_inputs(prompt_ids, 8, **wishes) if model == "llm" else text_inputs(PROMPT, 8, **wishes)
    )
    streamed = ask(server.grpc, model, streamed_inputs)
    stream_name = "streaming" if model == "llm" else "stream"
    (whole,) = ask(server.grpc, model, streamed_inputs | {stream_name: False}).responses
    own, best = whole["output_log_probs"], whole["top_log_probs"]
    assert (own.shape, best.shape, whole["top_log_prob_ids"].shape) == ((1, 1, 8), (1, 8, 3), (1, 8, 3))
    assert (own[0, 0] == best[0, :, 0]).all()  # greedy
    assert (np.diff(best, axis=2) <= 0).all()
    assert whole["cum_log_probs"].shape == (1, 1)
    assert whole["cum_log_probs"].item() == pytest.approx(own.sum(), abs=1e-4)
    for name, axis in (("output_log_probs", 2), ("top_log_probs", 1), ("top_log_prob_ids", 1)):
        np.testing.assert_allclose(joined(streamed, name, axis), whole[name], atol=1e-4)
    assert streamed.responses[-1]["cum_log_probs"].item() == pytest.approx(own.sum(), abs=1e-4)


def test_log_probs_over_http(server: Server) -> None:
    answer = generate(server, return_log_probs=True, num_log_probs=2)
    assert len(answer["output_log_probs"]) == 8
    assert len(answer["top_log_prob_ids"]) == len(answer["top_log_probs"]) == 16
    assert answer["top_log_probs"][::2] == answer["output_log_probs"]
    assert answer["cum_log_probs"] == pytest.approx(sum(answer["output_log_probs"]), abs=1e-4)


def test_log_probs_with_a_text_that_ends_by_itself(server: Server, greedy_ids: list[int]) -> None:
    """The last response has no tokens; its details are empty."""
    outcome = ask(
        server.grpc,
        "ensemble",
        text_inputs(PROMPT, 8, stop_token_ids=[greedy_ids[3]], return_log_probs=True, num_log_probs=1),
    )
    num_tokens = greedy_ids.index(greedy_ids[3])
    assert outcome.num_finals == 1
    assert joined(outcome, "output_log_probs", 2).shape == (1, 1, num_tokens)
    assert joined(outcome, "top_log_probs", 1).shape == (1, num_tokens, 1)


def test_logits_of_prompt_and_output(server: Server, prompt_ids: list[int], greedy_ids: list[int]) -> None:
    wishes = {"return_context_logits": True, "return_generation_logits": True, "return_log_probs": True}
    for model, inputs in (
        ("llm", llm_inputs(prompt_ids, 8, **wishes)),
        ("ensemble", text_inputs(PROMPT, 8, **wishes)),
    ):
        outcome = ask(server.grpc, model, inputs)
        (context,) = chunks(outcome, "context_logits")
        assert context.shape == (1, len(prompt_ids), VOCABULARY)
        generated = joined(outcome, "generation_logits", 2)
        assert generated.shape == (1, 1, 8, VOCABULARY)
        assert generated[0, 0].argmax(axis=1).tolist() == greedy_ids
        np.testing.assert_allclose(context[0, -1], generated[0, 0, 0], atol=1e-3)
        rows = generated[0, 0].astype(np.float64)
        log_sums = np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)) + rows.max(axis=1)
        expected = rows[range(8), greedy_ids] - log_sums
        np.testing.assert_allclose(joined(outcome, "output_log_probs", 2)[0, 0], expected, atol=1e-3)


def test_logits_over_http(server: Server, prompt_ids: list[int]) -> None:
    answer = generate(server, max_tokens=1, return_context_logits=True, return_generation_logits=True)
    assert len(answer["context_logits"]) == len(prompt_ids) * VOCABULARY
    assert len(answer["generation_logits"]) == VOCABULARY


def test_prompts_are_shared_within_a_salt_only(server: Server) -> None:
    prompt = "Once upon a time there was a fox. " * 20

    def num_cached(salt: str) -> int:
        inputs = text_inputs(prompt, 2, cache_salt=salt, return_num_cached_tokens=True)
        outcome = ask(server.grpc, "ensemble", inputs)
        assert outcome.errors == []
        return max(int(each.item()) for each in chunks(outcome, "num_cached_tokens"))

    assert num_cached("salt of one") == 0
    assert num_cached("salt of another") == 0
    assert num_cached("salt of one") > 0
    answer = generate(server, text_input=prompt, cache_salt="salt of one", return_num_cached_tokens=True)
    assert answer["num_cached_tokens"] > 0


def test_priority_changes_no_text(server: Server) -> None:
    assert text(server, priority=-100) == text(server, priority=100) == text(server)
    assert generate(server, priority=100)["text_output"] == text(server)


@pytest.mark.parametrize("stream", [True, False])
def test_sequences_of_one_prompt(server: Server, stream: bool) -> None:
    wishes = {"return_num_output_tokens": True, "return_finish_reason": True, "stream": stream}
    inputs = text_inputs(PROMPT, 8, **RANDOM) | {"num_return_sequences": 4, "ignore_eos": True, **wishes}
    outcome = ask(server.grpc, "ensemble", inputs)
    texts, counts = [b""] * 4, [0] * 4
    for response in outcome.responses:
        place = response["sequence_index"].item()
        texts[place] += response["text_output"].reshape(-1)[0]
        counts[place] += response["num_output_tokens"].item()
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert counts == [8] * 4
    assert len(set(texts)) == 4
    assert texts[0].decode() == text(server, **RANDOM, ignore_eos=True)
    if not stream:
        assert len(outcome.responses) == 4


def test_sequences_of_several_prompts(server: Server, prompt_ids: list[int]) -> None:
    inputs = llm_inputs(prompt_ids, 4, num_return_sequences=2, streaming=False)
    doubled = {
        name: np.repeat(np.array([value if isinstance(value, list) else [value]]), 2, axis=0)
        for name, value in inputs.items()
    }
    doubled = {
        name: value.astype(np.int32) if value.dtype == np.int64 else value for name, value in doubled.items()
    }
    outcome = ask(server.grpc, "llm", doubled)
    places = [(r["batch_index"].item(), r["sequence_index"].item()) for r in outcome.responses]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert outcome.num_finals == 1


def test_sequences_over_http(server: Server) -> None:
    answers = events(server, num_return_sequences=3, temperature=0.9, top_p=1.0, seed=5, stream=False)
    assert sorted(answer["sequence_index"] for answer in answers) == [0, 1, 2]
    streamed = events(server, num_return_sequences=3, temperature=0.9, top_p=1.0, seed=5, stream=True)
    texts = ["", "", ""]
    for piece in streamed:
        texts[piece["sequence_index"]] += piece["text_output"]
    assert texts == [a["text_output"] for a in sorted(answers, key=lambda a: int(a["sequence_index"]))]


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_a_cancel_ends_all_sequences(server: Server, prompt_ids: list[int], model: str) -> None:
    more = {"num_return_sequences": 4, "ignore_eos": True}
    inputs = llm_inputs(prompt_ids, 1500, **more) if model == "llm" else text_inputs(PROMPT, 1500, **more)
    stream = Stream(server.grpc, model, inputs)
    assert stream.got_response.wait(60)
    eventually(lambda: num_active(server) == 4)
    stream.cancel()
    eventually(lambda: num_active(server) == 0)
    eventually(lambda: server.used_blocks() == 0)
    stream.join()


def test_stop_ends_all_sequences_with_one_final(server: Server, prompt_ids: list[int]) -> None:
    more = {"num_return_sequences": 4, "ignore_eos": True, "return_finish_reason": True}
    stream = Stream(server.grpc, "ensemble", text_inputs(PROMPT, 1500, **more), request_id="siblings")
    assert stream.got_response.wait(60)
    ask(server.grpc, "llm", llm_inputs(prompt_ids, 1, stop=True), request_id="siblings")
    outcome = stream.join()
    ends = {
        response["sequence_index"].item(): response["finish_reason"].item()
        for response in outcome.responses
        if response["finish_reason"].item()
    }
    assert ends == dict.fromkeys(range(4), b"cancelled")
    assert (outcome.errors, outcome.num_finals) == ([], 1)
