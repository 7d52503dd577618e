"""Executes one step on the device: packs the batch, runs the decoder, samples. Decides nothing.

Numbers cross the border once per step in each direction: the packed batch goes to the device, the sampled tokens come
back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.core.batch import DEVIATION_LAYERS, AttentionMasses, Batch, SampleSpec, ScheduledSequence, StepResult
from stillroom.core.ids import RequestId
from stillroom.core.request import SamplingParams
from stillroom.errors import DeviceLostError
from stillroom.kvstore.device import DeviceStore
from stillroom.models.decoder import Decoder
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionPlan, AttentionSpan
from stillroom.ops.attention_observers import AttentionWatch, MassWatch, Watch, Watches
from stillroom.ops.sampling import logprobs, non_finite_rows, sample
from stillroom.ops.transfer import to_device
from stillroom.runner.decode_graphs import DecodeGraphs, StaticDecoding


class Runner(Protocol):
    """Whatever can execute a step: the real decoder, or a model of its cost."""

    def execute(self, batch: Batch) -> StepResult:
        """Compute the batch's tokens, write their KV, and sample where asked. A batch may consist of copies only.

        Raises:
            DeviceLostError: the KV on the device is gone. `device_errors.is_device_loss` knows what else says so.
        """
        ...

    def recover(self) -> None:
        """Be ready for steps again after the device was lost, with no KV on it.

        Raises:
            Exception: the device cannot be used yet.
        """
        ...


class TorchRunner:
    """The decoder on a torch device, with its KV in a `DeviceStore`."""

    def __init__(self, decoder: Decoder, store: DeviceStore) -> None:
        self.decoder = decoder
        self.store = store
        self.decoding: StaticDecoding | None = DecodeGraphs.of(decoder, store)
        self._shallow: Decoder | None = None

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """See `Runner.execute`."""
        self._check_store()
        if batch.copies:
            self.store.copy_blocks(batch.copies)
        deviations = {one.request_id: self._probe(one) for one in batch.sequences if one.is_deviation_pass}
        if deviations:
            batch = Batch(tuple(one for one in batch.sequences if not one.is_deviation_pass))
        if not batch.sequences:
            return StepResult({}, deviations=deviations)
        sampling = [sequence.samples for sequence in batch.sequences if sequence.samples]
        attention: dict[RequestId, NDArray[np.float32]] = {}
        masses: dict[RequestId, AttentionMasses] = {}
        if self.decoding is not None and self.decoding.takes(batch):
            self.store.settle()  # a graph asks for no layers
            self._check_store()
            logits_BV = self.decoding.logits(batch)
        else:
            packed = self._pack(batch.sequences)
            watching = _BatchWatch(batch, packed)
            hidden_BM = self.decoder.hidden_states(packed, self.store.layer, watching.watch)
            attention, masses = watching.results()
            if not sampling:
                return StepResult({}, {}, attention, deviations, masses, _not_finite(attention))
            logits_BV = self.decoder.logits(hidden_BM)
        non_finite = _not_finite(attention)
        if broken := non_finite_rows(logits_BV):
            non_finite |= {spec.request_id for row in broken for spec in sampling[row]}
            logits_BV = logits_BV.index_fill(0, torch.tensor(broken, device=logits_BV.device), 0.0)
        if len(rows := [row for row, samples in enumerate(sampling) for _ in samples]) > len(sampling):
            logits_BV = logits_BV[rows]  # several samples are drawn from the same logits
        picked = _sampled(logits_BV, [spec for samples in sampling for spec in samples])
        return replace(picked, attention=attention, deviations=deviations, masses=masses, non_finite=non_finite)

    def recover(self) -> None:
        """See `Runner.recover`. KV gets memory anew, and one token is computed to see whether the model still works."""
        self.store.reset()
        if self.decoding is not None:
            self.decoding.reset()
        self._try_out()

    @torch.inference_mode()
    def _try_out(self) -> None:
        """Compute a token in the store's scratch slot."""
        spec = SampleSpec(RequestId("trial"), SamplingParams(), 0.0, np.zeros(1, np.int64), 1)
        slots = np.array([self.store.scratch_slot])
        packed = self._pack([ScheduledSequence(spec.request_id, spec.token_ids, 0, slots, (spec,))])
        logits_BV = self.decoder.logits(self.decoder.hidden_states(packed, self.store.layer))
        if not bool(logits_BV.isfinite().all()):
            raise DeviceLostError("the model's weights on the device are damaged")

    def _check_store(self) -> None:
        if self.store.is_lost:
            raise DeviceLostError("the KV on the device is gone")

    def _probe(self, sequence: ScheduledSequence) -> NDArray[np.float32]:
        """Squared distance of each token's values in the second layer, before and after that layer has run over it."""
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
                AttentionSpan(start, end, self._context(sequence), len(sequence.slots), self._places(sequence))
            )
            if sequence.samples:  # only a sequence's last token predicts something new
                wanted.append(end - 1)
            start = end
        return PackedInput(
            token_ids_T=to_device(np.concatenate([s.token_ids for s in sequences]), device),
            positions_T=to_device(np.concatenate([s.all_positions for s in sequences]), device),
            slots_T=to_device(np.concatenate([_own_slots(s) for s in sequences]), device),
            spans=spans,
            wanted=wanted,
        )

    def _places(self, sequence: ScheduledSequence) -> torch.Tensor | None:
        """Where in its context the tokens of a sequence with gaps stand."""
        if sequence.positions is None or sequence.is_query_pass or sequence.num_scheduled_tokens == 1:
            return None
        return to_device(sequence.positions, self.decoder.device)

    def _context(self, sequence: ScheduledSequence) -> slice | torch.Tensor:
        """A slice where the slots happen to be one run, so that attention reads them in place."""
        slots = sequence.slots
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
            return slice(first, last + 1)
        return to_device(slots, self.decoder.device)


