"""The adapter of Naiad: the engine in this process."""

from __future__ import annotations

import gc
from dataclasses import replace

from protocol import Engine, Load, Requests, serve


def load(task: Load) -> Engine:
    """Build the engine as the engine process does, whose garbage collector looks at nothing of the start."""
    gc.disable()
    engine = build(task)
    gc.collect()
    gc.freeze()
    gc.enable()
    return engine


def build(task: Load) -> Engine:
    """Import Naiad and build; the options are fields of `EngineConfig` and the bytes of a token's KV."""
    from naiad.cli.bench.throughput import engine_generate, load_engine
    from naiad.config import EngineConfig
    from naiad.errors import InternalError
    from naiad.sequence import EngineRequest, FinishReason, SamplingParams

    gc.freeze()
    fields = dict(task.options)
    config = EngineConfig(
        model_dir=task.model,
        max_num_seqs=task.max_batch,
        max_model_len=task.max_length,
        kv_cache_bytes=task.kv_tokens * fields.pop("kv_token_bytes"),
        enable_prefix_caching=False,
        **fields,
    )
    if config.drafter == "auto":
        # The other engines draft nothing either.
        config = replace(config, drafter="none")
    engine, _ = load_engine(config)

    def add(number: int, prompt: list[int], new_tokens: int) -> None:
        params = SamplingParams(max_tokens=new_tokens)
        engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params))

    def step() -> dict[int, int]:
        made: dict[int, int] = {}
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                raise InternalError(output.error_message)
            made[output.sequence_id] = made.get(output.sequence_id, 0) + len(output.token_ids)
        return made

    return Engine(engine_generate(engine), Requests(add, step))


if __name__ == "__main__":
    serve(load, ["naiad", "torch"])
