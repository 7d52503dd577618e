"""What of a sequence runs in a step: the next tokens of its prompt or answer, or of the repair of its chunks."""

import numpy as np
from numpy.typing import NDArray

from stillroom.core.batch import SampleSpec, ScheduledSequence
from stillroom.core.request import uniform_at
from stillroom.kvcache.repair import Repair
from stillroom.scheduler.sequence import Sequence


def take(sequence: Sequence, budget: int) -> ScheduledSequence:
    """The next tokens of a sequence, as many as the budget allows; changes nothing but what is remembered of them."""
    if sequence.lease.repair is not None:
        return _take_repair(sequence, sequence.lease.repair, budget)
    start = sequence.num_computed
    end = min(start + budget, sequence.num_tokens)
    samples = _samples(sequence, is_last=end == sequence.num_tokens)
    token_ids, slots = sequence.tokens(start, end), sequence.table.slots[:end]
    return ScheduledSequence(sequence.request_id, token_ids, start, slots, samples, groups=_groups(sequence, end))


def _take_repair(sequence: Sequence, repair: Repair, budget: int) -> ScheduledSequence:
    """The look of a sequence with placed chunks, or a piece of the pass behind it."""
    slots = sequence.table.slots
    if repair.needs_look:
        positions = repair.looks_from(sequence.num_tokens, budget)
        return _at(sequence, positions, slots[np.concatenate([repair.context, positions])], (), is_look=True)
    if sequence.to_compute is None:
        sequence.to_compute = repair.to_compute(sequence.num_tokens)
    positions = sequence.to_compute[:budget]
    samples = _samples(sequence, is_last=len(positions) == len(sequence.to_compute))
    end = int(positions[-1]) + 1
    return _at(sequence, positions, slots[:end], samples, groups=_groups(sequence, end))


def _at(
    sequence: Sequence,
    positions: NDArray[np.int64],
    context: NDArray[np.int64],
    samples: tuple[SampleSpec, ...],
    *,
    is_look: bool = False,
    groups: NDArray[np.int64] | None = None,
) -> ScheduledSequence:
    token_ids, first = sequence.tokens_at(positions), int(positions[0])
    return ScheduledSequence(sequence.request_id, token_ids, first, context, samples, positions, is_look, groups)


def _groups(sequence: Sequence, end: int) -> NDArray[np.int64] | None:
    """The pieces of the first tokens of a prompt, if it is to be measured how they attend to each other."""
    groups = sequence.lease.groups
    return None if groups is None or end > sequence.num_prompt_tokens else groups[:end]


def _samples(sequence: Sequence, *, is_last: bool) -> tuple[SampleSpec, ...]:
    """Of a sequence and its followers, once all of their tokens have run."""
    return tuple(map(_sample_spec, (sequence, *sequence.followers))) if is_last else ()


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
