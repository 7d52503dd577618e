"""Executes one step on the device: packs the batch, runs the decoder, samples.

Each step copies its packed batch to the device once, and its sampled tokens back once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.core.batch import (
    DEVIATION_LAYERS,
    AttentionMasses,
    Batch,
    SampledToken,
    SampleSpec,
    ScheduledSequence,
    StepResult,
    StepStopped,
    TokenLogprobs,
)
from stillroom.core.ids import RequestId
from stillroom.core.request import SamplingParams
from stillroom.errors import DeviceLostError
from stillroom.kvstore.device import DeviceStore
from stillroom.models.causal_model import CausalModel
from stillroom.models.packed import LayerKV, PackedInput
from stillroom.ops.attention import AttentionPlan, AttentionSpan
from stillroom.ops.attention_observers import AttentionObserver, AttentionObservers, MassObserver, QueryPassObserver
from stillroom.ops.sampling import logprobs, non_finite_rows, sample
from stillroom.ops.transfer import to_device
from stillroom.runner.decode_graphs import DecodeGraphs, StaticDecoding


class Runner(Protocol):
    """Executes steps: `TorchRunner` with a decoder, `ModelledRunner` with a model of its cost."""

    def execute(self, batch: Batch) -> StepResult:
        """Compute the batch's tokens, write their KV, and sample where asked. A batch may consist of copies only.

        Raises:
            DeviceLostError: the KV on the device is lost; other errors may mean this too, see
                `device_errors.is_device_loss`.
            StepStopped: as the batch allows.
        """
        ...

    def recover(self) -> None:
        """Prepare for steps after the device was lost, without any KV on it.

        Raises:
            Exception: the device cannot be used yet.
        """
        ...


class TorchRunner:
    """The decoder on a torch device, with its KV in a `DeviceStore`."""

    def __init__(self, decoder: CausalModel, store: DeviceStore) -> None:
        self.decoder = decoder
        self.store = store
        self.decoding: StaticDecoding | None = DecodeGraphs.of(decoder, store)
        self._shallow: CausalModel | None = None

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        self._check_store()
        if batch.copies:
            self.store.copy_blocks(batch.copies)
        deviations = {one.request_id: self._run_deviation_pass(one) for one in batch.sequences if one.is_deviation_pass}
        if deviations:
            batch = Batch(tuple(one for one in batch.sequences if not one.is_deviation_pass))
        if not batch.sequences:
            return StepResult({}, deviations=deviations)
        sampling = [row for sequence in batch.sequences for row in _sampled_rows(sequence)]
        attention: dict[RequestId, NDArray[np.float32]] = {}
        masses: dict[RequestId, AttentionMasses] = {}
        if self.decoding is not None and self.decoding.supports(batch):
            self.store.settle()  # a graph does not wait for layers one by one
            self._check_store()
            logits_BV = self.decoding.logits(batch)
        else:
            packed = self._pack(batch.sequences)
            observing = _BatchObserver(batch, packed)
            hidden_BM = self.decoder.hidden_states(packed, self._layers(batch), observing.observer)
            attention, masses = observing.results()
            if not sampling:
                return StepResult({}, {}, attention, deviations, masses, non_finite=_non_finite(attention))
            logits_BV = self.decoder.logits(hidden_BM)
        if broken := non_finite_rows(logits_BV):
            logits_BV = logits_BV.index_fill(0, torch.tensor(broken, device=logits_BV.device), 0.0)
        if len(rows := [row for row, samples in enumerate(sampling) for _ in samples]) > len(sampling):
            logits_BV = logits_BV[rows]  # several samples are drawn from the same logits
        specs = [spec for samples in sampling for spec in samples]
        is_broken = frozenset(index for index, row in enumerate(rows) if row in broken)
        picked = StepResult.of_samples(specs, _sampled(logits_BV, specs), is_broken)
        non_finite = picked.non_finite | _non_finite(attention)
        return replace(picked, attention=attention, deviations=deviations, masses=masses, non_finite=non_finite)

    def _layers(self, batch: Batch) -> LayerKV:
        """The KV of each layer; raises StepStopped where the batch shall stop."""
        should_stop = batch.should_stop
        if should_stop is None:
            return self.store.layer

        def layer(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if should_stop():
                raise StepStopped
            return self.store.layer(index)

        return layer

    def recover(self) -> None:
        """See `Runner.recover`. Allocates new memory for KV, and computes one token to check the model."""
        self.store.reset()
        if self.decoding is not None:
            self.decoding.reset()
        self._check_model()

    @torch.inference_mode()
    def _check_model(self) -> None:
        """Compute a token in the store's scratch slot; raises DeviceLostError if its logits are not finite."""
        spec = SampleSpec(RequestId("trial"), SamplingParams(), 0.0, np.zeros(1, np.int64), 1)
        slots = np.array([self.store.scratch_slot])
        packed = self._pack([ScheduledSequence(spec.request_id, spec.token_ids, 0, slots, (spec,))])
        logits_BV = self.decoder.logits(self.decoder.hidden_states(packed, self.store.layer))
        if not bool(logits_BV.isfinite().all()):
            raise DeviceLostError("the model's weights on the device are damaged")

    def _check_store(self) -> None:
        if self.store.is_lost:
            raise DeviceLostError("the KV on the device is gone")

    def _run_deviation_pass(self, sequence: ScheduledSequence) -> NDArray[np.float32]:
        """Run the first layers, and return each token's squared distance between its old and new values."""
        if self._shallow is None:
            self._shallow = self.decoder.first_layers(DEVIATION_LAYERS)
        slots_T = to_device(_own_slots(sequence), self.decoder.device)
        _, v_SGD = self.store.layer(self._shallow.spec.num_layers - 1)
        before_TGD = v_SGD[slots_T]
        self._shallow.hidden_states(self._pack((sequence,)), self.store.layer)
        distance_T = (v_SGD[slots_T].float() - before_TGD.float()).square().flatten(1).sum(1)
        return distance_T.cpu().numpy()

    def _pack(self, sequences: Sequence[ScheduledSequence]) -> PackedInput:
        device = self.decoder.device
        spans: list[AttentionSpan] = []
        wanted: list[int] = []
        start = 0
        for sequence in sequences:
            end = start + sequence.num_scheduled_tokens
            spans.append(
                AttentionSpan(start, end, self._context(sequence), len(sequence.slots), self._context_indices(sequence))
            )
            if sequence.samples:  # only a sequence's last token, and those before and among proposed ones, predict
                wanted += range(end - 1 - sequence.num_proposed, end)
            start = end
        return PackedInput(
            token_ids_T=to_device(np.concatenate([s.token_ids for s in sequences]), device),
            positions_T=to_device(np.concatenate([s.all_positions for s in sequences]), device),
            slots_T=to_device(np.concatenate([_own_slots(s) for s in sequences]), device),
            spans=spans,
            wanted=wanted,
        )

    def _context_indices(self, sequence: ScheduledSequence) -> torch.Tensor | None:
        """Return the indices in the context of the tokens of a sequence with gaps; None without gaps."""
        if sequence.positions is None or sequence.is_query_pass or sequence.num_scheduled_tokens == 1:
            return None
        return to_device(sequence.positions, self.decoder.device)

    def _context(self, sequence: ScheduledSequence) -> slice | torch.Tensor:
        """Return the slots, as a slice if they are contiguous, so that attention reads them without a copy."""
        slots = sequence.slots
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
            return slice(first, last + 1)
        return to_device(slots, self.decoder.device)


