"""The connector in vLLM's computing process: copies verified KV into blocks, and blocks into records. Knows no vLLM."""

import logging
from collections.abc import Mapping

import torch

from stillroom.backends.vllm.block_copies import BlockCopies
from stillroom.backends.vllm.step_work import LayoutNote, PieceSave, StepWork
from stillroom.errors import ConfigError
from stillroom.kvstore.record import checksum_of, encode
from stillroom.kvstore.shared.shared_tier import SharedTier

logger = logging.getLogger(__name__)


class ComputingSide:
    def __init__(
        self, layers: Mapping[str, torch.Tensor], num_blocks: int, fingerprint: bytes, tier: SharedTier
    ) -> None:
        """
        Args:
            layers: vLLM's KV cache of each layer; the first dimension is that of the blocks.
            num_blocks: of vLLM's scheduler.

        Raises:
            ConfigError: the attention backend keeps other blocks than the scheduler counts.
        """
        split = [name for name, layer in layers.items() if len(layer) != num_blocks]
        if split:
            raise ConfigError(
                f"the KV cache of {split[0]} has {len(layers[split[0]])} blocks and vLLM's scheduler {num_blocks}; "
                "give --block-size as the attention backend wants it"
            )
        self._copies = BlockCopies(list(layers.values()))
        self._tier = tier
        self.layout = LayoutNote(fingerprint, self._copies.bytes_per_block)

    def load(self, work: StepWork) -> None:
        for load in work.loads:
            self._copies.scatter(load.content_BN, load.block_ids)

    def save(self, work: StepWork) -> None:
        """Copy the blocks of pieces that are due; another thread writes the records. KV that is not finite is not
        saved."""
        for save in work.saves:
            self._save(save)

    def _save(self, save: PieceSave) -> None:
        try:
            content_BN = self._copies.gather(save.block_ids)
        except (MemoryError, RuntimeError) as error:  # PyTorch's allocators raise the latter
            logger.warning("KV of %d tokens is not saved, as it cannot be copied: %s", save.record.num_tokens, error)
            return
        if content_BN is None:
            logger.warning("KV of %d tokens is not finite and is not saved", save.record.num_tokens)
            return
        payload = content_BN.reshape(-1).data
        header = encode(save.record, self.layout.fingerprint, len(payload), checksum_of(payload))
        self._tier.write(save.record, len(payload), lambda: (header, payload))
