"""KV on the compute device: one K and one V tensor per layer, addressed by slot.

Slot `block_id * block_size + offset` belongs to the block of that id; `kvcache` decides what writes to it. Slots that
were never written hold garbage and must not be attended to. After the last block come the slots of one more block,
which is in no pool: the padding rows of a step write there.

With `preload_layers`, `scatter` and `place` copy in another thread, and every method waits for the copies it depends
on; see `layer_copies`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.core.batch import BlockCopy
from stillroom.core.ids import BlockId
from stillroom.core.kv import FULL_BITS
from stillroom.errors import DeviceLostError
from stillroom.kvstore.layer_copies import LayerCopies
from stillroom.ops import cpu_kernels
from stillroom.ops.cpu_compiler import serialised
from stillroom.ops.narrow import NarrowKV, Rotation, num_narrow_bytes, widen_into, widened
from stillroom.ops.rope import rotate

logger = logging.getLogger(__name__)

# L layers, S slots, T tokens of one node, G key/value heads, D head dimension, B bytes of one token in one layer


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of one token's KV in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def num_bytes(self, num_tokens: int, bits: int = FULL_BITS) -> int:
        """Bytes of a node's KV with this many bits a number (`NodeRecord.bits`)."""
        if bits == FULL_BITS:
            return self.bytes_per_token * num_tokens
        return num_narrow_bytes(self.of_node(num_tokens)[1:], bits)

    def of_node(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of a node's KV outside its slots: [2, L, T, G, D], K first."""
        return (2, self.num_layers, num_tokens, self.num_kv_heads, self.head_dim)


class DeviceStore:
    """KV of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.block_size = block_size
        self.scratch_slot = num_blocks * block_size
        self._device = device
        self.k_LSGD, self.v_LSGD = self._allocated()
        self.is_lost = False
        """Whether the contents are lost; see `lose`."""
        self.is_on_host = device.type == "cpu"
        """Whether its memory is the host's."""
        self._copies: LayerCopies | None = None

    def preload_layers(self) -> None:
        """Let `scatter` and `place` copy layer by layer in another thread, where kernels support it."""
        if self.is_on_host and self._has_kernels:
            self._copies = LayerCopies(self.shape.num_layers)

    @property
    def preloads_layers(self) -> bool:
        """Whether `scatter` and `place` read their source after they return, so that it must not change."""
        return self._copies is not None

    def settle(self) -> None:
        """Wait until `scatter` and `place` are complete. If one failed, the contents are lost."""
        if self._copies is None:
            return
        try:
            self._copies.settle()
        except Exception:
            self._fail()

    def close(self) -> None:
        """End the copying thread."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def lose(self) -> None:
        """Simulate a failed device (a drill for RAGCache 6): overwrite the contents; the next step notices."""
        if self._copies is not None:
            self._copies.drop()
        self.k_LSGD.fill_(float("nan"))
        self.v_LSGD.fill_(float("nan"))
        self.is_lost = True

    def reset(self) -> None:
        """Allocate new, empty memory after a loss. Raises, and the contents stay lost, if there is none."""
        if self._copies is not None:
            self._copies.drop()
        self.is_lost = True
        nothing = torch.empty(0, dtype=self.shape.dtype)
        self.k_LSGD, self.v_LSGD = nothing, nothing  # frees the old memory first
        self.k_LSGD, self.v_LSGD = self._allocated()
        self.is_lost = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.k_LSGD.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each [S, G, D]; writes go through to the store.

        Raises:
            DeviceLostError: KV could not be copied to it.
        """
        if self._copies is not None:
            try:
                self._copies.wait(index)
            except Exception as error:
                self._fail()
                raise DeviceLostError("KV could not be copied to the device") from error
        return self.k_LSGD[index], self.v_LSGD[index]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in all layers; every source is read before any target is written."""
        self.settle()
        source, target = (
            torch.tensor(ids, device=self.k_LSGD.device)
            for ids in ([copy.source for copy in copies], [copy.target for copy in copies])
        )
        for kv_LSGD in (self.k_LSGD, self.v_LSGD):
            blocks = kv_LSGD.view(len(kv_LSGD), -1, self.block_size, *kv_LSGD.shape[2:])
            blocks[:, target] = blocks[:, source]

    def gather(self, block_ids: Sequence[BlockId], num_tokens: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the first `num_tokens` slots of these blocks, in order.

        Args:
            out: target, contiguous [2, L, T, G, D], on this device or on the host; None for a new tensor here.

        Returns:
            The target, complete.
        """
        self.settle()
        runs = _runs(block_ids, num_tokens, self.block_size)
        if out is not None and self.is_on_host:
            kv_2LTGD = out
        else:
            kv_2LTGD = torch.empty(self.shape.of_node(num_tokens), dtype=self.shape.dtype, device=self.k_LSGD.device)
        assert kv_2LTGD.is_contiguous() and kv_2LTGD.shape == self.shape.of_node(num_tokens), kv_2LTGD.shape
        for kv_LTGD, kv_LSGD in zip(kv_2LTGD, (self.k_LSGD, self.v_LSGD), strict=True):
            if self.is_on_host:
                kv_LTB, kv_LSB = _bytes(kv_LTGD), _bytes(kv_LSGD)
                for run in runs:
                    kv_LTB[:, run.tokens] = kv_LSB[:, run.slots]
            elif len(runs) == 1:
                kv_LTGD.copy_(kv_LSGD[:, runs[0].slots])
            else:
                torch.index_select(kv_LSGD, 1, self._slots(runs), out=kv_LTGD)
        return kv_2LTGD if out is None or self.is_on_host else out.copy_(kv_2LTGD)

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """Whether the first `num_tokens` slots of these blocks hold finite numbers only.

        Reads them once: a float32 sum is finite exactly if its terms are, as long as these are far below 1e38.
        """
        self.settle()
        runs = _runs(block_ids, num_tokens, self.block_size)
        slot_sets = [run.slots for run in runs] if self.is_on_host or len(runs) == 1 else [self._slots(runs)]
        sums = [kv[:, slots].sum(dtype=torch.float32) for kv in (self.k_LSGD, self.v_LSGD) for slots in slot_sets]
        return bool(torch.stack(sums).isfinite().all())

    def scatter(self, block_ids: Sequence[BlockId], kv_2LTGD: torch.Tensor) -> None:
        """Copy a node's KV into the first slots of these blocks; other slots do not change.

        Args:
            kv_2LTGD: contiguous, on this device or on the host; may be overwritten after the return unless
                `preloads_layers`.
        """
        assert kv_2LTGD.is_contiguous() and kv_2LTGD.dtype == self.shape.dtype, kv_2LTGD.dtype
        runs = _runs(block_ids, kv_2LTGD.shape[2], self.block_size)
        if self.is_on_host:
            pairs = [(_bytes(kv), _bytes(into)) for kv, into in zip(kv_2LTGD, (self.k_LSGD, self.v_LSGD), strict=True)]

            def copy(layers: slice) -> None:
                for kv_LTB, kv_LSB in pairs:
                    for run in runs:
                        kv_LSB[layers, run.slots] = kv_LTB[layers, run.tokens]

            self._carry_out(copy)
            return
        kv_2LTGD = kv_2LTGD.to(self.k_LSGD.device)
        for kv_LTGD, kv_LSGD in zip(kv_2LTGD, (self.k_LSGD, self.v_LSGD), strict=True):
            if len(runs) == 1:
                kv_LSGD[:, runs[0].slots] = kv_LTGD
            else:
                kv_LSGD.index_copy_(1, self._slots(runs), kv_LTGD)

    def place(
        self,
        source: "DeviceStore | torch.Tensor",
        source_block_ids: Sequence[BlockId],
        block_ids: Sequence[BlockId],
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Copy a node's KV into the first slots of these blocks with its keys rotated.

        Args:
            source: this store, with the node in `source_block_ids`; or the node's KV, as for `scatter`.
            turns: of `ops.rope.turns`, for its T tokens.
        """
        num_tokens = turns[0].shape[1]
        if not self.is_on_host or not self._has_kernels:
            kv_2LTGD = self.gather(source_block_ids, num_tokens) if isinstance(source, DeviceStore) else source
            kv_2LTGD = kv_2LTGD.to(self.k_LSGD.device)
            cos_LT1P, sin_LT1P = (values[:, :, None] for values in turns)
            keys = rotate(kv_2LTGD[0].float(), cos_LT1P, sin_LT1P).to(self.shape.dtype)
            self.scatter(block_ids, torch.stack((keys, kv_2LTGD[1])))
            return
        if isinstance(source, DeviceStore):
            sources = (source.k_LSGD, source.v_LSGD)
            source_slots = _slot_array(source_block_ids, num_tokens, self.block_size)
        else:
            sources, source_slots = (source[0], source[1]), np.arange(num_tokens)
        k_from, v_from, k_to, v_to = (cpu_kernels.array(kv) for kv in (*sources, self.k_LSGD, self.v_LSGD))
        slots = _slot_array(block_ids, num_tokens, self.block_size)
        cos_LTP, sin_LTP = turns[0].numpy(), turns[1].numpy()
        rotate_into = (
            serialised(cpu_kernels.rotate_into) if self._copies is None else cpu_kernels.rotate_into_single_threaded
        )

        def copy(layers: slice) -> None:
            own = layers if len(cos_LTP) > 1 else slice(None)
            into = (k_to[layers], v_to[layers])
            rotate_into((k_from[layers], v_from[layers]), source_slots, into, slots, (cos_LTP[own], sin_LTP[own]))

        cpu_kernels.use_threads()
        self._carry_out(copy)

    def compile_placing(self) -> None:
        """Compile what `place` calls: seconds, once for each type of KV, for which no question waits."""
        if self.is_on_host and self._has_kernels:
            no_turns = torch.empty(self.shape.num_layers, 0, self.shape.head_dim // 2)
            self.place(self, (), (), (no_turns, no_turns))
            self.settle()

    def place_narrow(self, kv: NarrowKV, block_ids: Sequence[BlockId], rotation: Rotation) -> None:
        """Copy a node's narrow KV into the first slots of these blocks, widened, with its keys rotated.

        Args:
            kv: on this device or on the host; as for `scatter`.
            rotation: from position 0 to the keys' positions, on this device.
        """
        if not self.is_on_host or not self._has_kernels:
            self.scatter(block_ids, widened(kv.to(self.k_LSGD.device), rotation, self.shape.dtype))
            return
        slots = _slot_array(block_ids, rotation[0].shape[1], self.block_size)
        is_alone = self._copies is None

        def copy(layers: slice) -> None:
            own = layers if len(rotation[0]) > 1 else slice(None)
            targets = (self.k_LSGD[layers], self.v_LSGD[layers])
            widen_into(kv.of(layers), (rotation[0][own], rotation[1][own]), targets, slots, is_alone=is_alone)

        self._carry_out(copy)

    def _allocated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate K and V, each [L, S, G, D]."""
        num_slots = self.scratch_slot + self.block_size
        size = (self.shape.num_layers, num_slots, self.shape.num_kv_heads, self.shape.head_dim)
        k_LSGD, v_LSGD = (torch.empty(size, dtype=self.shape.dtype, device=self._device) for _ in range(2))
        return k_LSGD, v_LSGD

    @property
    def _has_kernels(self) -> bool:
        return self.shape.dtype in (torch.float32, torch.bfloat16)

    def _carry_out(self, copy: Callable[[slice], None]) -> None:
        """Run a copy now, or queue it for the copying thread."""
        if self._copies is None:
            copy(slice(None))
        else:
            self._copies.add(copy)

    def _fail(self) -> None:
        logger.warning("copying KV to the device failed; all KV there counts as lost", exc_info=True)
        self.is_lost = True

    def _slots(self, runs: list["_SlotRun"]) -> torch.Tensor:
        slots = [slot for run in runs for slot in range(run.slots.start, run.slots.stop)]
        return torch.tensor(slots, device=self.k_LSGD.device)


@dataclass(frozen=True, slots=True)
class _SlotRun:
    """Tokens of a node in consecutive slots."""

    slots: slice
    tokens: slice


def _runs(block_ids: Sequence[BlockId], num_tokens: int, block_size: int) -> list[_SlotRun]:
    """Return the longest runs of consecutive slots among the first `num_tokens` slots of these blocks."""
    assert (len(block_ids) - 1) * block_size < num_tokens <= len(block_ids) * block_size, (block_ids, num_tokens)
    breaks = [i for i in range(1, len(block_ids)) if block_ids[i] != block_ids[i - 1] + 1]
    runs = []
    for first, last in zip([0, *breaks], [*breaks, len(block_ids)], strict=True):
        start, stop = first * block_size, min(last * block_size, num_tokens)
        slot = block_ids[first] * block_size
        runs.append(_SlotRun(slice(slot, slot + stop - start), slice(start, stop)))
    return runs


def _bytes(kv_LTGD: torch.Tensor) -> NDArray[np.uint8]:
    """View as bytes, [L, T, B], for NumPy, which has no bfloat16 and copies on the calling thread only."""
    return kv_LTGD.view(torch.uint8).flatten(2).numpy()


def _slot_array(block_ids: Sequence[BlockId], num_tokens: int, block_size: int) -> NDArray[np.int64]:
    firsts = np.array(block_ids, dtype=np.int64) * block_size
    return (firsts[:, None] + np.arange(block_size)).ravel()[:num_tokens]
