"""Decoding steps computed from tensors at fixed addresses, and captured in CUDA graphs.

A graph replays hundreds of launches as one, with the shapes and addresses of its capture. So a step is padded to one of
a few sizes, and its numbers are copied into one tensor beforehand. Padding rows read and write only the store's scratch
slot.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.core.batch import Batch
from stillroom.kvstore.device import DeviceStore
from stillroom.models.causal_model import CausalModel
from stillroom.models.packed import PackedInput
from stillroom.ops.device_attention import DevicePlan, has_kernels
from stillroom.ops.transfer import to_device

# B rows, one per sequence, R most rows, V vocabulary, C slots of all contexts back to back

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows that a step is padded to."""

_NUM_COLUMNS = 7  # token id, position, slot, and the four numbers of a tile
_SLOTS_PER_KV_SLOT = 4  # sequences may share blocks, so contexts may have more slots together than the store


class StaticInput:
    """The numbers of one step at fixed addresses: token ids, positions, slots, tiles, contexts."""

    def __init__(self, num_slots: int, scratch_slot: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._scratch_slot = scratch_slot
        self._numbers = torch.zeros(SIZES[-1] * _NUM_COLUMNS + 1 + num_slots, dtype=torch.int64, device=device)

    def fill(self, batch: Batch) -> None:
        """Copy a batch to the device in one asynchronous transfer."""
        numbers = to_device(self._host_numbers(batch), self._numbers.device)
        self._numbers[: len(numbers)].copy_(numbers)

    def packed(self, num_rows: int, max_keys: int) -> PackedInput:
        """Return the first rows as the decoder's input; views of what `fill` writes."""
        token_ids_R, positions_R, slots_R, tiles_R4, slots_C = torch.split(
            self._numbers, [SIZES[-1]] * 3 + [SIZES[-1] * 4, 1 + self.num_slots]
        )
        plan = DevicePlan(tiles_R4.view(-1, 4)[:num_rows], slots_C, max_keys=max_keys)
        rows = slice(0, num_rows)
        return PackedInput(token_ids_R[rows], positions_R[rows], slots_R[rows], plan, list(range(num_rows)))

    def _host_numbers(self, batch: Batch) -> NDArray[np.int64]:
        sequences, num_rows = batch.sequences, len(batch.sequences)
        lengths = np.array([len(sequence.slots) for sequence in sequences], dtype=np.int64)
        numbers = np.empty(SIZES[-1] * _NUM_COLUMNS + 1 + lengths.sum(), dtype=np.int64)
        columns = numbers[: SIZES[-1] * 3].reshape(3, -1)
        columns[:] = np.array([[0], [0], [self._scratch_slot]])
        columns[0, :num_rows] = [sequence.token_ids[0] for sequence in sequences]
        columns[1, :num_rows] = lengths - 1
        columns[2, :num_rows] = [sequence.slots[-1] for sequence in sequences]
        tiles = numbers[SIZES[-1] * 3 : SIZES[-1] * _NUM_COLUMNS].reshape(-1, 4)
        tiles[:] = 0, 1, 0, 1  # one row, whose context is the scratch slot at index 0
        tiles[:, 0] = np.arange(len(tiles))
        tiles[:num_rows, 2] = 1 + np.cumsum(lengths) - lengths
        tiles[:num_rows, 3] = lengths
        contexts = numbers[SIZES[-1] * _NUM_COLUMNS :]
        contexts[0] = self._scratch_slot
        np.concatenate([sequence.slots for sequence in sequences], out=contexts[1:])
        return numbers


class StaticDecoding:
    """Computes the step that will be captured, launch by launch; runs on any device."""

    def __init__(self, decoder: CausalModel, store: DeviceStore) -> None:
        self._decoder, self._store = decoder, store
        self._input = self._new_input()

    def reset(self) -> None:
        """Use the store's new tensors after the device was lost."""
        self._input = self._new_input()

    def supports(self, batch: Batch) -> bool:
        """Whether every sequence runs one token and samples the next, and the batch fits the fixed sizes."""
        sequences = batch.sequences
        if not 0 < len(sequences) <= SIZES[-1]:
            return False
        is_decoding = all(sequence.num_scheduled_tokens == 1 and sequence.samples for sequence in sequences)
        return is_decoding and sum(len(sequence.slots) for sequence in sequences) <= self._input.num_slots

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return float32 logits [B, V], a row per sequence, which the next call overwrites; writes K and V."""
        num_rows = len(batch.sequences)
        self._input.fill(batch)
        return self._run(next(size for size in SIZES if size >= num_rows))[:num_rows]

    def _new_input(self) -> StaticInput:
        num_slots = max(_SLOTS_PER_KV_SLOT * self._store.scratch_slot, self._decoder.spec.max_positions)
        return StaticInput(num_slots, self._store.scratch_slot, self._decoder.device)

    def _run(self, num_rows: int) -> torch.Tensor:
        return self._compute(self._packed(num_rows))

    def _packed(self, num_rows: int) -> PackedInput:
        return self._input.packed(num_rows, self._decoder.spec.max_positions)

    def _compute(self, packed: PackedInput) -> torch.Tensor:
        return self._decoder.logits(self._decoder.hidden_states(packed, self._store.layer))


class DecodeGraphs(StaticDecoding):
    """A CUDA graph for each size, captured with the first step of that size."""

    def __init__(self, decoder: CausalModel, store: DeviceStore) -> None:
        super().__init__(decoder, store)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, PackedInput, torch.Tensor]] = {}
        self._memory: Any = None  # shared: no two graphs run at the same time

    @classmethod
    def of(cls, decoder: CausalModel, store: DeviceStore) -> "DecodeGraphs | None":
        """Return the graphs; None if the model cannot be recorded, or attention has no kernel that reads lengths from
        the device."""
        return cls(decoder, store) if decoder.has_fixed_launches and has_kernels(decoder.device) else None

    def reset(self) -> None:
        """See `StaticDecoding.reset`. Every graph is captured again."""
        self._graphs.clear()
        self._memory = None
        super().reset()

    def _run(self, num_rows: int) -> torch.Tensor:
        if num_rows not in self._graphs:
            with torch.cuda.device(self._decoder.device):
                self._graphs[num_rows] = self._capture(num_rows)
        graph, _, logits_BV = self._graphs[num_rows]
        graph.replay()
        return logits_BV

    def _capture(self, num_rows: int) -> tuple[torch.cuda.CUDAGraph, PackedInput, torch.Tensor]:
        """Capture the step in the static input.

        The step runs once before, because kernels cannot be compiled during a capture. The replay writes the same K and
        V again.
        """
        packed = self._packed(num_rows)
        self._compute(packed)
        graph = torch.cuda.CUDAGraph()
        # another thread (such as an embedder's) may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits_BV = self._compute(packed)
        self._memory = graph.pool()
        return graph, packed, logits_BV
