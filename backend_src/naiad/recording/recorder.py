"""Follows the requests of one door until their records can be written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from naiad.outputs import RequestOutput
from naiad.recording.record import RequestRecord, make_record, recorded_output
from naiad.recording.record_file import RecordFile
from naiad.sequence import EngineRequest, FinishReason


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended.

    Attributes:
        token_ids: sequence id → the ids so far.
        reasons: sequence id → why it ended.
    """

    request: EngineRequest
    arrival_s: float
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)


class Recorder:
    """Takes what the observations of a door take, from the same threads."""

    def __init__(self, file: RecordFile, door: str, model: Callable[[], str], *, with_prompts: bool) -> None:
        """Set up.

        Args:
            file: takes the records.
            door: by which server the requests come.
            model: returns the name of the model that answers.
            with_prompts: see `make_record`.
        """
        self.file = file
        self._door = door
        self._model = model
        self._with_prompts = with_prompts
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}

    def begin(self, requests: Iterable[EngineRequest]) -> None:
        """Start to follow requests that are submitted to the engine."""
        now_s = time.time()
        with self._lock:
            for request in requests:
                known = _Open(request, now_s, {each: [] for each in request.sequence_ids})
                self._open.update(dict.fromkeys(request.sequence_ids, known))

    def take_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """Take the engine's outputs; a request that it refuses is dropped."""
        with self._lock:
            for output in outputs:
                known = self._open.get(output.sequence_id)
                if known is None:
                    continue
                known.token_ids[output.sequence_id] += output.token_ids
                if output.finish_reason is FinishReason.ERROR and output.timings is None:
                    self._drop(known.request)
                elif output.finish_reason is not None:
                    self._end(output.sequence_id, output.finish_reason)

    def lose(self, sequence_ids: Collection[int] | None = None) -> None:
        """Record that these sequences (None: all) have ended with an error, without further outputs."""
        with self._lock:
            ids = self._open.keys() if sequence_ids is None else self._open.keys() & sequence_ids
            for sequence_id in list(ids):
                self._end(sequence_id, FinishReason.ERROR)

    def forget(self, requests: Iterable[EngineRequest]) -> None:
        """Drop requests that the engine did not get."""
        with self._lock:
            for request in requests:
                self._drop(request)

    def _drop(self, request: EngineRequest) -> None:
        for sequence_id in request.sequence_ids:
            self._open.pop(sequence_id, None)

    def _end(self, sequence_id: int, reason: FinishReason) -> None:
        known = self._open.pop(sequence_id)
        known.reasons[sequence_id] = reason
        if len(known.reasons) == len(known.token_ids):
            self.file.add(partial(self._record, known, self._model()))

    def _record(self, ended: _Open, model: str) -> RequestRecord:
        with_ids = self._with_prompts
        outputs = [
            recorded_output(ended.token_ids[each], ended.reasons[each], with_ids=with_ids)
            for each in ended.request.sequence_ids
        ]
        return make_record(
            ended.request,
            outputs,
            arrival_s=ended.arrival_s,
            door=self._door,
            model=model,
            with_prompts=with_ids,
        )
