"""A server with a paged KV cache that drives both sides of the connector as vLLM does, without vLLM.

The KV of a token is a hash of the salt and of all tokens up to it, so KV of any other prompt, place or salt is seen.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from stillroom.backends.tier_opening import open_tier
from stillroom.backends.vllm.computing_side import ComputingSide
from stillroom.backends.vllm.connector_options import ConnectorOptions
from stillroom.backends.vllm.scheduling_side import SchedulingSide
from stillroom.config.settings import ReuseConfig
from stillroom.core.clock import Clock

BLOCK = 4
NUM_BLOCKS = 64
MODEL = bytes(range(32))


def request_of(name: str, tokens: Sequence[int], salt: str | None = None, **fields: Any) -> Any:
    """Return what the connector reads of vLLM's `Request`."""
    usual: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": list(tokens),
        "cache_salt": salt,
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "pooling_params": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "num_computed_tokens": 0,
        "num_in_flight_tokens": 0,
    }
    return SimpleNamespace(**usual | fields)


def kv_of(tokens: Sequence[int], salt: str | None, num_layers: int) -> torch.Tensor:
    """Return the KV of the last token: [layer, 2 heads, 6], small whole numbers."""
    digest = hashlib.sha256(repr((list(tokens), salt or "")).encode()).digest() * num_layers
    numbers = np.frombuffer(digest, np.uint8)[: num_layers * 12].astype(np.float32)
    numbers[:num_layers] += np.arange(num_layers)  # layers differ
    return torch.from_numpy(numbers).view(num_layers, 2, 6)


@dataclass
class PagedServer:
    """One server. Layers are views whose blocks, heads and tokens are not in this order in memory."""

    url: str
    clock: Clock
    save_at_use: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    fingerprint: bytes = MODEL
    num_layers: int = 2

    def __post_init__(self) -> None:
        config = ReuseConfig(kv_tier=self.url, **{"kv_tier_timeout_s": 2.0} | self.settings)
        tiers = [open_tier(config, self.fingerprint, self.clock, is_pinned=False) for _ in range(2)]
        self.reading, self.writing = tiers
        assert self.reading is not None and self.writing is not None
        dtypes = (torch.float32, torch.bfloat16)
        raw = [torch.full((NUM_BLOCKS, BLOCK, 2, 6), 255.0, dtype=dtypes[at % 2]) for at in range(self.num_layers)]
        self.layers = {f"layer {at}": layer.permute(0, 2, 1, 3) for at, layer in enumerate(raw)}  # [B, H, N, C]
        self.computing = ComputingSide(self.layers, NUM_BLOCKS, self.fingerprint, self.writing)
        options = ConnectorOptions(piece_tokens=2 * BLOCK, save_at_use=self.save_at_use, max_wait_s=60.0)
        self.scheduling = SchedulingSide(options, self.reading, self.computing.layout, BLOCK, self.clock)
        self.num_loaded = 0

    def begin(self, request: Any, num_local: int = 0) -> list[int]:
        """Give a request its blocks, load what the tier has, compute the rest; return the blocks.

        Args:
            num_local: tokens that the server has in its own cache.
        """
        num_tokens = len(request.prompt_token_ids)
        blocks = random.Random(request.request_id).sample(range(NUM_BLOCKS), -(-num_tokens // BLOCK))
        self._compute(request, blocks, 0, num_local)
        num_matched = self.poll(request, num_local)
        assert num_local + num_matched < num_tokens, "the last token must be computed"
        self.scheduling.allocated(request, blocks, num_matched)
        work = self.scheduling.step()
        assert not work.saves
        self.computing.load(work)
        self.num_loaded += num_matched
        self._compute(request, blocks, num_local + num_matched, num_tokens)
        request.num_computed_tokens = num_tokens
        return blocks

    def poll(self, request: Any, num_local: int) -> int:
        """Ask as vLLM's scheduler does, once per step, until there is an answer."""
        for _ in range(10):
            num_matched = self.scheduling.num_matched(request, num_local)
            if num_matched is not None:
                return num_matched
            assert self.reading is not None and self.reading.settle()
        raise AssertionError("the tier has settled, and there is no answer")

    def end(self, request: Any, blocks: Sequence[int]) -> bool:
        """End a request, save what is due, use its blocks for something else; return whether anything was due."""
        is_held = self.scheduling.finished(request, blocks)
        work = self.scheduling.step()
        assert work.held == ({request.request_id} if is_held else set()) and not work.loads
        self.computing.save(work)
        for layer in self.layers.values():
            layer[list(blocks)] = 255.0
        assert self.writing is not None and self.writing.settle()
        return is_held

    def serve(self, request: Any, num_local: int = 0) -> int:
        """Run a request from begin to end, check all its KV, and return how many tokens were loaded."""
        before = self.num_loaded
        blocks = self.begin(request, num_local)
        self.check(request, blocks)
        self.end(request, blocks)
        return self.num_loaded - before

    def check(self, request: Any, blocks: Sequence[int]) -> None:
        """Compare the KV of every token of a prompt with what computing it gives."""
        tokens = request.prompt_token_ids
        for at in range(len(tokens)):
            expected = kv_of(tokens[: at + 1], request.cache_salt, self.num_layers)
            for layer, want in zip(self.layers.values(), expected, strict=True):
                found = layer[blocks[at // BLOCK], :, at % BLOCK]
                assert torch.equal(found, want.to(layer.dtype)), f"other KV at token {at}"

    def close(self) -> None:
        for tier in (self.reading, self.writing):
            assert tier is not None
            tier.close()

    def _compute(self, request: Any, blocks: Sequence[int], start: int, end: int) -> None:
        for at in range(start, end):
            kv = kv_of(request.prompt_token_ids[: at + 1], request.cache_salt, self.num_layers)
            for layer, new in zip(self.layers.values(), kv, strict=True):
                layer[blocks[at // BLOCK], :, at % BLOCK] = new.to(layer.dtype)
