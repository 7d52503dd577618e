"""Measures the inputs of a plan: the model's costs, each question's search and prompt, and the lists of the index."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import faiss as _faiss
import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.backends.assembly import kv_shape
from stillroom.backends.engine_building import measured_costs
from stillroom.backends.placement_check import check_placement
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.config.settings import QueryCacheConfig, StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import SearchResult
from stillroom.core.ids import ChunkId
from stillroom.errors import ConfigError
from stillroom.models.causal_model import CausalModel
from stillroom.planner.documents import PlannedDocuments, read_documents
from stillroom.planner.simulation.search_station import SharedCores
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy, Prompt
from stillroom.planner.workload import PlannedWorkload, QuestionCounts
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.tiers.device_lists import parse_devices
from stillroom.retrieval.tiers.host_scan import scan
from stillroom.retrieval.tiers.partition import Lists
from stillroom.retrieval.tiers.search_profile import (
    Effort,
    SearchProfile,
    measure_device,
    measure_profile,
    probed_lists,
)
from stillroom.retrieval.vector_index import one_thread

faiss: Any = _faiss  # its stubs lack names that are defined at import

SEARCH_BATCH = 8
"""Most waiting questions that are searched together; larger batches were not measured."""
_NUM_TIMED = 20
_EFFORT = Effort(batch_sizes=(1, 2, 4, 8), num_queries=24)


@dataclass(frozen=True, slots=True)
class ObservedQuestion:
    """A question's prompt and search, as measured."""

    prompt: Prompt
    result: SearchResult
    """Includes the times of embedding and searching."""
    dense_seconds: float
    """The part spent in the dense index, with every list in RAM."""
    chunk_ids: tuple[ChunkId, ...] = ()
    """Chunks of the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class DivisibleIndex:
    """An index whose lists can be divided among tiers."""

    profile: SearchProfile
    """Measured with twice the probes of the knowledge base, so that more probes can be forecast."""
    nprobe: int
    heat: NDArray[np.float64]
    """Accesses of each list by the warm-up questions: [nlist]."""
    devices: tuple[str, ...] = ()
    """Devices that may hold lists."""
    shares_device: bool = False
    """Whether the model's device is among them."""

    def probed(self, question: int, share: float = 1.0) -> Lists:
        """Return the lists that a question probes, nearest first: [p]."""
        return self.profile.probed[question, : max(1, math.ceil(self.nprobe * share))]


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a question costs beyond its search and its steps alone; measured by `planner.overheads`."""

    request_seconds: float = 0.0
    """For each question: the way between search, engine and answer, and what a first step takes longer than one of
    many in a row."""
    step_seconds: float = 0.0
    """For each step, beyond the cost profile and scheduling; included in `HardwareModel.step_seconds`."""
    cores: SharedCores = field(default_factory=SharedCores)


@dataclass(frozen=True, slots=True, eq=False)
class PlanInputs:
    """All inputs of a plan."""

    hardware: HardwareModel
    policy: EnginePolicy
    query_cache: QueryCacheConfig
    found: tuple[ObservedQuestion, ...]
    texts: tuple[str, ...]
    workload: PlannedWorkload
    index: DivisibleIndex | None
    index_kind: str
    model_name: str
    is_calibrated: bool
    """Whether the costs come from `stillroom calibrate` and not from a quick pass."""
    documents: PlannedDocuments
    """What may be prepared."""
    overheads: Overheads = field(default_factory=Overheads)
    profile_path: Path | None = None
    """File of the model's cost profile, beside which the accuracy of plans is kept (`planner.accuracy`)."""