def _non_finite(numbers: Mapping[RequestId, NDArray[np.float32]]) -> frozenset[RequestId]:
    return frozenset(name for name, values in numbers.items() if not np.isfinite(values).all())


def _own_slots(sequence: ScheduledSequence) -> NDArray[np.int64]:
    """Return the slots where the KV of the scheduled tokens is written."""
    if sequence.positions is None or sequence.is_query_pass:
        return sequence.slots[len(sequence.slots) - sequence.num_scheduled_tokens :]
    return sequence.slots[sequence.positions]


class _BatchObserver:
    """Observers of attention for the entries of a batch that request them."""

    def __init__(self, batch: Batch, packed: PackedInput) -> None:
        assert isinstance(packed.plan, AttentionPlan)
        pairs = list(zip(batch.sequences, packed.plan.spans, strict=True))
        self._query_passes = {sequence.request_id: span for sequence, span in pairs if sequence.is_query_pass}
        self._attention = QueryPassObserver(list(self._query_passes.values()))
        self._masses = {
            sequence.request_id: MassObserver(span, sequence.mass_request)
            for sequence, span in pairs
            if sequence.mass_request is not None
        }
        observers: list[AttentionObserver] = [self._attention] if self._query_passes else []
        observers += self._masses.values()
        self.observer = AttentionObservers(observers) if observers else None

    def results(self) -> tuple[dict[RequestId, NDArray[np.float32]], dict[RequestId, AttentionMasses]]:
        """Return the shares of query passes, and the masses of entries with `mass_request`."""
        attention = dict(zip(self._query_passes, self._attention.shares(), strict=True)) if self._query_passes else {}
        return attention, {name: observer.masses() for name, observer in self._masses.items()}


def _sampled_rows(sequence: ScheduledSequence) -> list[tuple[SampleSpec, ...]]:
    """Return the samples of each row whose logits are wanted."""
    if sequence.num_proposed:
        return [(spec,) for spec in sequence.samples]
    return [sequence.samples] if sequence.samples else []


def _sampled(logits_BV: torch.Tensor, specs: list[SampleSpec]) -> list[SampledToken]:
    token_ids = sample(logits_BV, specs)
    wanted = [(row, spec.params.logprobs) for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    found: dict[int, TokenLogprobs] = {}
    if wanted:
        rows, counts = [row for row, _ in wanted], [count for _, count in wanted]
        found = dict(zip(rows, logprobs(logits_BV[rows], [token_ids[row] for row in rows], counts), strict=True))
    return [SampledToken(token_id, found.get(row)) for row, token_id in enumerate(token_ids)]