def _not_finite(numbers: Mapping[RequestId, NDArray[np.float32]]) -> frozenset[RequestId]:
    return frozenset(name for name, values in numbers.items() if not np.isfinite(values).all())


def _own_slots(sequence: ScheduledSequence) -> NDArray[np.int64]:
    """Where the tokens' KV is written."""
    if sequence.positions is None or sequence.is_query_pass:
        return sequence.slots[len(sequence.slots) - sequence.num_scheduled_tokens :]
    return sequence.slots[sequence.positions]


class _BatchWatch:
    """What a batch asks about attention."""

    def __init__(self, batch: Batch, packed: PackedInput) -> None:
        assert isinstance(packed.plan, AttentionPlan)
        pairs = list(zip(batch.sequences, packed.plan.spans, strict=True))
        self._looks = {sequence.request_id: span for sequence, span in pairs if sequence.is_query_pass}
        self._attention = AttentionWatch(list(self._looks.values()))
        self._masses = {
            sequence.request_id: MassWatch(span, sequence.mass_request)
            for sequence, span in pairs
            if sequence.mass_request is not None
        }
        watches: list[Watch] = [self._attention] if self._looks else []
        watches += self._masses.values()
        self.watch = Watches(watches) if watches else None

    def results(self) -> tuple[dict[RequestId, NDArray[np.float32]], dict[RequestId, AttentionMasses]]:
        """Of looks, and of who is weighed."""
        attention = dict(zip(self._looks, self._attention.shares(), strict=True)) if self._looks else {}
        return attention, {name: watch.masses() for name, watch in self._masses.items()}


def _sampled(logits_BV: torch.Tensor, specs: list[SampleSpec]) -> StepResult:
    token_ids = sample(logits_BV, specs)
    picked = {spec.request_id: token_id for spec, token_id in zip(specs, token_ids, strict=True)}
    wanted = [(row, spec, spec.params.logprobs) for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    if not wanted:
        return StepResult(picked)
    rows = [row for row, _, _ in wanted]
    found = logprobs(logits_BV[rows], [token_ids[row] for row in rows], [count for _, _, count in wanted])
    logprobs_of = {spec.request_id: one for (_, spec, _), one in zip(wanted, found, strict=True)}
    return StepResult(picked, logprobs_of)
