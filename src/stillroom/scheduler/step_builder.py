"""Builds the batch entry of one sequence: the next tokens of its prompt, its answer or its selective recompute."""

import numpy as np
from numpy.typing import NDArray

from stillroom.core.batch import MassRequest, SampleSpec, ScheduledSequence
from stillroom.core.request import TokenConstraint, uniform_at
from stillroom.kvcache.chunk_reuse.recompute import SelectiveRecompute
from stillroom.scheduler.sequence import Sequence

_NONE_FORBIDDEN: frozenset[int] = frozenset()


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


def schedule_next_token(sequence: Sequence) -> ScheduledSequence:
    """Return the last token of a decoding sequence, behind which the next one is sampled.

    Precondition: it has a slot for it, and no selective recompute.
    """
    end = sequence.num_tokens
    token_ids = sequence.tokens(0, end)
    samples = (_sample_spec(sequence, token_ids, sequence.constraint),)
    slots = sequence.lease.table.slots
    return ScheduledSequence(sequence.request.request_id, token_ids[end - 1 :], end - 1, slots, samples)


def schedule_proposal(sequence: Sequence, proposed: NDArray[np.int64]) -> ScheduledSequence:
    """Return the next token of a decoding sequence with proposed tokens behind it, as far as the answer can continue
    behind them.

    Precondition: the sequence has slots for all of them, and no selective recompute.
    """
    constraints = _constraints(sequence.constraint, proposed.tolist())
    start, num_tokens = sequence.num_computed, sequence.num_tokens
    token_ids = np.concatenate([sequence.tokens(0, num_tokens), proposed[: len(constraints) - 1]])
    samples = tuple(
        _sample_spec(sequence, token_ids[: num_tokens + place], constraint)
        for place, constraint in enumerate(constraints)
    )
    slots = sequence.table.slots[: len(token_ids)]
    return ScheduledSequence(
        sequence.request_id, token_ids[start:], start, slots, samples, num_proposed=len(samples) - 1
    )


def _constraints(constraint: TokenConstraint | None, proposed: list[int]) -> list[TokenConstraint | None]:
    """Return the constraint now, and its states behind the proposed tokens up to the first that it does not allow or
    that ends the answer."""
    states = [constraint]
    for token_id in proposed:
        if constraint is not None:
            if not constraint.allows(token_id):
                break
            constraint = constraint.copy()
            constraint.advance(token_id)
            if constraint.is_complete or constraint.error is not None:
                break
        states.append(constraint)
    return states


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
        context = slots[np.concatenate([recompute.context, positions])]
        token_ids, first = sequence.tokens_at(positions), int(positions[0])
        return ScheduledSequence(sequence.request_id, token_ids, first, context, (), positions, is_query_pass=True)
    if sequence.to_compute is None:
        sequence.to_compute = recompute.to_compute(sequence.num_tokens)
    positions = sequence.to_compute[:budget]
    samples = _samples(sequence) if len(positions) == len(sequence.to_compute) else ()
    first, end = int(positions[0]), int(positions[-1]) + 1
    return ScheduledSequence(
        sequence.request_id,
        sequence.tokens_at(positions),
        first,
        slots[:end],
        samples,
        positions if end - first > len(positions) else None,
        mass_request=_mass_request(sequence, positions),
    )


def _mass_request(sequence: Sequence, positions: NDArray[np.int64]) -> MassRequest | None:
    """Return what to measure of these tokens' attention; None for tokens of an answer."""
    mass_sampler = sequence.lease.mass_sampler
    if mass_sampler is None or positions[-1] >= sequence.num_prompt_tokens:
        return None
    return mass_sampler.mass_request(positions)


def _samples(sequence: Sequence) -> tuple[SampleSpec, ...]:
    samples = (sequence, *sequence.followers)
    return tuple(_sample_spec(one, one.tokens(0, one.num_tokens), one.constraint) for one in samples)


def _sample_spec(sequence: Sequence, token_ids: NDArray[np.int64], constraint: TokenConstraint | None) -> SampleSpec:
    """Return how the token after these is picked: by a function of them and of the request, whatever the step."""
    request, params = sequence.request, sequence.request.sampling
    num_generated = len(token_ids) - sequence.num_prompt_tokens
    return SampleSpec(
        request.request_id,
        params,
        0.0 if params.is_greedy else uniform_at(params.seed, num_generated),
        token_ids,
        sequence.num_prompt_tokens,
        request.stop_token_ids if num_generated < params.min_tokens else _NONE_FORBIDDEN,
        constraint,
    )