def measure_inputs(  # noqa: PLR0913
    kb: KnowledgeBase,
    config: StillroomConfig,
    questions: QuestionCounts,
    workload: PlannedWorkload,
    answer_tokens: int,
    clock: Clock,
    on_phase: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PlanInputs:
    """Measure all inputs of a plan.

    Args:
        say: called with the name of each phase as it begins.
        tell: called with the number of searched questions and of all.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: the settings do not fit the model.
        UsageError: there is too little memory to measure.
    """
    on_phase(f"loading {config.runtime.model}")
    costs = measured_costs(config, kb.path, clock)
    runtime, model = config.runtime, costs.model
    spec, shape = model.decoder.spec, kv_shape(model.decoder)
    hardware = HardwareModel(
        costs=costs.profile,
        bytes_per_token=shape.bytes_per_token,
        narrow_size=shape.num_bytes,
        num_layers=spec.num_layers,
        device_bytes=runtime.kv_bytes,
        max_model_len=spec.max_positions,
        max_seqs=runtime.max_num_seqs,
        step_tokens=max(runtime.max_num_batched_tokens, runtime.max_num_seqs),
        max_tokens=answer_tokens,
        block_size=runtime.block_size,
        sequence_seconds=costs.sequence_seconds,
        batch_delay_seconds=runtime.batch_delay_ms / 1000,
    )
    prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer), config.generation.chunk_order)
    on_phase("searching")
    max_tokens = spec.max_positions - answer_tokens
    max_tokens = min(max_tokens, config.generation.max_prompt_tokens or max_tokens)
    lists = None if config.search.mode == "sparse" else lists_of(kb)
    found = _search(kb, config, questions.texts, lists, prompts, max_tokens, clock, on_progress)
    index = None
    if lists is not None:
        index = _index_lists(kb, lists, questions, workload, on_phase)
        index = _with_devices(index, kb, lists, config, questions, model.decoder.device, on_phase)
    policy = EnginePolicy(
        reuse=config.reuse, scheduling=runtime.scheduling, window=runtime.starvation_window, prepare=config.prepare
    )
    prompts_of_warm = [found[number].prompt for number in workload.warm]
    return PlanInputs(
        replace(hardware, step_seconds=_deciding_seconds(hardware, policy, prompts_of_warm)),
        policy,
        config.query_cache,
        tuple(found),
        questions.texts,
        workload,
        index,
        kb.index_config.kind,
        model.name,
        costs.is_calibrated,
        _documents(kb, prompts, found, model.decoder, runtime.block_size, on_phase),
        profile_path=costs.path,
    )


def _documents(
    kb: KnowledgeBase,
    prompts: PromptBuilder,
    found: Sequence[ObservedQuestion],
    decoder: CausalModel,
    block_size: int,
    on_phase: Callable[[str], None],
) -> PlannedDocuments:
    on_phase("reading documents")
    refusal = ""
    try:
        check_placement(decoder, block_size)
    except ConfigError as error:
        refusal = str(error)
    returned = {scored.chunk.document_id for one in found for scored in one.result.results}
    return read_documents(kb, prompts, returned, refusal)


def _deciding_seconds(hardware: HardwareModel, policy: EnginePolicy, prompts: Sequence[Prompt]) -> float:
    """Return the median time of a scheduling step on this machine; simulated scheduling is the real code."""
    outcome = SimulatedRuntime(hardware, policy).ask(prompts[:_NUM_TIMED])
    return float(np.median(outcome.scheduling_seconds))


def _search(  # noqa: PLR0913
    kb: KnowledgeBase,
    config: StillroomConfig,
    texts: Sequence[str],
    lists: Any | None,
    prompts: PromptBuilder,
    max_tokens: int,
    clock: Clock,
    on_progress: Callable[[int, int], None],
) -> list[ObservedQuestion]:
    for _ in range(2):  # loads the embedder and the indexes
        kb.search("warm up")
    found = []
    if config.search.mode != "sparse":
        search_dense = _dense_search(kb, lists, max(config.search.num_candidates, config.search.top_k))
    for number, text in enumerate(texts):
        result = kb.search(text)
        dense_seconds = 0.0
        if config.search.mode != "sparse":
            vector = kb.embed_question(text)
            began = clock.monotonic()
            search_dense(vector)
            dense_seconds = min(clock.monotonic() - began, result.search_seconds)
        prompt = prompts.build([scored.chunk for scored in result.results], text, max_tokens)
        parts = tuple(segment.token_ids for segment in prompt.segments)
        found.append(ObservedQuestion(parts, result, dense_seconds, prompt.chunk_ids))
        on_progress(number + 1, len(texts))
    return found


