"""Builds the batch entry of one sequence: the next tokens of its prompt, its answer or its selective recompute."""

import numpy as np
from numpy.typing import NDArray

from stillroom.core.batch import MassRequest, SampleSpec, ScheduledSequence
from stillroom.core.request import uniform_at
from stillroom.kvcache.chunk_reuse.recompute import SelectiveRecompute
from stillroom.scheduler.sequence import Sequence


def schedule_tokens(sequence: Sequence, budget: int) -> ScheduledSequence:
    """Return the next tokens of a sequence, at most `budget` of them.

    Changes only `sequence.to_compute` and the recompute's state.
    """
    if sequence.lease.recompute is not None:
        return _schedule_recompute(sequence, sequence.lease.recompute, budget)
    start = sequence.num_computed
    end = min(start + budget, sequence.next_cut(start))
    samples = _samples(sequence) if end == sequence.num_tokens else ()
    token_ids, slots = sequence.tokens(start, end), sequence.table.slots[:end]
    mass_request = _mass_request(sequence, np.arange(start, end)) if sequence.lease.mass_sampler is not None else None
    return ScheduledSequence(sequence.request_id, token_ids, start, slots, samples, mass_request=mass_request)


def _schedule_recompute(sequence: Sequence, recompute: SelectiveRecompute, budget: int) -> ScheduledSequence:
    """Return a piece of the deviation pass, the query pass, or the computing pass after them."""
    slots = sequence.table.slots
    if recompute.needs_deviation_pass:
        piece = recompute.deviation_pass_positions(sequence.num_tokens, budget)
        token_ids = sequence.tokens(piece.start, piece.stop)
        return ScheduledSequence(
            sequence.request_id, token_ids, piece.start, slots[: piece.stop], (), is_deviation_pass=True
        )
    if recompute.needs_query_pass:
        positions = recompute.query_pass_positions(sequence.num_tokens, budget)
        return _entry_at(
            sequence, positions, slots[np.concatenate([recompute.context, positions])], (), is_query_pass=True
        )
    if sequence.to_compute is None:
        sequence.to_compute = recompute.to_compute(sequence.num_tokens)
    positions = sequence.to_compute[:budget]
    samples = _samples(sequence) if len(positions) == len(sequence.to_compute) else ()
    end = int(positions[-1]) + 1
    return _entry_at(sequence, positions, slots[:end], samples, mass_request=_mass_request(sequence, positions))


def _entry_at(
    sequence: Sequence,
    positions: NDArray[np.int64],
    context: NDArray[np.int64],
    samples: tuple[SampleSpec, ...],
    *,
    is_query_pass: bool = False,
    mass_request: MassRequest | None = None,
) -> ScheduledSequence:
    token_ids, first = sequence.tokens_at(positions), int(positions[0])
    return ScheduledSequence(
        sequence.request_id, token_ids, first, context, samples, positions, is_query_pass, mass_request=mass_request
    )


def _mass_request(sequence: Sequence, positions: NDArray[np.int64]) -> MassRequest | None:
    """Return what to measure of these tokens' attention; None for tokens of an answer."""
    mass_sampler = sequence.lease.mass_sampler
    if mass_sampler is None or positions[-1] >= sequence.num_prompt_tokens:
        return None
    return mass_sampler.mass_request(positions)


def _samples(sequence: Sequence) -> tuple[SampleSpec, ...]:
    return (_sample_spec(sequence), *map(_sample_spec, sequence.followers))


def _sample_spec(sequence: Sequence) -> SampleSpec:
    request, params = sequence.request, sequence.request.sampling
    return SampleSpec(
        request_id=request.request_id,
        params=params,
        uniform=0.0 if params.is_greedy else uniform_at(params.seed, sequence.num_generated),
        token_ids=sequence.tokens(0, sequence.num_tokens),
        num_prompt_tokens=sequence.num_prompt_tokens,
        forbidden=request.stop_token_ids if sequence.num_generated < params.min_tokens else frozenset(),
        constraint=sequence.constraint,
    )
