"""Drives an engine on a checkpoint step by step, with an integrity check after each step."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import Dtype, RuntimeConfig
from stillroom.core.ids import BlockId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import FinishReason, Request, SamplingParams, seed_of_sample
from stillroom.engine.engine import Engine
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_decoder
from tests.devices import TEST_DEVICE
from tests.fakes import ManualClock


def engine_on(  # noqa: PLR0913  one parameter per size
    folder: Path,
    *,
    num_blocks: int = 256,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
    dtype: Dtype = "auto",
    device: str = TEST_DEVICE,
    prompt_lookup: int = 0,
) -> Engine:
    """Return an engine whose KV pool has exactly `num_blocks` blocks."""
    decoder = _decoder(folder, dtype, device)
    spec = decoder.spec
    per_block = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * decoder.dtype.itemsize * 16
    config = RuntimeConfig(
        kv_bytes=num_blocks * per_block,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prompt_lookup=prompt_lookup,
    )
    return build_engine(decoder, config, ManualClock())[0]


@lru_cache(maxsize=4)
def _decoder(folder: Path, dtype: Dtype, device: str) -> CausalModel:
    """Load a decoder once; it has no state, and hundreds of engines share it."""
    return load_decoder(folder, device=device, dtype=dtype)


def request(
    name: str,
    segments: Sequence[Sequence[int]],
    max_tokens: int = 64,
    stop: Sequence[int] = (),
    **sampling: Any,
) -> Request:
    """Return a request whose prompt has these segments: system, chunks, question."""
    kinds = [SegmentKind.SYSTEM, *[SegmentKind.CHUNK] * (len(segments) - 2), SegmentKind.QUESTION][-len(segments) :]
    prompt = SegmentedPrompt(tuple(Segment(k, tuple(ids)) for k, ids in zip(kinds, segments, strict=True)))
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(request_id=RequestId(name), prompt=prompt, sampling=params, stop_token_ids=frozenset(stop))


def random_segments(rng: np.random.Generator, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    return [rng.integers(3, vocab_size, size=length).tolist() for length in lengths]


def samples_of(one: Request, count: int) -> list[Request]:
    """Return the request and further samples of it, each with its own id and seed."""
    return [
        dataclasses.replace(
            one,
            request_id=RequestId(f"{one.request_id}/{index}"),
            sampling=dataclasses.replace(one.sampling, seed=seed_of_sample(one.sampling.seed, index)),
        )
        for index in range(count)
    ]


class Run:
    """Drives an engine and collects what each request produced."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.errors: dict[str, Exception] = {}
        self.num_steps = 0
        self.most_running = 0
        """Most requests that ran at the same time."""
        self.most_users = 0
        """Most users of one block: more than one after a fork."""
        self.num_preemptions = 0
        """Lower bound: steps after which more requests wait than before."""

    def submit(self, *requests: Request) -> None:
        for one in requests:
            self.tokens[one.request_id] = []
            self.engine.submit(one)

    def submit_samples(self, *requests: Request) -> None:
        """Submit a group of samples of one prompt."""
        for one in requests:
            self.tokens[one.request_id] = []
        self.engine.submit(*requests)

    def cancel(self, name: str) -> int:
        """Cancel a request; returns the number of freed blocks."""
        pool = self.engine.scheduler.kv.pool
        num_used = pool.num_used
        self.engine.cancel(RequestId(name))
        self.engine.check_integrity()
        return num_used - pool.num_used

    def step(self) -> None:
        scheduler = self.engine.scheduler
        num_waiting = scheduler.num_waiting
        for event in self.engine.step():
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.reasons[event.request_id] = event.finish_reason
            if event.error is not None:
                self.errors[event.request_id] = event.error
        self.engine.check_integrity()
        pool = scheduler.kv.pool
        self.most_users = max(self.most_users, *(pool.ref_count(BlockId(i)) for i in range(pool.num_blocks)))
        self.most_running = max(self.most_running, scheduler.num_running)
        self.num_preemptions += max(0, scheduler.num_waiting - num_waiting)
        self.num_steps += 1
        assert self.num_steps < 5000, "the engine makes no progress"

    def finish(self) -> None:
        """Run until no work is left, and assert that every block is free."""
        while self.engine.has_work:
            self.step()
        pool = self.engine.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks
