"""A runner that models the time of each step on a virtual clock, without weights or tensors.

A step takes T(0, 1), the smallest step, plus T(cached, new) - T(0, 1) for each sequence, plus given overheads. Tokens
with gaps (selective recompute) cost as much as the same number of tokens without gaps that see as many tokens together.
Sampled tokens, query passes and deviation passes get numbers drawn from a seed and the request's name, so the same
requests give the same steps. Log probabilities and constraints are not modelled; block copies cost nothing.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.core.batch import (
    DEVIATION_LAYERS,
    AttentionMasses,
    Batch,
    MassRequest,
    SampledToken,
    SampleSpec,
    ScheduledSequence,
    StepResult,
)
from stillroom.core.clock import VirtualClock


class StepCosts(Protocol):
    """Cost of computing; implemented by `CostProfile`."""

    def prefill_seconds(self, num_cached: int, num_new: int) -> float:
        """Return T(cached, new), the seconds of a step of new tokens after cached ones."""
        ...


class ModelledRunner:
    """A `Runner` that advances a virtual clock and computes nothing."""

    def __init__(  # noqa: PLR0913  parameters of a machine
        self,
        costs: StepCosts,
        clock: VirtualClock,
        *,
        num_layers: int = 32,
        vocab_size: int = 32_000,
        seed: int = 0,
        step_seconds: float = 0.0,
        sequence_seconds: float = 0.0,
    ) -> None:
        """
        Args:
            num_layers: layers of the modelled decoder; at least 2.
            vocab_size: bound of sampled token ids.
            step_seconds: overhead of each step: scheduling it, and recording its result.
            sequence_seconds: overhead of each sequence of a step after the first, such as sampling.
        """
        assert num_layers >= DEVIATION_LAYERS and vocab_size > 0
        self._costs = costs
        self._clock = clock
        self._num_layers = num_layers
        self._vocab_size = vocab_size
        self._seed = seed
        self._extra_seconds = step_seconds, sequence_seconds
        self.stretch: Callable[[float], float] | None = None
        """Returns how long a step takes beside other work, from the seconds that it takes alone; None: no other."""

    def execute(self, batch: Batch) -> StepResult:
        """See `Runner.execute`. Advances the clock by the time of the step."""
        seconds = self.step_seconds(batch)
        self._clock.advance(seconds if self.stretch is None else self.stretch(seconds))
        entries = batch.sequences
        specs = [spec for entry in entries for spec in entry.samples]
        return replace(
            StepResult.of_samples(specs, [SampledToken(self._token(spec)) for spec in specs]),
            attention={entry.request_id: self._attention(entry) for entry in entries if entry.is_query_pass},
            deviations={entry.request_id: self._deviations(entry) for entry in entries if entry.is_deviation_pass},
            masses={
                entry.request_id: even_masses(entry, entry.mass_request)
                for entry in entries
                if entry.mass_request is not None
            },
        )

    def recover(self) -> None:
        """No device can be lost here."""

    def step_seconds(self, batch: Batch) -> float:
        """Return the seconds of a step. Deviation passes run before it, each alone, through the first layers only."""
        deviation_passes = sum(self._seconds(entry) for entry in batch.sequences if entry.is_deviation_pass)
        whole = [self._seconds(entry) for entry in batch.sequences if not entry.is_deviation_pass]
        smallest = self._costs.prefill_seconds(0, 1)
        step = smallest + sum(max(seconds - smallest, 0.0) for seconds in whole) if whole else 0.0
        per_step, per_sequence = self._extra_seconds
        extra = per_step + per_sequence * (len(batch.sequences) - 1)
        return step + deviation_passes * DEVIATION_LAYERS / self._num_layers + extra

    def _seconds(self, entry: ScheduledSequence) -> float:
        """Return the seconds of a step with this entry alone."""
        count = entry.num_scheduled_tokens
        before = len(entry.slots) - count
        if entry.positions is not None and not entry.is_query_pass:
            before = max(0, round(float(entry.positions.mean()) - (count - 1) / 2))
        return self._costs.prefill_seconds(before, count)

    def _token(self, spec: SampleSpec) -> int:
        assert spec.constraint is None, "constraints are not modelled"
        token_id = self._number(f"{spec.request_id}/{len(spec.token_ids)}") % self._vocab_size
        while token_id in spec.forbidden:
            token_id = (token_id + 1) % self._vocab_size
        return token_id

    def _attention(self, entry: ScheduledSequence) -> NDArray[np.float32]:
        """Return random shares that sum to 1, shape [layers, 2, k]."""
        shape = (self._num_layers, 2, len(entry.slots))
        drawn_L2K = self._generator(entry).random(shape, np.float32) + np.float32(1e-6)
        shares_L2K: NDArray[np.float32] = drawn_L2K / drawn_L2K.sum(axis=2, keepdims=True)
        return shares_L2K

    def _deviations(self, entry: ScheduledSequence) -> NDArray[np.float32]:
        return self._generator(entry).random(entry.num_scheduled_tokens, np.float32)

    def _generator(self, entry: ScheduledSequence) -> np.random.Generator:
        return np.random.default_rng(self._number(f"{entry.request_id}@{entry.first_position}"))

    def _number(self, name: str) -> int:
        """Return a number that depends on the seed and the name only, in every process."""
        return zlib.crc32(f"{self._seed}/{name}".encode())


def even_masses(entry: ScheduledSequence, mass_request: MassRequest) -> AttentionMasses:
    """Return the attention mass if every token attends evenly to itself and to all tokens before it."""
    places = entry.first_position + mass_request.rows if entry.positions is None else entry.positions[mass_request.rows]
    shares = (1.0 / (places + 1)).astype(np.float32)
    paid = np.zeros((len(places), mass_request.num_groups), np.float32)
    received = np.zeros(len(mass_request.groups), np.float32)
    for row, (place, share) in enumerate(zip(places.tolist(), shares.tolist(), strict=True)):
        groups = mass_request.groups[:place]
        paid[row] = share * np.bincount(groups[groups >= 0], minlength=mass_request.num_groups)
        received[: place + 1] += share
    return AttentionMasses(paid, shares, received)
