"""Synthetic plan inputs: no model, no index, no file."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stillroom.config.settings import QueryCacheConfig, ReuseConfig
from stillroom.core.document import Chunk, DocumentInfo, ScoredChunk, SearchResult
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.kv import Link, Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.planner.documents import PlannedDocument, PlannedDocuments
from stillroom.planner.inputs import DivisibleIndex, ObservedQuestion, PlanInputs
from stillroom.planner.simulation.simulated_runtime import HardwareModel
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom.planner.workload import PlannedWorkload
from stillroom.retrieval.tiers.hit_rates import SearchTimes
from stillroom.retrieval.tiers.search_model import DeviceCosts, ScanModel
from stillroom.retrieval.tiers.search_profile import SearchProfile

NUM_LISTS, LIST_BYTES = 10, 64
LINKS = {Tier.HOST: Link(0.0, 1e5), Tier.DISK: Link(0.01, 1e4)}
PLANT = HardwareModel(
    costs=linear_profile(0.01, 0.001, 0.0, LINKS),
    bytes_per_token=1,
    num_layers=2,
    device_bytes=512,
    max_model_len=400,
    max_seqs=2,
)

FRAME = SegmentedPrompt((Segment(SegmentKind.SYSTEM, (1,) * 16), Segment(SegmentKind.QUESTION, (2, 3))))


def make_inputs(  # noqa: PLR0913  what tests vary
    *,
    has_lists: bool = True,
    num_requests: int = 30,
    rate: float = 1.0,
    caches: bool = False,
    window_seconds: float = 0.1,
    num_devices: int = 0,
    device_seconds: float = 0.001,
) -> PlanInputs:
    """Ten questions, each over a document of its own; question n probes lists n and n + 1.

    Args:
        window_seconds: extra cost of a list on disk.
        num_devices: devices for lists; the first is the model's. Half of a list's bytes are ids, which stay in RAM.
        device_seconds: time of a batch on a device.
    """
    rng = np.random.default_rng(0)
    found = tuple(
        ObservedQuestion(
            ((1,) * 16, tuple(rng.integers(2, 90, size=96).tolist()), (2, 3, number)),
            SearchResult((), 0.001, 0.02),
            0.01,
        )
        for number in range(10)
    )
    drawn = rng.choice(10, size=2 * num_requests, p=np.arange(10, 0, -1) / 55).tolist()
    dues = np.sort(rng.uniform(0, num_requests / rate, size=num_requests)).tolist()
    workload = PlannedWorkload(tuple(drawn[:num_requests]), tuple(drawn[num_requests:]), tuple(dues), rate)
    index = None
    if has_lists:
        probed = np.array([[n, (n + 1) % 10, (n + 2) % 10, (n + 3) % 10] for n in range(10)])
        times = SearchTimes((1, 2, 4), (0.001, 0.001, 0.001), (0.2, 0.4, 0.8))
        model = ScanModel(times, 0.0, 0.002, 0.001, 0.0, window_seconds, 0.0, LIST_BYTES, 0.0, 0.0, 0.0, 20)
        if num_devices:
            model = replace(model, device=DeviceCosts(device_seconds, 0.0, 0.0))
        shape = (4, 16) if num_devices else (8, 8)
        profile = SearchProfile(np.full(NUM_LISTS, shape[0]), shape[1], probed, model)
        heat = np.bincount(probed[list(workload.warm), :2].ravel(), minlength=10).astype(float)
        index = DivisibleIndex(profile, 2, heat, ("cuda:0", "cuda:1")[:num_devices], num_devices > 0)
    return PlanInputs(
        PLANT,
        EnginePolicy(reuse=ReuseConfig(policy="lru")),
        QueryCacheConfig() if caches else QueryCacheConfig(max_tokens=0),
        found,
        tuple(f"question {number}" for number in range(10)),
        workload,
        index,
        "ivf_pq" if has_lists else "flat",
        "made",
        True,
        PlannedDocuments((), FRAME),
    )


def with_documents(
    made: PlanInputs, found: Sequence[Sequence[int]], *, num_chunks: int = 4, num_tokens: int = 16
) -> PlanInputs:
    """The same over documents of `num_chunks` chunks each, the last the newest.

    Args:
        found: chunks, numbered through all documents, that each question finds.
    """
    rng = np.random.default_rng(1)
    num_documents = max(map(max, found)) // num_chunks + 1
    chunks = [
        Segment(SegmentKind.CHUNK, tuple(rng.integers(2, 90, size=num_tokens).tolist()), ChunkId(number))
        for number in range(num_documents * num_chunks)
    ]
    documents = tuple(
        PlannedDocument(
            DocumentInfo(DocumentId(f"d{at}"), "", num_chunks, 1, float(at)),
            tuple(chunks[at * num_chunks : (at + 1) * num_chunks]),
        )
        for at in range(num_documents)
    )
    observed = tuple(
        ObservedQuestion(
            (FRAME.segments[0].token_ids, *(chunks[at].token_ids for at in numbers), (2, 3, question)),
            SearchResult(tuple(_scored(at, num_chunks) for at in numbers), 0.001, 0.002),
            0.001,
            tuple(map(ChunkId, numbers)),
        )
        for question, numbers in enumerate(found)
    )
    return replace(made, found=observed, documents=PlannedDocuments(documents, FRAME))


def _scored(number: int, num_chunks: int) -> ScoredChunk:
    return ScoredChunk(Chunk(ChunkId(number), DocumentId(f"d{number // num_chunks}"), number % num_chunks, ""), 1.0)


def with_costs(made: PlanInputs, seconds_per_token: float) -> PlanInputs:
    """The same with a slower or faster decoder."""
    costs = linear_profile(0.01, seconds_per_token, 0.0, LINKS)
    return replace(made, hardware=replace(made.hardware, costs=costs))