def _index_lists(
    kb: KnowledgeBase, lists: Any, questions: QuestionCounts, workload: PlannedWorkload, on_phase: Callable[[str], None]
) -> DivisibleIndex:
    on_phase("profiling the index")
    vectors = np.stack([kb.embed_question(text) for text in questions.texts])
    nprobe = _nprobe(kb, lists)
    profile = measure_profile(lists, vectors, nprobe, kb.path, _EFFORT)
    wide = SearchProfile(
        profile.sizes, profile.bytes_per_vector, probed_lists(lists, vectors, 2 * nprobe), profile.model
    )
    asked = wide.probed[list(workload.warm), :nprobe]  # the measured questions come later, as in use
    heat = np.bincount(asked[asked >= 0].ravel(), minlength=len(wide.sizes)).astype(float)
    return DivisibleIndex(wide, nprobe, heat)


def _with_devices(  # noqa: PLR0913
    index: DivisibleIndex,
    kb: KnowledgeBase,
    lists: Any,
    config: StillroomConfig,
    questions: QuestionCounts,
    model_device: torch.device,
    on_phase: Callable[[str], None],
) -> DivisibleIndex:
    """Add the devices that may hold lists: those configured, else the GPUs if the model is on a GPU."""
    own = config.index
    if kb.index_config.nbits != 8 or not (own.device_bytes or model_device.type == "cuda"):
        return index
    devices = parse_devices(own.devices)
    shares_device = any(_is_same(torch.device(device), model_device) for device in devices)
    num_bytes = own.device_bytes or config.runtime.kv_bytes
    if not (own.device_bytes or shares_device):
        return index
    on_phase(f"profiling lists on {devices[0]}")
    vectors = np.stack([kb.embed_question(text) for text in questions.texts])
    costs = measure_device(lists, vectors, index.nprobe, devices[0], num_bytes, _EFFORT)
    if costs is None:
        return index
    profile = replace(index.profile, model=replace(index.profile.model, device=costs))
    return replace(index, profile=profile, devices=devices, shares_device=shares_device)


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Compare devices; a device without a number is the first."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _dense_search(kb: KnowledgeBase, lists: Any | None, num: int) -> Callable[[NDArray[np.float32]], object]:
    """Return a function that searches the dense index for `num` chunks.

    Lists on disk are searched in their RAM copy. Scoring with full vectors counts as the rest of a search.
    """
    index, effort = kb.indexes.current()[0], kb.indexes.effort()
    if lists is None or not isinstance(index, TieredIvfPqIndex):
        return lambda query: index.search(query, num, effort)
    nprobe, num_fetched = _nprobe(kb, lists), num * max(1, kb.index_config.refine)

    def search(query: NDArray[np.float32]) -> object:
        with one_thread():
            nearness, probed = lists.quantizer.search(query.reshape(1, -1), nprobe)
        return scan(lists, query, num_fetched, probed[0], nearness[0])

    return search


def _nprobe(kb: KnowledgeBase, lists: Any) -> int:
    return min(kb.indexes.effort() or kb.index_config.nprobe, int(lists.nlist))


def lists_of(kb: KnowledgeBase) -> Any | None:
    """Return the trained lists of an `ivf_pq` index as a read-only IndexIVFPQ in RAM, without full vectors.

    None for other kinds, and before training.
    """
    index = kb.indexes.current()[0]
    if isinstance(index, TieredIvfPqIndex):
        if not index.is_trained:
            return None
        snapshot = index.snapshot()  # keeps the quantizers alive, which the index drops when its file is replaced
        return faiss.clone_index(snapshot.whole())
    return index.parts[0] if isinstance(index, IvfPqIndex) else None
