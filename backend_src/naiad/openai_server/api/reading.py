"""Turns the bodies of completions and chats into the engine's typed request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from naiad.errors import InvalidRequestError
from naiad.frontend.field import INT32_MAX, FieldError, Frontend, Kind, shown
from naiad.frontend.fields import FIELD, fields_at
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import EncodedPrompt, PromptEncoder
from naiad.frontend.request import GenerateRequest, build_request
from naiad.openai_server.api.bodies import ChatBody, CompletionBody, GenerationBody, Prompt, TokenizeBody
from naiad.openai_server.api.chat_prompt import ChatPrompt, read_chat_prompt
from naiad.openai_server.api.constraints.constraint import Constraint
from naiad.openai_server.api.constraints.formats import read_format
from naiad.openai_server.api.errors import APIError, api_error_of, too_long
from naiad.openai_server.api.parsing.call_finder import CallRules
from naiad.openai_server.api.parsing.output_parser import OutputGrammar, OutputParser, Section
from naiad.openai_server.api.refusals import Refusal, refuse
from naiad.sequence import GrammarSpec
from naiad.tokenization import PLAIN_CHAT, ChatOptions, decode
from naiad.tracing.request_trace import RequestTrace
from naiad.tracing.trace_context import NO_TRACE, TraceContext

_FIELDS = fields_at(Frontend.OPENAI)
_KEY_OF = {field.name: key for key, field in _FIELDS.items()}
_KEY_OF |= {
    "text_input": "prompt",
    "input_ids": "prompt",
    "messages": "messages",
    "num_log_probs": "logprobs",
}
_KEY_OF |= {"logit_bias_ids": "logit_bias", "logit_bias_values": "logit_bias"}
# Fields of the body that `_row` leaves to others.
_READ_APART = ("max_tokens", "logit_bias", "prompt_logprobs")
_SEED_MASK = 2**64 - 1
# OpenAI's defaults.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 1024
# Of one request, each choice of a prompt counted; as JSON they have about 60 bytes each.
_MAX_PROMPT_LOG_PROBS = 1_000_000
# In one answer, each choice of a prompt counted.
_MAX_ECHOED_CHARS = 32 * 1024 * 1024
_CHARS_OF_ID = 8
# In the lists of one request, each prompt counted: the engine gets them with every prompt.
_MAX_REPEATED_IDS = 4_000_000
# Tokens at the end of a prompt that say whether the model has begun to reason.
_NUM_LAST_IDS = 16
_SIDES = ("left", "right")
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")
# Of a list of what is wrong.
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """A request as a server gets it that takes text.

    Attributes:
        fields: the fields of every prompt, by the names of `FIELD`.
        prompts: for each prompt the one field that says it, text or messages, if the server reads it as this
            request does without being told how; None: only the ids of the request's row say it.
        prompt_name: the name of the prompts in errors.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[Mapping[str, str] | None, ...] = ()
    prompt_name: str = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedGeneration:
    """A request as the engine gets it, and what the answer needs to know of the body.

    Attributes:
        request: the request; its rows are the prompts.
        echoes: the text of each prompt, with which its choices begin; empty: none is echoed.
        num_log_probs: best tokens reported at each position; None: no log-probabilities.
        drops_tokens: the client asked for no new token; the engine makes one, which is not sent.
        grammar: how outputs are taken apart; None: they are not.
        begins_in: the section in which they begin.
        calls: which calls of tools are looked for; None: none.
        text_form: the same request for a server that takes text.
        context: the trace that it belongs to, for whoever works for it.
        trace: follows it here; None: it is not traced.
    """

    request: GenerateRequest
    echoes: tuple[str, ...] = ()
    num_log_probs: int | None = None
    drops_tokens: bool = False
    grammar: OutputGrammar | None = None
    begins_in: Section = Section.OPEN
    calls: CallRules | None = None
    text_form: TextForm = TextForm()
    context: TraceContext = NO_TRACE
    trace: RequestTrace | None = None

    @property
    def reasons(self) -> bool:
        """Whether the model may reason before it answers."""
        return self.grammar is not None and self.grammar.reasoning is not None

    def parsers(self) -> list[OutputParser]:
        """A parser for each sequence; none if outputs are not taken apart."""
        if self.grammar is None or not (self.reasons or self.calls):
            return []
        return [
            OutputParser(self.grammar, self.begins_in, self.calls) for _ in range(self.request.num_sequences)
        ]


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads the bodies of one model's requests.

    Attributes:
        encoder: turns its prompts into ids.
        limits: its limits.
        grammar: how it writes the answers to chats.
        refusals: fields that are not served.
    """

    encoder: PromptEncoder
    limits: ModelLimits
    grammar: OutputGrammar = field(default_factory=OutputGrammar)
    refusals: tuple[Refusal, ...] = ()

    def completion(self, body: CompletionBody, request_id: str) -> AskedGeneration:
        """Read the body of a completion.

        Raises:
            APIError: the body is not valid.
        """
        refuse(body, self.refusals, {})
        _check_best_of(body)
        row = _row(body)
        row["max_tokens"] = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        drops_tokens = body.max_tokens == 0 and (bool(body.echo) or body.prompt_logprobs is not None)
        if drops_tokens:
            row = _without_output(row)
        row |= _log_probs(body.logprobs) | _prompt_log_probs(body, body.logprobs if body.echo else None)
        prompts = list(_prompts(body.prompt))
        _check_num_repeated_ids(body, len(prompts))
        encoded = self._encode_all(prompts, row, body)
        form = read_format(body.response_format, body.structured_outputs)
        request = self._build(row, encoded, body, request_id, form)
        echoes = self._echoes(prompts, encoded, body) if body.echo else ()
        _check_num_echoed(request, echoes, returns_ids=bool(body.return_token_ids))
        return AskedGeneration(
            request=request,
            echoes=echoes,
            num_log_probs=body.logprobs,
            drops_tokens=drops_tokens,
            text_form=TextForm(
                fields=row,
                prompts=tuple(
                    each if "text_input" in each and _is_read_plainly(body) else None for each in prompts
                ),
            ),
        )

    def chat(
        self, body: ChatBody, request_id: str, names: Mapping[str, str] = MappingProxyType({})
    ) -> AskedGeneration:
        """Read the body of a chat.

        Args:
            body: the body.
            request_id: the engine's id of the request.
            names: field → its name in errors, if another API's body was turned into this one.

        Raises:
            APIError: the body is not valid.
        """
        refuse(body, self.refusals, names)
        row = _row(body)
        key = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = getattr(body, key)
        row["max_tokens"] = INT32_MAX if max_tokens is None else max_tokens
        drops_tokens = max_tokens == 0 and body.prompt_logprobs is not None
        if drops_tokens:
            row = _without_output(row)
        if body.top_logprobs is not None and not body.logprobs:
            raise APIError(400, "top_logprobs: expected logprobs = true with it.", param="top_logprobs")
        num_log_probs = (body.top_logprobs or 0) if body.logprobs else None
        row |= _log_probs(num_log_probs) | _prompt_log_probs(body, None)
        names = {**_KEY_OF, "max_tokens": key, "num_log_probs": "top_logprobs", **names}
        names = {name: names.get(client_name, client_name) for name, client_name in names.items()}
        chat = self.chat_prompt(body, body.messages)
        prompt = {"messages": json.dumps(chat.messages)}
        encoded = self._encode(prompt | row, body, chat.options, names["messages"], names)
        section = self._section(encoded, chat.messages[-1] if body.continue_final_message else None)
        form_name = names.get("response_format", "response_format")
        form = read_format(body.response_format, body.structured_outputs, form_name)
        spec = Constraint(self.grammar, chat.use, form).spec(section)
        is_plain = chat.options == PLAIN_CHAT and _is_read_plainly(body)
        return AskedGeneration(
            request=self._build(row, [encoded], body, request_id, spec, names),
            num_log_probs=num_log_probs,
            drops_tokens=drops_tokens,
            grammar=self.grammar,
            begins_in=section,
            calls=chat.call_rules(self.grammar),
            text_form=TextForm(
                fields=row, prompts=(prompt if is_plain else None,), prompt_name=names["messages"]
            ),
        )

    def num_chat_tokens(self, body: ChatBody, names: Mapping[str, str]) -> int:
        """Count the tokens of a chat's prompt, which may be longer than the window.

        Raises:
            APIError: the body is not valid.
        """
        try:
            return len(self.chat_token_ids(body, body.messages))
        except FieldError as error:
            raise api_error_of(error.named(names.get(error.field_name, error.field_name))) from None

    def chat_token_ids(self, body: ChatBody | TokenizeBody, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Encode the prompt of a chat, which may be longer than the window.

        Args:
            body: the body.
            messages: its messages.

        Raises:
            APIError: the body is not valid.
            InvalidRequestError: the chat template refuses the messages.
        """
        chat = self.chat_prompt(body, messages)
        written = self.encoder.check({"messages": json.dumps(chat.messages)})
        adds = body.add_special_tokens
        return self.encoder.token_ids(replace(written, chat=chat.options, add_special_tokens=adds))

    def chat_prompt(self, body: ChatBody | TokenizeBody, messages: Sequence[dict[str, Any]]) -> ChatPrompt:
        """Read the messages and the tools of a body; see `read_chat_prompt`."""
        return read_chat_prompt(body, messages, self.grammar, self.encoder.tokenizer)

    def _section(self, prompt: EncodedPrompt, continued: Mapping[str, str] | None) -> Section:
        """The section in which the output begins; `continued` is the message that it goes on with."""
        if continued is not None:
            return self.grammar.section_within(continued["content"])
        last_ids = prompt.token_ids[-_NUM_LAST_IDS:]
        return self.grammar.section_after(
            decode(self.encoder.tokenizer.table, last_ids, skip_special_tokens=False)
        )

    def _encode_all(
        self, prompts: list[dict[str, Any]], row: dict[str, Any], body: CompletionBody
    ) -> list[EncodedPrompt]:
        """Encode prompts. Their bad words are the same, and are encoded only with the first one."""
        first = self._encode(prompts[0] | row, body, PLAIN_CHAT, "prompt")
        plain = {name: value for name, value in row.items() if name != "bad_words"}
        others = [self._encode(prompt | plain, body, PLAIN_CHAT, "prompt") for prompt in prompts[1:]]
        return [first, *(replace(each, bad_words=first.bad_words) for each in others)]

    def _encode(
        self,
        sent: Mapping[str, Any],
        body: GenerationBody,
        chat: ChatOptions,
        param: str,
        names: Mapping[str, str] = _KEY_OF,
    ) -> EncodedPrompt:
        try:
            written = replace(
                self.encoder.check(sent),
                chat=chat,
                add_special_tokens=body.add_special_tokens,
                skip_special_tokens=body.skip_special_tokens,
            )
            ids = self.encoder.token_ids(written)
        except FieldError as error:
            raise api_error_of(error.named(names.get(error.field_name, error.field_name))) from None
        except InvalidRequestError as error:
            raise APIError(400, str(error), param=param) from None
        ids = self._truncated(ids, body, sent["max_tokens"])
        if len(ids) >= self.limits.max_model_len:
            raise too_long(len(ids), self.limits.max_model_len, param)
        return self.encoder.encode(replace(written, token_ids=ids))

    def _truncated(self, ids: list[int], body: GenerationBody, max_tokens: int) -> list[int]:
        """Keep `truncate_prompt_tokens` ids, the last if not said otherwise; −1: as many as leave room."""
        most, side = body.truncate_prompt_tokens, body.truncation_side
        if side not in (None, *_SIDES):
            message = f"truncation_side = {shown(side)}: expected {' or '.join(_SIDES)}."
            raise APIError(400, message, param="truncation_side")
        if most is None:
            return ids
        if most == -1:
            # An output that would fill the window takes what is left.
            room = max_tokens if max_tokens < self.limits.max_model_len else 1
            most = self.limits.max_model_len - room
        if not 1 <= most < self.limits.max_model_len:
            expected = f"expected -1, or 1 … {self.limits.max_model_len - 1}"
            message = f"truncate_prompt_tokens = {body.truncate_prompt_tokens}: {expected}."
            raise APIError(400, message, param="truncate_prompt_tokens")
        return ids[:most] if side == "right" else ids[-most:]

    def _build(
        self,
        row: dict[str, Any],
        prompts: list[EncodedPrompt],
        body: GenerationBody,
        request_id: str,
        grammar: GrammarSpec | None,
        names: Mapping[str, str] = _KEY_OF,
    ) -> GenerateRequest:
        row |= {"stream": bool(body.stream), "exclude_input_in_output": True}
        row["end_id"] = self.encoder.known_id(self.encoder.tokenizer.eos_id)
        timeout_us = 0 if body.timeout_s is None else max(1, round(body.timeout_s * 1e6))
        try:
            request = build_request(
                [row] * len(prompts),
                prompts,
                self.limits,
                request_id=request_id,
                timeout_us=timeout_us,
                grammars=[grammar] * len(prompts),
            )
        except FieldError as error:
            raise api_error_of(error.named(names.get(error.field_name, error.field_name))) from None
        _check_num_prompt_log_probs(
            request, "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        )
        return request

    def _echoes(
        self, prompts: list[dict[str, Any]], encoded: list[EncodedPrompt], body: CompletionBody
    ) -> tuple[str, ...]:
        """The text of each prompt as it was sent; that of ids is decoded, special tokens included."""
        table = self.encoder.tokenizer.table
        is_whole = body.truncate_prompt_tokens is None
        return tuple(
            prompt["text_input"]
            if is_whole and "text_input" in prompt
            else decode(table, each.token_ids, skip_special_tokens=False)
            for prompt, each in zip(prompts, encoded, strict=True)
        )


def _is_read_plainly(body: GenerationBody) -> bool:
    """Whether the prompt is tokenized as always, and not cut."""
    return body.truncate_prompt_tokens is None and body.add_special_tokens is None


def _check_num_repeated_ids(body: CompletionBody, num_prompts: int) -> None:
    """Refuse long lists with many prompts."""
    num_ids = len(body.allowed_token_ids or ()) + len(body.logit_bias or ())
    # A word is banned with a space before it and without one; each byte may be a token.
    num_ids += sum(2 * len(word.encode()) for word in body.bad_words or ())
    if num_prompts > 1 and num_prompts * num_ids > _MAX_REPEATED_IDS:
        message = (
            f"prompt has {num_prompts} prompts, and allowed_token_ids, logit_bias and bad_words make up to "
            f"{num_ids} token ids for each: at most {_MAX_REPEATED_IDS} are allowed in all."
        )
        raise APIError(400, message, param="prompt")


def _check_best_of(body: CompletionBody) -> None:
    num_choices = 1 if body.n is None else body.n
    if body.best_of not in (None, num_choices):
        message = f"best_of = {body.best_of} is not supported: expected no value, or n = {num_choices}."
        raise APIError(400, message, param="best_of", code="unsupported_value")


def _row(body: GenerationBody) -> dict[str, Any]:
    """The fields of the typed request that the body sets, with OpenAI's defaults."""
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "stream_options: expected stream = true with it.", param="stream_options")
    row: dict[str, Any] = dict(_DEFAULTS)
    for key, known in _FIELDS.items():
        value = getattr(body, key)
        if value is None or value in known.key_off or key in _READ_APART:
            continue
        if known.key_above is not None and not known.key_above < value <= known.maximum:
            message = f"{key} = {shown(value)}: expected a number > {known.key_above} and ≤ {known.maximum}."
            raise APIError(400, message, param=key)
        if not known.is_scalar:
            value = [value] if isinstance(value, str) else value
        elif known.kind is Kind.UINT64:
            value &= _SEED_MASK
        row[known.name] = value
    if body.logit_bias:
        row |= _biases(body.logit_bias)
    return row


