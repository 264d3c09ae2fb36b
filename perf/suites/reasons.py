"""Why tests of a suite fail, or are not run, although nothing is wrong here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some tests do not apply.

    Attributes:
        why: one sentence.
        tests: a regular expression that is found in the ids of the tests.
        says: one that is found in their failure, so that another failure is not explained;
            None: they are not run.
    """

    why: str
    tests: str
    says: str | None

    def explains(self, test: str, text: str) -> bool:
        """Whether it is why a test has failed with this text."""
        if self.says is None or not re.search(self.tests, test):
            return False
        return re.search(self.says, text, re.DOTALL) is not None

    def keeps_back(self, test: str) -> bool:
        """Whether it is why a test is not run."""
        return self.says is None and re.search(self.tests, test) is not None


_TRITON = (
    # Not run.
    Reason(
        "they need a model that Triton's frontend scripts, and a limit of its parser",
        r"::TestStreamingToolParseLimit",
        None,
    ),
    Reason("not served: adapters", r"/test_lora\.py", None),
    Reason("not served: embeddings", r"/test_embeddings\.py", None),
    Reason(
        "models are loaded and unloaded through Triton's own ports, not the OpenAI API",
        r"/test_model_management\.py",
        None,
    ),
    Reason(
        "keys say who may call what, not headers for groups of routes",
        r"/test_openai_restricted_apis\.py",
        None,
    ),
    Reason(
        "the tokenizer is the checkpoint's, so there is no other and none without a chat template",
        r"::TestChatCompletionsTokenizers",
        None,
    ),
    Reason("they test classes of Triton's frontend", r"::TestContentLengthValidation", None),
    # Served here.
    Reason("served here, refused there: `logit_bias`", r"\[logit_bias", r"assert 200 == 400"),
    Reason("served here, refused there: several choices", r"_multiple_choices", r"assert 200 == 400"),
    Reason(
        "served here, refused there: temperatures above 2, penalties beyond ±2",
        r"invalid_sampling_parameters\[(temperature-2.1|frequency_|presence_)",
        r"assert 200 == 422",
    ),
    Reason(
        "served here, refused there: more than 5 best tokens of a completion",
        r"::test_completion(s_logprobs_validation|_logprobs_exceeds_max)",
        r"assert 200 == 422|DID NOT RAISE",
    ),
    # Differs on purpose.
    Reason(
        "the status of a wrong request is 400, as OpenAI's, not 422",
        r"",
        r"assert 400 == 422|openai\.BadRequestError: Error code: 400 - top_logprobs = 25",
    ),
    Reason("the body of an error is OpenAI's, not FastAPI's", r"", r"KeyError: 'detail'"),
    Reason(
        "the words of an error",
        r"::test_(stream_options_without_streaming|top_logprobs_requires_logprobs)",
        r"assert '.* can only be used when .* in 'Error code: 400 - (stream_options|top_logprobs): expected",
    ),
    Reason(
        "`logprobs` 0 asks a completion for the tokens' own log-probabilities, as OpenAI's does",
        r"::test_completions_logprobs_zero",
        r"'token_logprobs'",
    ),
    Reason(
        "an answer that was cut ends with `length`, not `stop`",
        r"::test_openai_client_(chat_)?completion$",
        r"'length' == 'stop'",
    ),
    Reason("models are owned by `naiad`", r"::test_models_get", r"'naiad' == 'Triton Inference Server'"),
    Reason("one model is served, not the two of a repository", r"::test_models_list", r"assert 1 == 2"),
    Reason(
        "a body without `Content-Type: application/json` is refused before it is read",
        r"/test_request_size\.py",
        r"assert 415 == 413",
    ),
    Reason(
        "Triton's own metrics are at Triton's port",
        r"::test_startup_metrics",
        r"404 == 200|nv_cpu_utilization",
    ),
    Reason(
        "an answer that calls a named function ends with `tool_calls`, too",
        r"::test_tool_call_with_named_tool_choice",
        r"'tool_calls' != 'tool_calls'",
    ),
    # The model is another one.
    Reason(
        "the small model calls no tool unless it has to, and then as many as it likes",
        r"::test_tool_call_(and_choice|with_required_tool_choice)",
        r"assert None is not None|assert \d == 1\nE    \+  where \d = len",
    ),
    Reason("the one token that is drawn at random may be a blank", r"_max_tokens", r"len\(\[\]\)"),
)
_VLLM = (
    # Not run.
    Reason(
        "they test vLLM's own classes",
        r"/test_(message_assembly|stream_processor|serving_chat|lora_resolvers)\.py",
        None,
    ),
    Reason(
        "a route of vLLM's own, `/v1/chat/completions/batch`", r"/test_batched_chat_completions\.py", None
    ),
    Reason("not served: a budget for reasoning", r"/test_thinking_token_budget\.py", None),
    Reason("not served: a watermark in the choice of tokens", r"\[watermarked-", None),
    Reason("not served: embeddings in the place of tokens", r"_with_prompt_embeds\.py", None),
    Reason("not served: images, and fields of a message's parts", r"/test_extra_content_fields\.py", None),
    Reason("not served: checkpoints of Tensorizer", r"/test_tensorizer_entrypoint\.py", None),
    # Not served.
    Reason("not served: adapters", r"zephyr-lora", r"`zephyr-lora` does not exist"),
    Reason(
        "not served: log-probabilities of chosen tokens",
        r"::test_logprob_token_ids",
        r"logprob_token_ids = .* is not supported",
    ),
    Reason(
        "not served: token ids from another server",
        r"::test_kv_transfer_prompt_token_ids",
        r"kv_transfer_params = .* is not supported",
    ),
    Reason(
        "not served: an echo of the last message of a chat",
        r"::test_chat_session_with_echo",
        r"echo = True is not supported",
    ),
    Reason(
        "not served: beams, which `ensemble` and `text` have",
        r"::test_batch_completions",
        r"use_beam_search = True is not supported",
    ),
    Reason(
        "not served: times in the answer, which are metrics",
        r"::test_per_request_metrics",
        r"isinstance\(None",
    ),
    Reason(
        "a server that adds the usage to every stream",
        r"/test_enable_force_include_usage\.py",
        r"no attribute 'prompt_tokens'",
    ),
    Reason(
        "a key in a variable of vLLM's; here keys are in a file",
        r"/test_root_path\.py",
        r"DID NOT RAISE AuthenticationError",
    ),
    Reason("a route of SageMaker's, `/invocations`", r"::test_invocations", r"404 Client Error"),
    Reason(
        "a prefix of the routes, which a proxy in front can remove", r"/test_root_path\.py", r"no such route"
    ),
    # Differs on purpose.
    Reason(
        "the reason why a choice ends comes alone, in its last chunk",
        r"::test_chat_(streaming|completion_stream_options)",
        r"delta\.content\s.*assert None|\d+ == 0 or \d+ > \d+",
    ),
    Reason(
        "`prompt_logprobs` is there if it has been asked for",
        r"-None\]|::test_single_completion",
        r"object has no attribute 'prompt_logprobs'",
    ),
    Reason(
        "at most 20 best tokens, not the whole vocabulary",
        r"/test_chat_echo\.py::test_(top|prompt)_logprobs",
        r"(top_logprobs|prompt_logprobs) = -1: expected",
    ),
    Reason(
        "a field of a message that no chat template reads is refused by name",
        r"::test_extra_fields_allowed",
        r"extra_field = '0' is not supported",
    ),
    Reason("every whole number is a seed", r"::test_long_seed", r"DID NOT RAISE"),
    Reason(
        "the words of an error",
        r"/test_prompt_validation\.py",
        r"Actual message: 'Error code: 400 - prompt(_embeds)? ",
    ),
    # The model is another one.
    Reason(
        "the small model goes on writing until it is cut off, so its JSON is not complete",
        r"::test_(structured_outputs_json|response_format|named_tool_use)",
        r"json\.decoder\.JSONDecodeError: (Unterminated|Expecting)",
    ),
    Reason(
        "the small model writes another object that the format allows",
        r"::test_response_format_json_(object|schema)",
        # The schema says of one property that it is an integer, and asks for none.
        r"\nE   assert \{(?![^\n]*'result': (?!-?\d+[,}])[^\n]*==)[^\n]*\} == \{'result': 2\}",
    ),
    Reason(
        "the text or the number of tokens of the tests' own model",
        r"::test_(single_chat_session|complex_message_content|more_than_one|chat_session_(with_echo|root_path))",
        r"CompletionUsa|== '2'|'length' == 'stop'|assert [23] == [12]",
    ),
    Reason(
        "a reasoning model",
        r"/test_include_reasoning\.py|::test_function_tool_use\[plain-True",
        r"Expected reasoning|reasoning_tokens|no attribute 'reasoning'|len\(reasoning\) > 0",
    ),
    Reason(
        "the small model calls no tool unless it has to",
        r"::test_function_tool_use\[plain-\w+-auto",
        r"len\(output\) > 0|assert None is not None",
    ),
)
REASONS: dict[str, tuple[Reason, ...]] = {"triton": _TRITON, "vllm": _VLLM}


def reason_of(reasons: Sequence[Reason], test: str, text: str) -> Reason | None:
    """The first reason why a test has failed with this text; None: there is none."""
    return next((reason for reason in reasons if reason.explains(test, text)), None)
