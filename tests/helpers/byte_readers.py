"""Every reader of bytes that come from outside, as a function that takes any bytes.

Each function lets its reader read and keeps the refusals that the reader promises to itself. It raises
whatever else happens: another exception, or a result that depends on how the bytes were cut.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors.torch import save
from tritonclient.grpc import service_pb2

from helpers.called_tools import CASES, FAMILY, cut, heard, parser_for
from helpers.tiny_tokenizers import CHAT_TEMPLATE, byte_level_tokenizer, sentence_piece_tokenizer
from naiad.cli.replay.played import read_requests
from naiad.config import ModelConfig
from naiad.engine_process.protocol import (
    Abort,
    AddRequests,
    client_message_decoder,
    encode_frame,
    engine_message_decoder,
)
from naiad.errors import ConfigError, InvalidRequestError, ModelError
from naiad.frames import FrameBuffer
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import MessageReader, framed
from naiad.gate.grpc_head import MalformedError, read_grpc_head
from naiad.gate.grpc_messages import check_infer_request
from naiad.gate.grpc_methods import INFERENCE
from naiad.gate.grpc_status import GRPCRefusedError
from naiad.gate.header_blocks import BlockDecoder, begun, encode
from naiad.gate.json_body import checked_inference, checked_json
from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError
from naiad.gate.request_body import body_of
from naiad.gate.request_head import read_head
from naiad.gguf import GGUFFile
from naiad.gguf.model_keys import read_model_keys
from naiad.gguf.tokenizer import read_gguf_tokenizer
from naiad.grammar.json_schema import read_schema
from naiad.models.safetensors_files import SafetensorsFiles
from naiad.openai_server.api.bodies import ChatBody, CompletionBody, parse_body
from naiad.openai_server.api.errors import APIError
from naiad.recording.record import make_record, recorded_output
from naiad.sequence import EngineRequest, FinishReason, SamplingParams
from naiad.tokenization.chat_template import ChatTemplate, parse_messages
from naiad.tokenization.checkpoint_tokenizer import CheckpointTokenizer
from naiad.tokenization.token_table import TokenTable
from naiad.tokenization.word_list import pack_word_list, unpack_word_list
from naiad_client.errors import ServerError
from naiad_client.http_door import read_answers

_LIMITS = Limits(max_body_bytes=1 << 16, max_chunks=64, max_depth=16)
_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
_MOST_TEXT = 512
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": [1, 2],
    "tie_word_embeddings": True,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
}


@dataclass(frozen=True, slots=True)
class ByteReader:
    """A reader and what it usually reads.

    Attributes:
        read: takes any bytes; raises what the reader should not have raised.
        make_seeds: makes bytes from which a fuzzer begins.
    """

    read: Callable[[bytes], None]
    make_seeds: Callable[[], list[bytes]]


@cache
def _folder() -> Path:
    """A folder that goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="naiad-bytes-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _written(name: str, data: bytes) -> Path:
    path = _folder() / name
    # A file of before may still be mapped.
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def _json(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def _read_gguf(data: bytes) -> None:
    try:
        file = GGUFFile(_written("model.gguf", data))
    except ModelError:
        return
    for read in (read_model_keys, read_gguf_tokenizer):
        with contextlib.suppress(ModelError):
            read(file)
    for tensor in file.tensors.values():
        rows = np.frombuffer(file.data(tensor), np.uint8).reshape(-1, tensor.row_bytes)
        with np.errstate(all="ignore"):
            dequantize(rows, tensor.kind)


def _gguf_seeds() -> list[bytes]:
    path = _folder() / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ab"])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for kind in ("Q4_0", "Q8_0"):
        rows = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(kind, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [path.read_bytes()]


def _read_safetensors(data: bytes) -> None:
    _written("model.safetensors", data)
    try:
        files = SafetensorsFiles(_folder())
        for name in files.left():
            files.take(name)
    except ModelError:
        return
    files.close()


def _safetensors_seeds() -> list[bytes]:
    tensors = {"a.weight": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int8)}
    return [save(tensors, {"format": "pt"}), save({})]


def _read_config(data: bytes) -> None:
    _written("config.json", data)
    with contextlib.suppress(ModelError):
        ModelConfig.from_directory(_folder())


def _read_tokenizer(data: bytes) -> None:
    """The first byte says which of the files the others are."""
    name = ("tokenizer.json", "tokenizer_config.json")[data[:1] == b"c"]
    others = _tokenizer_files()
    for each, content in others.items():
        _written(each, data[1:] if each == name else content)
    with contextlib.suppress(ModelError, InvalidRequestError):
        table = TokenTable.from_checkpoint(CheckpointTokenizer.load(_folder()))
        for token_id in range(min(len(table), 64)):
            table.visible_bytes(token_id, skip_special_tokens=False)


@cache
def _tokenizer_files() -> dict[str, bytes]:
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT_TEMPLATE}
    return {
        "tokenizer.json": byte_level_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


def _tokenizer_seeds() -> list[bytes]:
    files = _tokenizer_files()
    return [
        b"t" + files["tokenizer.json"],
        b"t" + sentence_piece_tokenizer().to_str().encode(),
        b"c" + files["tokenizer_config.json"],
    ]


def _read_template(data: bytes) -> None:
    template = ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>", "eos_token": "</s>"})
    with contextlib.suppress(InvalidRequestError):
        template.render(_MESSAGES)


def _template_seeds() -> list[bytes]:
    tools = (
        "{% macro f(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{% for m in messages if m.role %}"
        "{{ m['content'][:3] * 2 ~ loop.index0 }}{% endfor %}{% set ns = namespace(a=1) %}{% set ns.a = 2 %}"
        "{{ '%s' % ns.a }}{{ '{0}'.format(bos_token) }}{{ [1, 2] | join(',') | replace('1', '22') }}"
        "{% if tools is defined and tools %}{{ f(tools) }}{% endif %}"
    )
    return [CHAT_TEMPLATE.encode(), tools.encode()]


def _read_body(data: bytes) -> None:
    """The first byte says which API the body is for."""
    kind: type[ChatBody | CompletionBody] = CompletionBody if data[:1] == b"c" else ChatBody
    for is_lenient in (False, True):
        with contextlib.suppress(APIError):
            parse_body(data[1:], kind, is_lenient=is_lenient)


def _body_seeds() -> list[bytes]:
    sampling = {"model": "m", "temperature": 0.5, "max_tokens": 3, "seed": 1, "stop": ["a"], "stream": True}
    chat = {"messages": _MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}
    prompt = {"prompt": [[1, 2], [3]], "logit_bias": {"3": -1.5}, "structured_outputs": {"regex": "a+"}}
    return [b"m" + _json(sampling | chat)[0], b"c" + _json(sampling | prompt)[0]]


def _read_messages(data: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        for message in parse_messages(data.decode(errors="surrogateescape")):
            assert set(message) <= {"role", "content", "name"}


def _read_schema(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(read_schema(data.decode(errors="replace")), dict | bool)


def _read_gate_request(data: bytes) -> None:
    """A head, an empty line and a body, which is the same however it is cut."""
    raw, _, rest = data.partition(b"\r\n\r\n")
    try:
        head = read_head(raw, _LIMITS)
    except RefusedError:
        return
    whole = _taken(body_of(head, _LIMITS), [rest])
    assert whole == _taken(body_of(head, _LIMITS), [rest[at : at + 1] for at in range(len(rest))])
    assert whole == _taken(body_of(head, _LIMITS), [rest[at : at + 7] for at in range(0, len(rest), 7)])


def _taken(body: Any, parts: Sequence[bytes]) -> tuple[str, bytes, bytes]:
    """How the body ended, what it holds, and what followed it."""
    received = bytearray()
    is_whole = False
    try:
        for part in (b"", *parts):
            received += part
            is_whole = is_whole or body.take(received)
    except RefusedError as error:
        return str(error), b"", b""
    return str(is_whole), bytes(body.content) if is_whole else b"", bytes(received) if is_whole else b""


def _gate_request_seeds() -> list[bytes]:
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\n"
    return [
        head + b"Content-Length: 5\r\n\r\nhelloGET",
        head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\nnext",
    ]


def _read_gate_json(data: bytes) -> None:
    """What is sent on passes again as it is, and means the same."""
    _check_written_json(data)
    for length in (None, data.rfind(b"}") + 1):
        _check_written_inference(data, length)


def _check_written_json(data: bytes) -> None:
    try:
        written = checked_json(data, _LIMITS)
    except RefusedError:
        return
    assert checked_json(written, _LIMITS) == written
    assert _meaning(written) == _meaning(data)


def _check_written_inference(data: bytes, length: int | None) -> None:
    try:
        written, json_length = checked_inference(data, length, _LIMITS)
    except RefusedError:
        return
    assert checked_inference(written, json_length, _LIMITS) == (written, json_length)
    assert _meaning(written[:json_length]) == _meaning(data[:length])
    if length is not None:
        assert written[json_length:] == data[length:]


def _meaning(text: bytes) -> str:
    """What Python's own reader makes of JSON, in one form that tells 1, 1.0 and true apart."""
    return json.dumps(json.loads(text.decode()))


def _gate_json_seeds() -> list[bytes]:
    tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES"}
    plain = {"id": "1", "inputs": [tensor | {"data": ["hi"]}], "parameters": {"max_tokens": 3}}
    binary = {"inputs": [tensor | {"parameters": {"binary_data_size": 6}}], "outputs": [{"name": "o"}]}
    return [_json(plain)[0], _json(binary)[0] + b"\2\0\0\0hi"]


def _read_grpc_message(data: bytes) -> None:
    with contextlib.suppress(RefusedError):
        check_infer_request(data, _LIMITS)


def _grpc_seeds() -> list[bytes]:
    request = service_pb2.ModelInferRequest(model_name="m", id="7")
    request.inputs.add(name="a", datatype="INT32", shape=[1, 2]).parameters["x"].int64_param = 3
    request.outputs.add(name="b").parameters["classification"].int64_param = 2
    request.parameters["priority"].string_param = "1"
    request.raw_input_contents.append(b"\0" * 8)
    return [request.SerializeToString()]


def _read_http2(data: bytes) -> None:
    whole, cut = (_http2_events([data]), _http2_events([data[at : at + 1] for at in range(len(data))]))
    assert whole == cut


def _http2_events(pieces: Sequence[bytes]) -> list[object]:
    """What a client's bytes come to: frames and what is in them, up to the fault that ends the connection."""
    reader, decoder = http2.FrameReader(), BlockDecoder()
    events: list[object] = [*reader.frames(http2.PREFACE)]
    try:
        for piece in pieces:
            for each in reader.frames(piece):
                events += (each, _http2_content(each, decoder))
    except http2.ConnectionFaultError as fault:
        events.append((fault.code, str(fault)))
    return events


def _http2_content(each: http2.Frame, decoder: BlockDecoder) -> object:
    if each.kind == http2.SETTINGS:
        return http2.read_settings(each.payload)
    try:
        if each.kind == http2.HEADERS:
            return read_grpc_head(decoder.decode(begun(each).encoded), INFERENCE)
        if each.kind == http2.DATA:
            messages = MessageReader("gzip", _LIMITS.max_body_bytes)
            messages.add(http2.content(each), 0.0)
            message = messages.next()
            return None if message is None else messages.inflated(message)
    except (MalformedError, GRPCRefusedError) as refusal:
        return str(refusal)
    return None


def _http2_seeds() -> list[bytes]:
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/inference.GRPCInferenceService/ModelInfer",
        b"content-type": b"application/grpc",
        b"grpc-timeout": b"3S",
    }
    head = http2.header_frames(1, encode(fields.items()), ends=False)
    first = http2.settings({http2.INITIAL_WINDOW_SIZE: 9})
    return [first + head + http2.frame(http2.DATA, http2.END_STREAM, 1, framed(b"abc"))]


def _read_word_list(data: bytes) -> None:
    """What is packed again is read the same, and each word is the ids up to its end."""
    packed = np.frombuffer(data[: len(data) // 8 * 8], np.int32).reshape(2, -1)
    try:
        words = unpack_word_list(packed)
    except InvalidRequestError:
        return
    assert unpack_word_list(pack_word_list(words)) == words
    ends = [each for each in packed[1].tolist() if each != -1]
    assert list(itertools.accumulate(map(len, words))) == ends
    assert list(itertools.chain(*words)) == packed[0, : ends[-1] if ends else 0].tolist()


def _word_list_seeds() -> list[bytes]:
    return [pack_word_list(words).tobytes() for words in ([[1, 2], [3]], [[5]], [])]


def _read_frames(data: bytes) -> None:
    """The bodies are the same however the bytes are cut; each is a message or refused."""
    bodies = _framed([data])
    assert bodies == _framed([data[at : at + 1] for at in range(len(data))])
    for body in bodies or ():
        for decoder in (client_message_decoder, engine_message_decoder):
            # What the reader of a socket takes for a broken peer.
            with contextlib.suppress(ValueError, msgspec.DecodeError):
                decoder.decode(body)


def _framed(parts: Sequence[bytes]) -> list[bytes] | None:
    buffer = FrameBuffer()
    try:
        return [body for part in parts for body in buffer.feed(part)]
    except ValueError:
        return None


def _frame_seeds() -> list[bytes]:
    request = EngineRequest(sequence_id=1, prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=3))
    return [encode_frame(AddRequests([request])) + encode_frame(Abort([1])), b"\1\0\0\0\xc0"]


class _Socket:
    """A connection on which everything has come."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(io.BytesIO(self._data))  # type: ignore[arg-type]


class _Connection:
    """What `read_answers` asks of a connection."""

    def __init__(self, data: bytes) -> None:
        self._response = http.client.HTTPResponse(_Socket(data), method="POST")  # type: ignore[arg-type]

    def getresponse(self) -> http.client.HTTPResponse:
        self._response.begin()
        return self._response

    def close(self) -> None:
        self._response.close()


def _read_events(data: bytes) -> None:
    connection: Any = _Connection(data)
    with contextlib.suppress(ServerError):
        for chunk, _ in read_answers(connection, "http://h"):
            assert isinstance(chunk.text, str)


def _event_seeds() -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    event = b'data: {"text_output":"a","finish_reason":"stop","num_output_tokens":1}\n\n'
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
    error = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 13\r\n\r\n{"error":"x"}'
    endless = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (1 << 64) + event
    others = b"data: 200\n\n", b'data: {"text_output": 3}\n\n', b'data: {"num_output_tokens": "3"}\n\n'
    seeds = [head + b"\r\n" + event * 2, head + chunked, head + endless, error]
    return [*seeds, *(head + b"\r\n" + each for each in others)]


def _read_calls(data: bytes) -> None:
    """The first byte chooses a family; content and calls are the same for every cut of the text."""
    if not data:
        return
    family = list(FAMILY)[data[0] % len(FAMILY)]
    text = data[1:].decode(errors="replace")[:_MOST_TEXT]
    found = [
        heard(parser_for(family, are_certain=True), [cut(text, places)])
        for places in ([], list(range(1, len(text))))
    ]
    one_by_one = heard(
        parser_for(family, are_certain=True), [[piece] for piece in cut(text, range(1, len(text)))]
    )
    for other in (found[1], one_by_one):
        assert (other.content, other.calls) == (found[0].content, found[0].calls)


def _call_seeds() -> list[bytes]:
    return [bytes([list(FAMILY).index(case.family)]) + case.text.encode() for case in CASES]


def _read_records(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        read_requests(_written("records.jsonl", data))


def _record_seeds() -> list[bytes]:
    request = EngineRequest(sequence_id=0, prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=3))
    outputs = [recorded_output([4], FinishReason.STOP, with_ids=True)]
    record = make_record(request, outputs, arrival_s=1.5, door="llm", model="m", with_prompts=True)
    trace = b'{"timestamp": 1.5, "input_length": 3, "output_length": 2, "hash_ids": [1, 2]}\n'
    return [trace * 2, msgspec.json.encode(record)]


READERS = {
    "calls": ByteReader(_read_calls, _call_seeds),
    "chat_template": ByteReader(_read_template, _template_seeds),
    "config": ByteReader(_read_config, lambda: _json(_CONFIG)),
    "events": ByteReader(_read_events, _event_seeds),
    "frames": ByteReader(_read_frames, _frame_seeds),
    "gate_json": ByteReader(_read_gate_json, _gate_json_seeds),
    "gate_request": ByteReader(_read_gate_request, _gate_request_seeds),
    "gguf": ByteReader(_read_gguf, _gguf_seeds),
    "grpc_message": ByteReader(_read_grpc_message, _grpc_seeds),
    "http2_frames": ByteReader(_read_http2, _http2_seeds),
    "json_schema": ByteReader(
        _read_schema,
        lambda: _json({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$id": "x"}),
    ),
    "messages": ByteReader(_read_messages, lambda: _json(_MESSAGES)),
    "openai_body": ByteReader(_read_body, _body_seeds),
    "records": ByteReader(_read_records, _record_seeds),
    "safetensors": ByteReader(_read_safetensors, _safetensors_seeds),
    "tokenizer": ByteReader(_read_tokenizer, _tokenizer_seeds),
    "word_list": ByteReader(_read_word_list, _word_list_seeds),
}
