"""Prompt lookup: proposes the tokens that followed the last few tokens earlier in a prompt or its answer.

A step computes the proposed tokens with the last token, and samples after each of them. Those that equal what was
sampled are accepted, so proposals change the number of steps and no token. `LookupAccounts` decides how many tokens to
propose, from the share of accepted ones and the measured time of steps. Design: docs/runtime.md
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stillroom.core.request import LookupCounts

LEAST_MATCHED, MOST_MATCHED = 2, 4
"""Lengths of the suffix that is looked up."""

_NUM_TIMES = 9
"""Times of steps of one shape that a median is taken of."""
_ROW_SHARE = 0.2
"""Assumed time of one more row, as a share of the step without proposals, until it is measured."""
_LEAST_GAIN = 1.05
"""Least expected gain in tokens per second with which tokens are proposed."""
_TRIAL_PERIOD = 64
"""Steps without proposals, although enough tokens would be accepted, after which the time of rows is measured again."""


class Proposal(NamedTuple):
    token_ids: NDArray[np.int64]
    """Shape [n]: the tokens that followed the most recent occurrence of the suffix."""
    num_matched: int
    """Length of the suffix."""


NO_PROPOSAL = Proposal(np.zeros(0, np.int64), 0)


def find_continuation(token_ids: NDArray[np.int64], max_tokens: int) -> Proposal:
    """Return what followed the most recent earlier occurrence of the longest suffix of 2 to 4 tokens.

    Args:
        max_tokens: most tokens to return; fewer follow where the occurrence is near the end.
    """
    size, num_matched = len(token_ids), 1
    if max_tokens <= 0 or size <= LEAST_MATCHED:
        return NO_PROPOSAL
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])  # indexes of the last token of occurrences
    while num_matched < MOST_MATCHED:
        longer = ends[ends >= num_matched]
        longer = longer[token_ids[longer - num_matched] == token_ids[size - 1 - num_matched]]
        if not len(longer):
            break
        ends, num_matched = longer, num_matched + 1
    if num_matched < LEAST_MATCHED:
        return NO_PROPOSAL
    first = int(ends[-1]) + 1
    return Proposal(token_ids[first : first + max_tokens], num_matched)


@dataclass(slots=True)
class AcceptanceRate:
    """Share of proposed tokens that were right, where the token before was; recent ones count most."""

    decay: float
    num_right: float = 0.0
    num_seen: float = 0.0

    def add(self, num_right: int, num_seen: int) -> None:
        weight = self.decay**num_seen
        self.num_right = self.num_right * weight + num_right
        self.num_seen = self.num_seen * weight + num_seen

    def mean(self, prior: float) -> float:
        """Return the rate, with a prior that counts as much as two tokens."""
        return (self.num_right + 2.0 * prior) / (self.num_seen + 2.0)


@dataclass(slots=True)
class SequenceLookup:
    """Prompt lookup of one request: its proposal in this step, and how earlier ones fared."""

    proposal: Proposal = NO_PROPOSAL
    """What could be proposed in this step; a beginning of it was, or none of it."""
    rate: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(decay=0.85))
    num_proposed: int = 0
    num_accepted: int = 0

    @property
    def counts(self) -> LookupCounts | None:
        """Counts of the request; None before the first proposal."""
        return LookupCounts(self.num_proposed, self.num_accepted) if self.num_proposed else None


class StepTimes:
    """Measured times of decoding steps, by number of sequences and rows (tokens)."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_TIMES))
        self._medians: dict[int, dict[int, float]] = defaultdict(dict)

    def add(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        if seconds > 0.0:
            recent = self._recent[num_sequences, num_rows]
            recent.append(seconds)
            self._medians[num_sequences][num_rows] = median(recent)

    def relative(self, num_sequences: int, most_more: int) -> NDArray[np.float64]:
        """Return the times [1 + most_more] of steps with 0, 1 ... more rows than sequences, as shares of the first.

        Between measured numbers of rows times are interpolated. Beyond them each row takes its mean share.
        """
        more = np.arange(most_more + 1, dtype=np.float64)
        known = self._medians.get(num_sequences, {})
        if num_sequences not in known:
            return assumed_times(most_more)
        rows = np.array(sorted(known), np.float64) - num_sequences
        times = np.array([known[row] for row in sorted(known)]) / known[num_sequences]
        slope = _ROW_SHARE if len(rows) == 1 else max(0.0, (times[-1] - times[0]) / rows[-1])
        return np.asarray(np.interp(more, rows, times) + slope * np.maximum(more - rows[-1], 0.0), np.float64)


def assumed_times(most_more: int) -> NDArray[np.float64]:
    """Return `StepTimes.relative` without measurements."""
    return np.asarray(1.0 + _ROW_SHARE * np.arange(most_more + 1), np.float64)


class LookupAccounts:
    """Decides how many tokens to propose: as many as give the most expected tokens per second.

    Rates are learnt from every possible proposal, also where none was made: the next token shows whether it was right.
    The same calls give the same decisions.
    """

    def __init__(self) -> None:
        self.num_proposed = 0
        self.num_accepted = 0
        self._times = StepTimes()
        self._rates = {length: AcceptanceRate(0.99) for length in range(LEAST_MATCHED, MOST_MATCHED + 1)}
        self._num_untried = 0

    @property
    def counts(self) -> LookupCounts:
        return LookupCounts(self.num_proposed, self.num_accepted)

    def lengths(self, lookups: Sequence[SequenceLookup], budget: int) -> list[int]:
        """Return how many tokens of each sequence's proposal to compute in a step of all these sequences.

        Args:
            budget: most tokens to propose in the step.
        """
        gains = [
            (rate**place, index)
            for index, lookup in enumerate(lookups)
            if (size := len(lookup.proposal.token_ids))
            for rate in (self._rate(lookup),)
            for place in range(1, size + 1)
        ]
        gains = sorted(gains, key=lambda gain: (-gain[0], gain[1]))[: max(0, budget)]
        lengths = [0] * len(lookups)
        for _, index in gains[: self._num_worth(len(lookups), np.array([gain for gain, _ in gains]))]:
            lengths[index] += 1
        return lengths

    def observe(self, lookup: SequenceLookup, num_proposed: int, token_ids: Sequence[int]) -> None:
        """Record the tokens that a sequence got in a step, of which all but one were proposed."""
        proposal, lookup.proposal = lookup.proposal, NO_PROPOSAL
        pairs = list(zip(proposal.token_ids.tolist(), token_ids, strict=False))
        num_right = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
        if pairs:
            num_seen = min(num_right + 1, len(pairs))
            lookup.rate.add(num_right, num_seen)
            self._rates[proposal.num_matched].add(num_right, num_seen)
        for counts in (lookup, self):
            counts.num_proposed += num_proposed
            counts.num_accepted += len(token_ids) - 1

    def observe_step(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        """Record the time of a step in which every sequence decoded."""
        self._times.add(num_sequences, num_rows, seconds)

    def _rate(self, lookup: SequenceLookup) -> float:
        return lookup.rate.mean(self._rates[lookup.proposal.num_matched].mean(0.5))

    def _num_worth(self, num_sequences: int, gains: NDArray[np.float64]) -> int:
        """Return how many tokens to propose, the most likely first.

        Args:
            gains: [n], descending: probability of each token to be accepted.
        """
        num_best = _num_fastest(num_sequences, gains, self._times.relative(num_sequences, len(gains)))
        if num_best:
            self._num_untried = 0
            return num_best
        num_assumed = _num_fastest(num_sequences, gains, assumed_times(len(gains)))
        self._num_untried += bool(num_assumed)
        if self._num_untried < _TRIAL_PERIOD:
            return 0
        self._num_untried = 0
        return num_assumed


def _num_fastest(num_sequences: int, gains: NDArray[np.float64], times: NDArray[np.float64]) -> int:
    """Return the number of proposed tokens with the most expected tokens per time; 0 if it gains too little."""
    speeds = np.concatenate([[num_sequences], num_sequences + np.cumsum(gains)]) / times
    best = int(np.argmax(speeds))
    return best if speeds[best] >= _LEAST_GAIN * speeds[0] else 0
