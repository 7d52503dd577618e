"""The KV bytes on the compute device: one K and one V tensor per layer, addressed by slot.

Slot `block_id * block_size + offset` belongs to the block of that id; who may write it is `kvcache`'s decision. Slots
that were never written hold garbage, and nobody may attend to them. After the last block come the slots of one more,
which no pool knows of: rows that only pad a step write there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.core.batch import BlockCopy
from stillroom.core.ids import BlockId
from stillroom.ops import cpu_kernels
from stillroom.ops.rope import rotate

# L layers, S slots, T tokens of one node, G key/value heads, D head dimension, B bytes of one token in one layer


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV looks like in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def of_node(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of a node's KV away from its slots: [2, L, T, G, D], K first."""
        return (2, self.num_layers, num_tokens, self.num_kv_heads, self.head_dim)


class DeviceStore:
    """Room for `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.block_size = block_size
        self.scratch_slot = num_blocks * block_size
        size = (shape.num_layers, (num_blocks + 1) * block_size, shape.num_kv_heads, shape.head_dim)
        self.k_LSGD = torch.empty(size, dtype=shape.dtype, device=device)
        self.v_LSGD = torch.empty(size, dtype=shape.dtype, device=device)
        self.is_lost = False
        """Whether what was written here is gone; see `lose`."""
        self._is_on_host = device.type == "cpu"

    def lose(self) -> None:
        """As if the device had failed (a drill for RAGCache 6): nothing here can be read, and the next step notices."""
        self.k_LSGD.fill_(float("nan"))
        self.v_LSGD.fill_(float("nan"))
        self.is_lost = True

    def reset(self) -> None:
        """Ready for use again, empty."""
        self.is_lost = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.k_LSGD.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each [S, G, D]; writes go through to the store."""
        return self.k_LSGD[index], self.v_LSGD[index]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in all layers; every source is read before any target is written."""
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
            out: where to, contiguous [2, L, T, G, D], on this device or on the host; None for a new tensor here.

        Returns:
            `out`, when all of it is there.
        """
        runs = _runs(block_ids, num_tokens, self.block_size)
        if out is not None and self._is_on_host:
            kv_2LTGD = out
        else:
            kv_2LTGD = torch.empty(self.shape.of_node(num_tokens), dtype=self.shape.dtype, device=self.k_LSGD.device)
        assert kv_2LTGD.is_contiguous() and kv_2LTGD.shape == self.shape.of_node(num_tokens), kv_2LTGD.shape
        for kv_LTGD, kv_LSGD in zip(kv_2LTGD, (self.k_LSGD, self.v_LSGD), strict=True):
            if self._is_on_host:
                kv_LTB, kv_LSB = _bytes(kv_LTGD), _bytes(kv_LSGD)
                for run in runs:
                    kv_LTB[:, run.tokens] = kv_LSB[:, run.slots]
            elif len(runs) == 1:
                kv_LTGD.copy_(kv_LSGD[:, runs[0].slots])
            else:
                torch.index_select(kv_LSGD, 1, self._slots(runs), out=kv_LTGD)
        return kv_2LTGD if out is None or self._is_on_host else out.copy_(kv_2LTGD)

    def scatter(self, block_ids: Sequence[BlockId], kv_2LTGD: torch.Tensor) -> None:
        """Copy a node's KV into the first slots of these blocks; other slots keep what they have.

        Args:
            kv_2LTGD: contiguous, on this device or on the host, which may be overwritten after the return.
        """
        assert kv_2LTGD.is_contiguous() and kv_2LTGD.dtype == self.shape.dtype, kv_2LTGD.dtype
        runs = _runs(block_ids, kv_2LTGD.shape[2], self.block_size)
        kv_2LTGD = kv_2LTGD.to(self.k_LSGD.device)
        for kv_LTGD, kv_LSGD in zip(kv_2LTGD, (self.k_LSGD, self.v_LSGD), strict=True):
            if self._is_on_host:
                kv_LTB, kv_LSB = _bytes(kv_LTGD), _bytes(kv_LSGD)
                for run in runs:
                    kv_LSB[:, run.slots] = kv_LTB[:, run.tokens]
            elif len(runs) == 1:
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
        """Copy a node's KV into the first slots of these blocks, its keys turned on the way.

        Args:
            source: this store, where the node is in `source_block_ids`; or its KV, [2, L, T, G, D].
            turns: of `ops.rope.turns`, for its T tokens.
        """
        num_tokens = turns[0].shape[1]
        if not self._is_on_host or self.shape.dtype not in (torch.float32, torch.bfloat16):
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
        cpu_kernels.use_threads()
        cpu_kernels.turn_into(
            (cpu_kernels.array(sources[0]), cpu_kernels.array(sources[1])),
            source_slots,
            (cpu_kernels.array(self.k_LSGD), cpu_kernels.array(self.v_LSGD)),
            _slot_array(block_ids, num_tokens, self.block_size),
            (turns[0].numpy(), turns[1].numpy()),
        )

    def _slots(self, runs: list["_Run"]) -> torch.Tensor:
        slots = [slot for run in runs for slot in range(run.slots.start, run.slots.stop)]
        return torch.tensor(slots, device=self.k_LSGD.device)


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of a node whose slots follow each other."""

    slots: slice
    tokens: slice


def _runs(block_ids: Sequence[BlockId], num_tokens: int, block_size: int) -> list[_Run]:
    """The longest runs that the first `num_tokens` slots of these blocks make."""
    assert (len(block_ids) - 1) * block_size < num_tokens <= len(block_ids) * block_size, (block_ids, num_tokens)
    breaks = [i for i in range(1, len(block_ids)) if block_ids[i] != block_ids[i - 1] + 1]
    runs = []
    for first, last in zip([0, *breaks], [*breaks, len(block_ids)], strict=True):
        start, stop = first * block_size, min(last * block_size, num_tokens)
        slot = block_ids[first] * block_size
        runs.append(_Run(slice(slot, slot + stop - start), slice(start, stop)))
    return runs


def _bytes(kv_LTGD: torch.Tensor) -> NDArray[np.uint8]:
    """The same memory as bytes, [L, T, B]; NumPy, which has no bfloat16, copies them on this thread alone."""
    return kv_LTGD.view(torch.uint8).flatten(2).numpy()


def _slot_array(block_ids: Sequence[BlockId], num_tokens: int, block_size: int) -> NDArray[np.int64]:
    firsts = np.array(block_ids, dtype=np.int64) * block_size
    return (firsts[:, None] + np.arange(block_size)).ravel()[:num_tokens]
