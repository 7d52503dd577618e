"""A device, a host and a disk without tensors: each slot remembers the hash of all tokens up to its own.

A reference implementation for everything that moves KV. Attending to a slot that does not hold exactly the prefix of
its token fails, which proves as much as comparing answers, at thousands of steps a second.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stillroom.core.batch import Batch, StepResult
from stillroom.core.ids import BlockId, RequestId
from stillroom.core.kv import FULL_BITS, NodeCopy, NodeKey, NodeRecord, Tier

Stored = list[bytes]


@dataclass
class PrefixMemory:
    """Implements `KVMover`, and runs batches."""

    block_size: int
    vocabulary: int = 50
    slots: dict[int, bytes] = field(default_factory=dict)
    lower: dict[Tier, dict[NodeKey, Stored]] = field(default_factory=lambda: {Tier.HOST: {}, Tier.DISK: {}})
    records: dict[NodeKey, NodeRecord] = field(default_factory=dict)
    damaged: set[NodeKey] = field(default_factory=set)
    """Records on disk that fail verification."""
    unreadable: set[NodeKey] = field(default_factory=set)
    """Records that cannot be read just now."""
    poisoned: set[bytes] = field(default_factory=set)
    """KV that is not finite."""
    is_disk_full: bool = False
    log: list[tuple[str, Tier]] = field(default_factory=list)
    expected: Counter[NodeKey] = field(default_factory=Counter)
    """Prefetch requests for each node on disk."""

    def _slots(self, block_ids: Sequence[BlockId], num_tokens: int) -> list[int]:
        return [block * self.block_size + i for block in block_ids for i in range(self.block_size)][:num_tokens]

    def prefetch(self, key: NodeKey, num_tokens: int, bits: int = FULL_BITS) -> bool:
        assert len(self.lower[Tier.DISK][key]) == num_tokens
        self.expected[key] += 1
        return True

    def cancel_prefetch(self, key: NodeKey) -> None:
        assert self.expected[key] > 0
        self.expected[key] -= 1

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        return not any(self.slots[slot] in self.poisoned for slot in self._slots(block_ids, num_tokens))

    def offload(self, copy: NodeCopy) -> bool:
        assert copy.key not in self.lower[Tier.HOST], "swapped out twice"
        held = [self.slots[slot] for slot in self._slots(copy.block_ids, copy.num_tokens)]
        self.lower[Tier.HOST][copy.key] = held
        self.log.append(("offload", Tier.HOST))
        return True

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        if source is Tier.DISK and key in self.unreadable:
            return False
        if source is Tier.DISK and key in self.damaged:
            self.lower[source].pop(key)
            return False
        for slot, value in zip(self._slots(block_ids, num_tokens), self.lower[source][key], strict=True):
            self.slots[slot] = value
        self.log.append(("load", source))
        return True

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        """Place KV of other tokens, which no exact reuse may find."""
        if copy.tier is Tier.DISK and copy.key in self.unreadable:
            return False
        if copy.tier is Tier.DISK and copy.key in self.damaged:
            self.lower[copy.tier].pop(copy.key)
            return False
        if copy.tier is Tier.DEVICE:
            held = [self.slots[slot] for slot in self._slots(copy.block_ids, copy.num_tokens)]
        else:
            held = self.lower[copy.tier][copy.key]
        assert len(held) == copy.num_tokens
        for slot, value in zip(self._slots(block_ids, copy.num_tokens), held, strict=True):
            self.slots[slot] = b"placed" + value
        self.log.append(("place", copy.tier))
        return True

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        assert record.key not in self.lower[Tier.DISK]
        if self.is_disk_full:
            return False
        slots = self._slots(block_ids, record.num_tokens)
        kv = [self.slots[slot] for slot in slots] if source is Tier.DEVICE else self.lower[Tier.HOST][record.key]
        self.lower[Tier.DISK][record.key] = kv
        self.records[record.key] = record
        self.damaged.discard(record.key)
        self.log.append(("store", source))
        return True

    def mark_used(self, key: NodeKey) -> None:
        assert key in self.lower[Tier.DISK] and not self.records[key].is_used
        self.records[key] = replace(self.records[key], is_used=True)

    def has(self, key: NodeKey, tier: Tier) -> bool:
        return key in self.lower[tier]

    def drop(self, key: NodeKey, tier: Tier) -> None:
        del self.lower[tier][key]

    def lose_device(self) -> None:
        self.slots.clear()

    def damage(self, randomness: random.Random, share: float) -> None:
        for key in sorted(self.lower[Tier.DISK]):
            if randomness.random() < share:
                self.damaged.add(key)


@dataclass
class PrefixRunner:
    """Executes batches on a `PrefixMemory`: the next token is a function of all tokens before it."""

    memory: PrefixMemory
    num_computed_tokens: int = 0
    histories: dict[RequestId, list[bytes]] = field(default_factory=dict)
    """What each request's slots must hold, position by position."""

    def protect(self, request_id: RequestId, prompt: Sequence[int]) -> None:
        """Register a request that will be submitted."""
        history, histories = b"", []
        for token in prompt:
            history = step(history, token)
            histories.append(history)
        self.histories[request_id] = histories

    def recover(self) -> None:
        self.memory.lose_device()

    def execute(self, batch: Batch) -> StepResult:
        memory, size = self.memory, self.memory.block_size
        for copy in batch.copies:
            for offset in range(size):
                if copy.source * size + offset in memory.slots:
                    memory.slots[copy.target * size + offset] = memory.slots[copy.source * size + offset]
        picked: dict[RequestId, int] = {}
        for entry in batch.sequences:
            before, histories = entry.first_position, self.histories[entry.request_id]
            held = [memory.slots.get(int(slot)) for slot in entry.slots[:before]]
            assert held == histories[:before], f"{entry.request_id} attends to KV of other tokens"
            history = histories[before - 1] if before else b""
            for position, token in enumerate(entry.token_ids.tolist(), start=before):
                history = step(history, token)
                memory.slots[int(entry.slots[position])] = history
            self.num_computed_tokens += entry.num_scheduled_tokens
            for sample in entry.samples:
                token = next_token(history, memory.vocabulary)
                picked[sample.request_id] = token
                own = self.histories[sample.request_id]
                assert own[-1] == history
                own.append(step(history, token))
        return StepResult(picked)


def step(history: bytes, token: int) -> bytes:
    return hashlib.blake2b(history + token.to_bytes(4, "little"), digest_size=12).digest()


def prefix_hash(tokens: Sequence[int]) -> bytes:
    history = b""
    for token in tokens:
        history = step(history, token)
    return history


def next_token(history: bytes, vocabulary: int) -> int:
    return int.from_bytes(history[:4], "little") % vocabulary


def answer_of(prompt: Sequence[int], max_tokens: int, stop: frozenset[int], vocabulary: int) -> list[int]:
    """Return what a sequence generates without a cache."""
    tokens, answer = list(prompt), []
    for _ in range(max_tokens):
        token = next_token(prefix_hash(tokens), vocabulary)
        if token in stop:
            break
        tokens.append(token)
        answer.append(token)
    return answer
