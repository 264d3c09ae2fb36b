"""The adapter of Naiad: the engine in this process."""

from __future__ import annotations

from protocol import Engine, Load, serve

from naiad.cli.bench.throughput import engine_generate, load_engine
from naiad.config import EngineConfig


def load(task: Load) -> Engine:
    """Build the engine; the options are fields of `EngineConfig` and the bytes of a token's KV."""
    fields = dict(task.options)
    config = EngineConfig(
        model_dir=task.model,
        max_num_seqs=task.max_batch,
        max_model_len=task.max_length,
        kv_cache_bytes=task.kv_tokens * fields.pop("kv_token_bytes"),
        enable_prefix_caching=False,
        **fields,
    )
    engine, _ = load_engine(config)
    return Engine(engine_generate(engine))


if __name__ == "__main__":
    serve(load, ["naiad", "torch"])
