"""Beam searches in the engine: each is several sequences that share blocks and advance together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from naiad.engine.live_sequence import TextState
from naiad.errors import NaiadError, NoTokenPossibleError
from naiad.outputs import ModelOutput, RequestOutput, TokenLogProbs, error_output, timings_of
from naiad.sampling.beam_search import Beam, BeamRules, BeamSearch, Candidate
from naiad.scheduler.scheduler import Scheduler
from naiad.sequence import EngineRequest, FinishReason, Sequence, SequenceStatus, TextContext

# The score that transformers uses: finite, and lower than the score of any text.
_NO_RESULT = Beam(score=-1e9)


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One search.

    Attributes:
        request: its `sequence_id` and `sibling_ids` become the ids of the outputs, best first.
        search: the rules of the search and its state.
        beams: a sequence for each of `search.running`, in the same order.
        spare_ids: ids that are free for new beams.
        candidates: sequence id → the candidates of its last computed row.
    """

    request: EngineRequest
    search: BeamSearch
    beams: list[Sequence]
    spare_ids: list[int]
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all known tokens of every beam have been computed."""
        return all(
            beam.status is SequenceStatus.RUNNING
            and beam.num_computed_tokens == beam.num_tokens
            and beam.sequence_id in self.candidates
            for beam in self.beams
        )


def beam_rules(request: EngineRequest) -> BeamRules:
    """The rules that a request asks for."""
    assert request.beam is not None
    return BeamRules(
        width=len(request.sequence_ids),
        max_tokens=request.params.max_tokens,
        stop_token_ids=request.params.stop_token_ids,
        length_penalty=request.beam.length_penalty,
        stops_early=request.beam.stops_early,
        diversity_rate=request.beam.diversity_rate,
    )


class BeamGroups:
    """All searches that have not ended. Every id of a search ends with exactly one output."""

    def __init__(
        self, scheduler: Scheduler, text_state: Callable[[TextContext], TextState] | None = None
    ) -> None:
        """Start without searches.

        Args:
            scheduler: runs the beams.
            text_state: as in `Engine`.
        """
        self._scheduler = scheduler
        self._text_state = text_state
        self._groups: dict[int, BeamGroup] = {}

    def __len__(self) -> int:
        """Number of ids of all searches."""
        return len(self._groups)

    def __contains__(self, sequence_id: int) -> bool:
        """Whether the id belongs to a search."""
        return sequence_id in self._groups

    def add(self, request: EngineRequest, first: Sequence) -> None:
        """Start a search with its first sequence, which holds the prompt."""
        rules = beam_rules(request)
        first.params = msgspec.structs.replace(first.params, num_candidates=rules.num_candidates)
        group = BeamGroup(request, BeamSearch(rules), [first], list(request.sibling_ids))
        self._groups.update(dict.fromkeys(group.request.sequence_ids, group))
        self._scheduler.add(first)

    def first_sequence(self, sequence_id: int) -> Sequence:
        """The first sequence of the search that the id belongs to."""
        return self._groups[sequence_id].beams[0]

    def take(self, sequence: Sequence, result: ModelOutput) -> list[RequestOutput]:
        """Store the candidates of a beam's computed row; advance the search if all beams have been computed.

        A beam that was preempted while it waited for others is computed again. If an earlier row of the same
        step was all that the search missed, it has advanced, with the candidates that the beam had before.
        Then the beam's row is not about its last token any more, and is passed over.

        Returns:
            The outputs of all ids if the search has ended, otherwise none.
        """
        if sequence.num_computed_tokens < sequence.num_tokens:
            return []
        sequence_id = sequence.sequence_id
        group = self._groups[sequence_id]
        group.candidates[sequence_id] = result.candidates[sequence_id]
        if not group.is_complete:
            return []
        parents = group.search.advance([group.candidates[beam.sequence_id] for beam in group.beams])
        group.candidates.clear()
        if parents is None:
            beams = group.search.best()
            return self._end(group, beams, None) if beams else self.fail(sequence_id, NoTokenPossibleError())
        self._continue(group, parents)
        return []

    def end(self, sequence_id: int, reason: FinishReason) -> list[RequestOutput]:
        """End a search early; return the outputs of all ids, with the best beams so far."""
        group = self._groups[sequence_id]
        return self._end(group, group.search.best_so_far(), reason)

    def fail(self, sequence_id: int, error: NaiadError) -> list[RequestOutput]:
        """End a search; return an error output for each id."""
        group = self._groups[sequence_id]
        timings = timings_of(group.beams[0])
        self._remove(group)
        return [error_output(each, error.status, str(error), timings) for each in group.request.sequence_ids]

    def _continue(self, group: BeamGroup, parents: list[int]) -> None:
        """Give each running beam of the search a sequence that continues its parent's sequence."""
        old = group.beams
        # A parent's sequence continues as its first child; sequences without children become further
        # children.
        idle = [beam for index, beam in enumerate(old) if index not in parents]
        in_place: set[int] = set()
        group.beams = []
        for parent, beam in zip(parents, group.search.running, strict=True):
            token_id = beam.token_ids[-1]
            if parent not in in_place:
                in_place.add(parent)
                group.beams.append(old[parent])
                self._scheduler.append(old[parent], token_id)
            elif idle:
                self._scheduler.take_over(idle[0], old[parent], token_id)
                group.beams.append(idle.pop(0))
            else:
                group.beams.append(self._fork(group, old[parent], token_id))
        for beam_sequence in idle:
            self._scheduler.remove(beam_sequence)
            group.spare_ids.append(beam_sequence.sequence_id)

    def _fork(self, group: BeamGroup, donor: Sequence, token_id: int) -> Sequence:
        sequence = Sequence(
            sequence_id=group.spare_ids.pop(0),
            token_ids=[*donor.token_ids[: donor.num_computed_tokens], token_id],
            num_prompt_tokens=donor.num_prompt_tokens,
            params=donor.params,
            arrival_s=donor.arrival_s,
            tenant=donor.tenant,
            prefix_identity=donor.prefix_identity,
            donor=donor,
            first_scheduled_s=donor.first_scheduled_s,
            first_token_s=donor.first_token_s,
        )
        self._scheduler.add(sequence)
        return sequence

    def _end(self, group: BeamGroup, beams: list[Beam], reason: FinishReason | None) -> list[RequestOutput]:
        first = group.beams[0]
        num_blocks = len(first.block_table)
        self._remove(group)
        results = [*beams, *[_NO_RESULT] * (len(group.request.sequence_ids) - len(beams))]
        outputs = [
            self._output(group.request, sequence_id, beam, reason)
            for sequence_id, beam in zip(group.request.sequence_ids, results, strict=True)
        ]
        for output in outputs:
            output.num_cached_tokens, output.timings = first.num_cached_tokens, timings_of(first)
            output.num_blocks, output.num_reused_blocks = num_blocks, first.num_reused_blocks
        return outputs

    def _output(
        self, request: EngineRequest, sequence_id: int, beam: Beam, reason: FinishReason | None
    ) -> RequestOutput:
        num_kept = len(beam.token_ids) - beam.is_stopped
        output = RequestOutput(sequence_id, list(beam.token_ids[:num_kept]), cum_log_prob=beam.score)
        output.finish_reason = reason or (FinishReason.STOP if beam.is_stopped else FinishReason.LENGTH)
        if reason is None and beam.is_stopped:
            output.stop_reason = str(beam.token_ids[-1])
        if request.params.num_log_probs >= 0:
            output.log_probs = [TokenLogProbs(log_prob) for log_prob in beam.log_probs[:num_kept]]
        if request.text is not None:
            self._add_text(request.text, output)
        if reason is not None:
            output.finish_reason, output.stop_reason = reason, ""
        return output

    def _add_text(self, context: TextContext, output: RequestOutput) -> None:
        assert self._text_state is not None, "this engine has no tokenizer"
        chunk = self._text_state(context).push(output.token_ids, True)
        output.token_ids, output.window_ids = chunk.token_ids, chunk.window_ids
        output.num_chars, output.is_cut = chunk.num_chars, chunk.is_cut
        output.log_probs = output.log_probs[: len(chunk.token_ids)]
        if chunk.is_cut:
            output.finish_reason, output.stop_reason = FinishReason.STOP, chunk.stop_reason or ""

    def _remove(self, group: BeamGroup) -> None:
        for beam in group.beams:
            self._scheduler.remove(beam)
        for sequence_id in group.request.sequence_ids:
            del self._groups[sequence_id]
