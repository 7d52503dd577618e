"""The documents that a plan may prepare: windows in the product's order, with their bytes and seconds."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from stillroom.backends.assembly import tree_options
from stillroom.backends.document_windows import cut_windows, longest_window
from stillroom.backends.prompt_builder import PromptBuilder
from stillroom.config.settings import PrepareConfig, ReuseConfig
from stillroom.core.document import DocumentInfo
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.prompt import Segment, SegmentedPrompt
from stillroom.kvstore.files import size_on_disk
from stillroom.planner.simulation.simulated_corpus import PreparingPrompt
from stillroom.planner.simulation.simulated_runtime import HardwareModel
from stillroom.rag.document_demand import DocumentDemand
from stillroom.rag.preparing import preparing_order
from stillroom.retrieval.knowledge_base import KnowledgeBase

_MOST_CHUNKS = 5_000
"""Documents that no question returned are read up to so many chunks, and estimated beyond."""


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """A document, with its chunks as segments of a prompt."""

    info: DocumentInfo
    chunks: tuple[Segment, ...] | None
    """None: not read; taken to be like the documents that were."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedDocuments:
    """The documents of a knowledge base, and the prompt around them."""

    documents: tuple[PlannedDocument, ...]
    frame: SegmentedPrompt
    """A prompt without chunks: system message and empty question."""
    refusal: str = ""
    """Why the model cannot run with `reuse.mode = "prepared"`; empty if it can."""

    @property
    def num_chunks(self) -> int:
        return sum(one.info.num_chunks for one in self.documents)

    @property
    def read(self) -> list[tuple[Segment, ...]]:
        """Chunks of the documents that were read."""
        return [one.chunks for one in self.documents if one.chunks is not None]


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """Consecutive chunks of a document that are prepared together."""

    prompt: PreparingPrompt | None
    """None: of a document that was not read."""
    num_chunks: int
    """Chunks that it prepares."""
    num_bytes: int
    """Of their records on disk."""
    seconds: float
    """Idle time to compute it."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedDocuments:
    """Windows that a budget pays for."""

    windows: tuple[PlannedWindow, ...]

    @property
    def num_chunks(self) -> int:
        return sum(window.num_chunks for window in self.windows)

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return sum(window.num_bytes for window in self.windows)

    @property
    def seconds(self) -> float:
        """Idle time to compute them."""
        return sum(window.seconds for window in self.windows)

    @property
    def prompts(self) -> list[PreparingPrompt]:
        """Of the documents that were read."""
        return [window.prompt for window in self.windows if window.prompt is not None]

    @property
    def chunk_ids(self) -> frozenset[ChunkId]:
        """Chunks that the prompts prepare."""
        return frozenset(chain.from_iterable(prompt.prepares for prompt in self.prompts))

    def first(self, num_prompts: int) -> "PreparedDocuments":
        """Return the windows up to this many prompts."""
        if num_prompts == len(self.prompts):
            return self
        ends = [at for at, window in enumerate(self.windows) if window.prompt is not None]
        return PreparedDocuments(self.windows[: ends[num_prompts]])


NOTHING_PREPARED = PreparedDocuments(())


def read_documents(
    kb: KnowledgeBase, prompts: PromptBuilder, found: Iterable[DocumentId], refusal: str
) -> PlannedDocuments:
    """Read the documents that questions returned, and others by chance up to a limit.

    Args:
        found: documents that questions returned.
        refusal: as in `PlannedDocuments`.
    """
    infos = kb.documents()
    needed = set(found)
    num_read = sum(info.num_chunks for info in infos if info.document_id in needed)
    for at in np.random.default_rng(24).permutation(len(infos)).tolist():
        if infos[at].document_id not in needed and num_read + infos[at].num_chunks <= _MOST_CHUNKS:
            needed.add(infos[at].document_id)
            num_read += infos[at].num_chunks

    def chunks_of(info: DocumentInfo) -> tuple[Segment, ...] | None:
        if info.document_id not in needed:
            return None
        return prompts.build(kb.chunks_of(info.document_id), "", None).segments[1:-1]

    documents = tuple(PlannedDocument(info, chunks_of(info)) for info in infos if info.num_chunks)
    return PlannedDocuments(documents, prompts.build((), "", None), refusal)


def all_windows(
    documents: PlannedDocuments, demand: DocumentDemand, hardware: HardwareModel, config: PrepareConfig
) -> PreparedDocuments:
    """Return the windows of all documents in the order of preparing. Chunks that are too long are in none.

    Documents that were not read are one window each, whose bytes and seconds are the mean of the others.
    """
    ordered = sorted(documents.documents, key=lambda one: preparing_order(one.info, demand))
    num_slots = hardware.device_bytes // hardware.bytes_per_token
    room = longest_window(config, min(hardware.max_model_len, num_slots // 2)) - documents.frame.num_tokens
    cut = [list(_windows_of(one, documents.frame, hardware, room, config)) for one in ordered]
    measured = PreparedDocuments(tuple(chain.from_iterable(cut)))
    num_chunks = max(1, measured.num_chunks)
    found = []
    for one, windows in zip(ordered, cut, strict=True):
        found += windows
        if one.chunks is None:
            share = one.info.num_chunks / num_chunks
            num_bytes = round(share * measured.num_bytes)
            found.append(PlannedWindow(None, one.info.num_chunks, num_bytes, share * measured.seconds))
    return PreparedDocuments(tuple(found))


def whole_windows(prepared: PreparedDocuments, num_chunks: int) -> PreparedDocuments:
    """Return the first windows that have at least this many chunks in all; all windows if they have fewer."""
    found: list[PlannedWindow] = []
    left = num_chunks
    for window in prepared.windows:
        if left <= 0:
            break
        found.append(window)
        left -= window.num_chunks
    return PreparedDocuments(tuple(found))


def first_chunks(
    prepared: PreparedDocuments, num_chunks: int, hardware: HardwareModel, config: PrepareConfig
) -> PreparedDocuments:
    """Return the first windows with this many chunks in all; the last one is cut."""
    whole = whole_windows(prepared, num_chunks)
    num_more = whole.num_chunks - num_chunks
    if num_more <= 0:
        return whole
    *others, last = whole.windows
    return PreparedDocuments((*others, _beginning(last, last.num_chunks - num_more, hardware, config)))


def within(prepared: PreparedDocuments, num_bytes: int) -> PreparedDocuments:
    """Return the first windows, until one does not fit."""
    found: list[PlannedWindow] = []
    for window in prepared.windows:
        num_bytes -= window.num_bytes
        if num_bytes < 0:
            break
        found.append(window)
    return PreparedDocuments(tuple(found))


def _windows_of(
    document: PlannedDocument, frame: SegmentedPrompt, hardware: HardwareModel, room: int, config: PrepareConfig
) -> Iterator[PlannedWindow]:
    chunks = document.chunks or ()
    for first, num_known, end in cut_windows([len(chunk.token_ids) for chunk in chunks], room, config.overlap):
        yield _window(frame, chunks[first:end], num_known, hardware, config)


def _window(
    frame: SegmentedPrompt, chunks: Sequence[Segment], num_known: int, hardware: HardwareModel, config: PrepareConfig
) -> PlannedWindow:
    system, question = frame.segments
    new = chunks[num_known:]
    options = tree_options(ReuseConfig(), hardware.bytes_per_token, prepare=config, narrow_size=hardware.narrow_size)
    records = (
        size_on_disk(options.num_bytes(len(chunk.token_ids), config.bits), at)
        for at, chunk in enumerate(new, start=num_known + 1)
    )
    prompt = SegmentedPrompt((system, *chunks, question))
    prepares = frozenset(chunk.chunk_id for chunk in new if chunk.chunk_id is not None)
    num_system = len(system.token_ids)
    seconds = hardware.costs.prefill_seconds(num_system, prompt.num_tokens - num_system)
    return PlannedWindow(PreparingPrompt(prompt, prepares), len(new), sum(records), seconds)


def _beginning(window: PlannedWindow, num_chunks: int, hardware: HardwareModel, config: PrepareConfig) -> PlannedWindow:
    """Return a window with only its first new chunks."""
    if window.prompt is None:
        share = num_chunks / window.num_chunks
        seconds = share * window.seconds
        return replace(window, num_chunks=num_chunks, num_bytes=round(share * window.num_bytes), seconds=seconds)
    system, *chunks, question = window.prompt.prompt.segments
    num_known = len(chunks) - window.num_chunks
    return _window(SegmentedPrompt((system, question)), chunks[: num_known + num_chunks], num_known, hardware, config)
