"""`stillroom bench preloading`: effect of loading chunks on the time to first token (Cache-Craft 5.4, Figure 29).

Prompts are those of `bench anywhere`. Their chunks are on the device, on the host, or on disk with (warm) or without
(cold) the page cache. They are loaded at once, prefetched, copied by layers, or both. The request runs alone, or waits
for the prefill of another request. How to read it: docs/chunk-reuse.md
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stillroom.backends.assembly import kv_shape
from stillroom.config.settings import ReuseConfig
from stillroom.core.kv import Tier
from stillroom.kvcache.chunk_reuse.layer_preloading import preload_depth, timeline
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvstore.files import record_paths
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_own_decoder
from stillroom_bench.experiments.anywhere_engine import (
    BenchEngine,
    build_fixture,
    cache_in_other_context,
    question,
    shuffled_prompt,
)
from stillroom_bench.experiments.experiment_options import AnywhereBenchOptions
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, run_arms
from stillroom_bench.quality.runtime import Shape, write_checkpoint

FROM_DEVICE = "from device"
_METRIC = "ttft_seconds"
_ANY_PROFILE = linear_profile(1e-3, 1e-4, 1e-7)
"""Cached KV is always loaded here, so the profile has no effect."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to load KV to the device."""

    label: str
    reads_ahead: bool = False
    by_layers: bool = False


WAYS = (Way("at once"), Way("read ahead", True), Way("by layers", False, True), Way("both", True, True))


@dataclass(frozen=True, slots=True)
class Place:
    """Location of the chunks' KV."""

    label: str
    tier: Tier
    is_cold: bool = False

    @property
    def ways(self) -> tuple[Way, ...]:
        """Ways that apply to the location: only disk is prefetched."""
        return WAYS if self.tier is Tier.DISK else tuple(way for way in WAYS if not way.reads_ahead)


PLACES = (
    Place(FROM_DEVICE, Tier.DEVICE),
    Place("from host", Tier.HOST),
    Place("from warm disk", Tier.DISK),
    Place("from cold disk", Tier.DISK, is_cold=True),
)
Moment = Literal["idle", "waiting"]


def run_preloading(
    options: AnywhereBenchOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark with the first of the ratios; arguments as of `run_anywhere`."""
    environment = record_environment()
    shape = shape or Shape()
    decoder = load_own_decoder(
        write_checkpoint(work_dir, shape, options.dtype, options.seed), device="cpu", dtype=options.dtype
    )
    moments: tuple[Moment, ...] = ("idle", "waiting")
    with _fixtures(decoder, options, work_dir) as fixtures:
        arms = [
            Arm(_name(moment, place, way), _ask(fixtures[way, place.tier], options, place, moment))
            for moment in moments
            for place in PLACES
            for way in place.ways
        ]
        samples = run_arms(
            arms, repeat=options.repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at}"), only_own=True
        )
    parameters = {
        "num_chunks": options.num_chunks,
        "chunk_tokens": options.chunk_tokens,
        "question_tokens": options.question_tokens,
        "recompute_ratio": options.ratios[0],
        "repeat": options.repeat,
        "seed": options.seed,
        "dtype": options.dtype,
        "num_parameters": shape.layer_parameters + shape.vocab_size * shape.hidden_size,
        "kv_bytes": kv_shape(decoder).bytes_per_token * options.num_chunks * options.chunk_tokens,
    }
    tables = {"What loading adds, seconds": _overheads(samples, moments, shape.num_layers)}
    baseline = f"{FROM_DEVICE}, {WAYS[0].label}"
    return BenchResult("stillroom bench preloading", environment, parameters, samples, baseline, tables=tables)


def _name(moment: Moment, place: Place, way: Way) -> str:
    return f"{moment}/{place.label}, {way.label}"


@contextmanager
def _fixtures(
    decoder: CausalModel, options: AnywhereBenchOptions, work_dir: Path
) -> Iterator[Mapping[tuple[Way, Tier], BenchEngine]]:
    """Yield an engine per way and tier that the device evicts to. One request runs at a time."""
    room = 4 * (options.prompt_tokens + 16 * (options.num_chunks + 2))
    fixtures = {}
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch, contextlib.ExitStack() as stack:
        for way in WAYS:
            reuse = ReuseConfig(
                mode="anywhere",
                audit_share=0.0,
                load="always",
                tail_blocks=10_000,  # caches nothing of the prompts that run first
                preload="layers" if way.by_layers else "off",
            )
            if not way.reads_ahead:
                reuse = replace(reuse, prefetch_bytes=0)
            for tier in {place.tier for place in PLACES if way in place.ways}:
                own = replace(reuse, host_bytes=0) if tier is Tier.DISK else reuse
                folder = Path(scratch) / way.label if tier is Tier.DISK else None
                fixture = fixtures[way, tier] = build_fixture(
                    decoder, options, own, folder, room, max_num_seqs=1, profile=_ANY_PROFILE
                )
                stack.callback(fixture.cache.close)
                fixture.allow(None)
                cache_in_other_context(options, fixture.ask)
                fixture.allow(AnywhereOptions(options.ratios[0], "question"))
        yield fixtures


def _ask(fixture: BenchEngine, options: AnywhereBenchOptions, place: Place, moment: Moment) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        prompt = shuffled_prompt(options, repetition)
        if place.tier is not Tier.DEVICE:
            fixture.evict_from_device()
        if place.is_cold:
            _drop_page_cache(fixture)
        if moment == "idle":
            reply = fixture.ask(prompt)
        else:
            long = replace(options, question_tokens=options.prompt_tokens // 2)
            fixture.submit([question(long, 2000 + repetition)], num_tokens=1)
            fixture.submit(prompt)
            while not fixture.engine.step():  # until the earlier request has its token
                pass
            reply = fixture.finish(time.perf_counter())
        assert reply.sources == {place.tier}, f"chunks came from {reply.sources}, not from {place.label}"
        return {_METRIC: reply.seconds}

    return run


def _drop_page_cache(fixture: BenchEngine) -> None:
    """Drop the records from the operating system's page cache, if the system supports it (Linux)."""
    assert fixture.cache.tiers is not None and fixture.cache.tiers.disk is not None
    for path in record_paths(fixture.cache.tiers.disk.folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _overheads(samples: Samples, moments: tuple[Moment, ...], num_layers: int) -> list[dict[str, Any]]:
    """Return medians minus that of chunks on the device, and the ideal overlap by Cache-Craft's Eq. 16."""
    rows = []
    for moment in moments:

        def median(place: Place, way: Way, moment: Moment = moment) -> float:
            return float(np.median(samples.of(_name(moment, place, way), _METRIC)))

        computing = median(PLACES[0], WAYS[0])
        for place in PLACES[1:]:
            loading = max(median(place, WAYS[0]) - computing, 0.0)
            depth = preload_depth(num_layers, computing, loading)
            layers = [[seconds / num_layers] * num_layers for seconds in (loading, computing)]
            ideal = timeline(layers[0], layers[1], depth, is_eager=True).finished[-1] - computing
            row = {"moment": moment, "chunks": place.label}
            row |= {way.label: f"{median(place, way) - computing:.4f}" if way in place.ways else "" for way in WAYS}
            rows.append(row | {"Eq. 16 depth": depth, "with ideal overlap": f"{ideal:.4f}"})
    return rows
