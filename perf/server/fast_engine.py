"""An engine process without a model: it repeats each sequence's prompt at a given rate.

    python -m perf.server.fast_engine --tokens-per-s 20000 …

Further options are those of `naiad.engine_process`. `fast_llm_model` uses it in a server.
"""

from __future__ import annotations

import argparse
import sys
import time

from naiad.config import ModelConfig
from naiad.engine_process.__main__ import parse
from naiad.engine_process.protocol import Checkpoint
from naiad.engine_process.serving.loop import serve
from naiad.engine_process.serving.queue_gate import QueueLimits
from naiad.grammar import Grammars
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest, FinishReason
from naiad.snapshot import EngineSnapshot
from naiad.usage import TenantUsage

# A step that comes late is followed by faster ones, to make up for at most this delay.
_MAX_DEBT_S = 0.1


class FastEngine:
    """An engine whose step generates one token for each sequence and lasts as long as the rate requires."""

    def __init__(self, model_config: ModelConfig, tokens_per_s: float) -> None:
        """Serve in place of a model of this configuration."""
        self.model_config = model_config
        self.grammars: Grammars | None = None
        self.max_model_len = model_config.max_position_embeddings
        self.num_waiting_tokens = 0
        self._tokens_per_s = tokens_per_s
        self._due_s = 0.0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._live: dict[int, EngineRequest] = {}
        self._num_made: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished."""
        return bool(self._live)

    def add_request(self, request: EngineRequest) -> None:
        """Add all sequences of a request."""
        self._num_prompt_tokens += len(request.prompt_token_ids)
        if not self._live:
            self._due_s = time.monotonic()
        for sequence_id in request.sequence_ids:
            self._live[sequence_id] = request
            self._num_made[sequence_id] = 0

    def abort(self, sequence_id: int) -> RequestOutput | None:
        """End a sequence now."""
        if self._live.pop(sequence_id, None) is None:
            return None
        return RequestOutput(sequence_id, [], finish_reason=FinishReason.CANCELLED)

    def step(self) -> list[RequestOutput]:
        """Generate one token for each sequence."""
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - _MAX_DEBT_S) + len(self._live) / self._tokens_per_s
        time.sleep(max(0.0, self._due_s - now_s))
        self._num_steps += 1
        return [self._advance(sequence_id, request) for sequence_id, request in list(self._live.items())]

    def stats(self) -> EngineStats:
        """Return the current gauges."""
        return EngineStats(
            num_running=len(self._live),
            max_num_seqs=1024,
            total_steps=self._num_steps,
            total_prompt_tokens=self._num_prompt_tokens,
            total_generation_tokens=self._num_generation_tokens,
        )

    def usages(self) -> list[TenantUsage]:
        """Return nothing: nobody is charged here."""
        return []

    def snapshot(self) -> EngineSnapshot:
        """Return the gauges; nothing else is known here."""
        return EngineSnapshot(stats=self.stats())

    def _advance(self, sequence_id: int, request: EngineRequest) -> RequestOutput:
        number = self._num_made[sequence_id]
        self._num_made[sequence_id] += 1
        self._num_generation_tokens += 1
        is_last = number + 1 == request.params.max_tokens
        if is_last:
            del self._live[sequence_id]
        token_id = request.prompt_token_ids[number % len(request.prompt_token_ids)]
        return RequestOutput(sequence_id, [token_id], finish_reason=FinishReason.LENGTH if is_last else None)


def main() -> None:
    """Serve until the parent ends."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--tokens-per-s", type=float, required=True)
    options, rest = parser.parse_known_args(sys.argv[1:])
    config, socket_path, parent_pid = parse(rest)
    model_config = ModelConfig.from_directory(config.model_dir)
    limits = QueueLimits(config.max_num_seqs, config.max_queued_requests, config.max_queued_tokens)
    checkpoint = Checkpoint.of(config)
    serve(lambda: FastEngine(model_config, options.tokens_per_s), socket_path, parent_pid, limits, checkpoint)


if __name__ == "__main__":
    main()
