"""The adapter of llama.cpp: batches of sequences through its C interface."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import llama_cpp
import numpy as np
from protocol import Engine, Load, serve

_MICRO_BATCH = 512
_KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}


class _Sequences:
    """A context of `batch` sequences of `length` tokens each, and the batch that is given to it."""

    def __init__(self, model: ctypes.c_void_p, task: Load, batch: int, length: int) -> None:
        params = llama_cpp.llama_context_default_params()
        # Each sequence's part of the context is a multiple of 256 tokens.
        length = -(-length // 256) * 256
        params.n_ctx = batch * length
        params.n_batch = max(batch, 2048)
        params.n_ubatch = _MICRO_BATCH
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = task.threads
        params.type_k = params.type_v = _KV_TYPES[task.options["kv"]]
        params.no_perf = True
        self.shape = (batch, length)
        self._num_batched = params.n_batch
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {batch} × {length} tokens")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(self._num_batched, 0, 1)

    def free(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """Compute the prompts in as few calls as they fit in; return the next token of each."""
        made = [0] * len(prompts)
        rows: list[tuple[int, int, int, bool]] = []
        for number, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                rows.append((token, position, number, position == len(prompt) - 1))
                if len(rows) == self._num_batched:
                    self._compute(rows, made)
                    rows = []
        if rows:
            self._compute(rows, made)
        return made

    def decode(self, tokens: list[int], position: int) -> list[int]:
        """Compute one token of each sequence; return the next."""
        made = [0] * len(tokens)
        self._compute([(token, position, number, True) for number, token in enumerate(tokens)], made)
        return made

    def _compute(self, rows: list[tuple[int, int, int, bool]], made: list[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, number, is_last) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = number
            batch.logits[row] = is_last
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        for row, (_, _, number, is_last) in enumerate(rows):
            if is_last:
                logits = llama_cpp.llama_get_logits_ith(self._context, row)
                made[number] = int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))


def load(task: Load) -> Engine:
    """Load a GGUF file; the option `kv` is the KV cache's type."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = task.options["extra_buffers"]
    model = llama_cpp.llama_model_load_from_file(task.model.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp can not load {task.model}")
    kept: list[_Sequences] = []

    def steps(prompts: list[list[int]], new_tokens: int) -> Iterator[list[int]]:
        """Yield the new token of each sequence, step after step."""
        sequences = kept[0]
        sequences.clear()
        length = len(prompts[0])
        tokens = sequences.prefill(prompts)
        yield tokens
        for number in range(new_tokens - 1):
            tokens = sequences.decode(tokens, length + number)
            yield tokens

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [list(tokens) for tokens in zip(*steps(prompts, new_tokens), strict=True)]

    def step_times(prompts: list[list[int]], new_tokens: int) -> list[float]:
        return [time.perf_counter() for _ in steps(prompts, new_tokens)]

    def prepare(prompts: list[list[int]], new_tokens: int) -> None:
        """Make a context of this shape, as an engine that serves such prompts would have been started."""
        batch, length = len(prompts), len(prompts[0]) + new_tokens
        if kept and kept[0].shape[0] == batch and kept[0].shape[1] >= length:
            return
        if kept:
            kept.pop().free()
        kept.append(_Sequences(model, task, batch, length))

    return Engine(generate, step_times, prepare)


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
