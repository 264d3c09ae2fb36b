"""`python -m naiad.engine_process`: the engine process, which `EngineClient` starts."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from naiad.config.engine_config import EngineConfig, field_names
from naiad.config.kv_events import kv_event_settings
from naiad.engine_process.protocol import Checkpoint
from naiad.engine_process.serving.kv_event_publisher import KVEventPublisher
from naiad.engine_process.serving.loop import ServedEngine, serve
from naiad.engine_process.serving.queue_gate import QueueLimits
from naiad.errors import ConfigError

# When memory runs out, the kernel should kill this process, which is restarted, rather than the
# server, which is not.
_OOM_SCORE_ADJUSTMENT = 500


def parse(arguments: Sequence[str]) -> tuple[EngineConfig, Path, int]:
    """Return configuration, socket path and the parent's process id; exits on a bad option."""
    parser = argparse.ArgumentParser(prog="naiad.engine_process", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to create")
    parser.add_argument("--parent-pid", type=int, required=True, help="exit when this is not the parent")
    for name in field_names():
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, default="", help="a field of EngineConfig"
        )
    options = parser.parse_args(arguments)
    try:
        config = EngineConfig.from_parameters({name: getattr(options, name) for name in field_names()})
    except ConfigError as error:
        parser.error(str(error))
    return config, options.socket, options.parent_pid


def main() -> NoReturn:
    """Parse the command line and serve."""
    config, socket_path, parent_pid = parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="naiad engine: %(levelname)s: %(message)s")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJUSTMENT), encoding="ascii")

    settings = kv_event_settings(config)
    kv_events = None if settings is None else KVEventPublisher(settings, config.block_size)

    def build() -> ServedEngine:
        if kv_events is not None:
            kv_events.open()
        # torch takes seconds to import; the socket must exist before that.
        import torch

        from naiad.engine import build_engine

        # The collector, which is off until the engine is built, need not look at what was imported.
        gc.freeze()
        stack.enter_context(torch.inference_mode())
        return build_engine(config, None if kv_events is None else kv_events.log)

    limits = QueueLimits(config.max_num_seqs, config.max_queued_requests, config.max_queued_tokens)
    usage_file = Path(config.usage_file) if config.usage_file else None
    with contextlib.ExitStack() as stack:
        serve(build, socket_path, parent_pid, limits, Checkpoint.of(config), usage_file, kv_events)


if __name__ == "__main__":
    main()