def _biases(biases: Mapping[str, float]) -> dict[str, Any]:
    bad = [repr(key[:40]) for key in biases if not _TOKEN_ID.fullmatch(key)]
    if bad:
        keys = ", ".join([*bad[:_MAX_SHOWN], *(["…"] if len(bad) > _MAX_SHOWN else [])])
        raise APIError(400, f"logit_bias holds the keys {keys}: expected token ids.", param="logit_bias")
    return {"logit_bias_ids": [int(key) for key in biases], "logit_bias_values": list(biases.values())}


def _log_probs(num_log_probs: int | None) -> dict[str, Any]:
    return {} if num_log_probs is None else {"return_log_probs": True, "num_log_probs": num_log_probs}


def _without_output(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request whose new token is not sent: nothing but its length may end it."""
    kept = {name: value for name, value in row.items() if name not in ("stop_words", "stop_token_ids")}
    return kept | {"max_tokens": 1, "ignore_eos": True}


def _prompt_log_probs(body: GenerationBody, num_echoed: int | None) -> dict[str, Any]:
    """As many best tokens at each position of the prompt as are needed, for an echo or for themselves."""
    field = FIELD["num_prompt_log_probs"]
    asked = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    try:
        asked = [field.check(each) for each in asked]
    except FieldError as error:
        raise api_error_of(error.named("prompt_logprobs")) from None
    if num_echoed is not None:
        asked.append(num_echoed)
    return {field.name: max(asked)} if asked else {}


def _check_num_prompt_log_probs(request: GenerateRequest, param: str) -> None:
    outputs = request.outputs
    num_tokens = outputs.num_sequences * sum(len(row.prompt_token_ids) for row in request.rows)
    num_asked = (1 + outputs.num_prompt_log_probs) * num_tokens
    if num_asked > _MAX_PROMPT_LOG_PROBS:
        message = (
            f"{param} = {outputs.num_prompt_log_probs} asks for {num_asked} log-probabilities of the "
            f"prompts' {num_tokens} tokens, each choice counted: at most {_MAX_PROMPT_LOG_PROBS} are allowed."
        )
        raise APIError(400, message, param=param)


def _check_num_echoed(request: GenerateRequest, echoes: Sequence[str], *, returns_ids: bool) -> None:
    """Refuse prompts that would come back too often: each choice begins with its prompt."""
    width = request.outputs.num_sequences
    num_chars = sum(map(len, echoes))
    if returns_ids:
        num_chars += _CHARS_OF_ID * sum(len(row.prompt_token_ids) for row in request.rows)
    if width * num_chars > _MAX_ECHOED_CHARS:
        message = (
            f"n = {width}: the prompts would come back with {width * num_chars} characters, each choice "
            f"counted: at most {_MAX_ECHOED_CHARS} are allowed with echo and return_token_ids."
        )
        raise APIError(400, message, param="n")


def _prompts(prompt: Prompt) -> Iterator[dict[str, Any]]:
    """Yield each prompt as a field: text, or ids.

    Raises:
        APIError: the list is empty, too long, or mixes ids with prompts.
    """
    if isinstance(prompt, str):
        yield {"text_input": prompt}
        return
    if not prompt or (len(prompt) > _MAX_PROMPTS and not isinstance(prompt[0], int)):
        message = f"prompt has {len(prompt)} entries: expected 1 … {_MAX_PROMPTS} prompts."
        raise APIError(400, message, param="prompt")
    if all(isinstance(each, int) for each in prompt):
        yield {"input_ids": prompt}
        return
    for each in prompt:
        if isinstance(each, int):
            message = "prompt mixes token ids with prompts: expected a list of ids, or of prompts."
            raise APIError(400, message, param="prompt")
        if not each:
            raise APIError(400, "prompt holds an empty prompt: expected text or token ids.", param="prompt")
        yield {"text_input": each} if isinstance(each, str) else {"input_ids": each}
