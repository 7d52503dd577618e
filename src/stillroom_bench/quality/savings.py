"""`stillroom bench savings`: prompt tokens that reuse saves on recorded retrieval results (Cache-Craft 5.2.1, Fig. 24).

Compares exact prefixes, exact prefixes with reordered passages, and reuse at any position. The knowledge tree and the
KV manager run without KV data. Tokens are counted, nothing is timed, so results are deterministic. How to read it:
docs/chunk-reuse.md
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from stillroom.core.prompt import SegmentKind
from stillroom.errors import UsageError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.blocks.block_table import BlockTable, num_blocks_for
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import ratio_of_means, wilson
from stillroom_bench.loads.passage_repetition import repeated_prefixes, sources, top_passages
from stillroom_bench.loads.policy_replay import PROFILE, NoMover, serve
from stillroom_bench.loads.request_lengths import length_row, read_lengths
from stillroom_bench.loads.retrieved_traces import Retrieved, count_tokens, read_retrieved
from stillroom_bench.loads.reuse_workloads import SYSTEM_TOKENS, Ask, document_ask
from stillroom_bench.quality.quality_options import SavingsOptions

FULL = "full recompute"
PREFIX = "prefix cache"
SET = "set-cache"
BLOCK_SIZE = 16
_NOTES = (
    f"A passage has 1.3 tokens per word. A prompt also has {SYSTEM_TOKENS} tokens of system prompt and a question, "
    "which has 32 tokens if its text is unknown.",
    "Redundant tokens are those of passages that an earlier request contained. The query pass before selective "
    "recomputation is included in the computed tokens.",
    "Repeated passages: the top 5 % of the distinct passages are chosen on the same requests. `first 3 again`: share "
    "of requests whose first three passages, in this order, began an earlier request. Sources: the fewest earlier "
    "requests that together retrieved all passages of a request. Intervals: Wilson's, 95 %, over requests.",
    "Room: share of all distinct passages that fits on the device next to the longest prompt; there is no other tier.",
)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to reuse passages."""

    reorders: bool = False
    """Whether passages are reordered to begin with the longest cached path (SET-CACHE)."""
    ratio: float | None = None
    """Share of the tokens placed at other positions that is recomputed; None: exact prefixes only."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[Retrieved, ...]

    @cached_property
    def num_blocks_of_largest(self) -> int:
        return max(num_blocks_for(_ask(one, one.documents).segment_lengths, BLOCK_SIZE) for one in self.requests)

    @cached_property
    def num_distinct_blocks(self) -> int:
        """Number of blocks that hold every distinct passage once."""
        return num_blocks_for([count_tokens(text) for text in self._distinct], BLOCK_SIZE)

    @cached_property
    def _distinct(self) -> set[str]:
        return {text for one in self.requests for text in one.documents}

    def num_blocks(self, capacity: float | None) -> int:
        """Return the device blocks for the longest prompt and a share of the passages; None: for all computed KV."""
        if capacity is not None:
            return self.num_blocks_of_largest + round(capacity * self.num_distinct_blocks)
        return sum(num_blocks_for(_ask(one, one.documents).segment_lengths, BLOCK_SIZE) for one in self.requests)

    def facts(self) -> dict[str, Any]:
        """Return a row of the report's first table."""
        full = full_recompute(self)
        num_documents = sum(len(one.documents) for one in self.requests)
        return {
            "trace": self.name,
            "requests": len(self.requests),
            "passages": num_documents,
            "distinct": len(self._distinct),
            "mean prompt tokens": f"{full.num_tokens / len(self.requests):.0f}",
            "redundant, of all tokens": f"{full.num_redundant / full.num_tokens:.1%}",
        }


@dataclass(slots=True)
class SavingsOutcome:
    """Token counts over all requests of a trace."""

    num_tokens: int = 0
    """Prompt tokens."""
    num_computed: int = 0
    num_redundant: int = 0
    """Tokens of passages that an earlier request contained."""
    num_redundant_computed: int = 0
    num_copies: tuple[int, ...] = field(default=(), compare=False)
    """Kept copies at the end of each passage that has any, most first; each stands behind other passages."""


def run_savings(options: SavingsOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Replay every trace with every strategy.

    Raises:
        UsageError: a file is not a trace, or two traces have the same name.
    """
    capacities, ratios = options.capacities, options.ratios
    environment = record_environment()
    loaded = [Trace(path.stem, tuple(read_retrieved(path))) for path in options.traces]
    if len({trace.name for trace in loaded}) < len(loaded):
        raise UsageError("two traces have the same name, which identifies them in the report; rename one")
    strategies = {PREFIX: Strategy(), SET: Strategy(reorders=True)}
    strategies |= {f"anywhere, {share_name(ratio)} computed again": Strategy(ratio=ratio) for ratio in ratios}
    rows, kept = [], []
    for trace in loaded:
        rows.append(_row(trace.name, "none", FULL, full_recompute(trace), None))
        for capacity in (None, *capacities):
            room = "all" if capacity is None else share_name(capacity)
            on_progress(f"{trace.name}, room for {room}")
            found = {name: replay(trace, strategy, capacity) for name, strategy in strategies.items()}
            kept += [_copies(trace.name, room, name, outcome) for name, outcome in found.items()]
            rows += [_row(trace.name, room, name, outcome, found[PREFIX]) for name, outcome in found.items()]
        on_progress(f"{trace.name}, repetition")
    tables = {
        "Traces": [trace.facts() for trace in loaded],
        "Parts of the prompts": [_parts(trace) for trace in loaded],
        "Repeated passages": [_repetition(trace) for trace in loaded],
        "Tokens computed": rows,
        "Copies kept at the end of the trace": kept,
    }
    if options.lengths:
        tables["Lengths of recorded requests"] = [length_row(path.stem, read_lengths(path)) for path in options.lengths]
    parameters = {"capacities": list(capacities), "ratios": list(ratios), "block_size": BLOCK_SIZE}
    return BenchResult("stillroom bench savings", environment, parameters, Samples(), notes=list(_NOTES), tables=tables)


def replay(trace: Trace, strategy: Strategy, capacity: float | None) -> SavingsOutcome:
    """Serve all requests in sequence with KV on the device only."""
    pool = BlockPool(trace.num_blocks(capacity), BLOCK_SIZE)
    tree = KnowledgeTree(pool, NoMover(), PROFILE, TreeOptions(), lambda: 0.0)
    options = None if strategy.ratio is None else AnywhereOptions(strategy.ratio, "question")
    manager = KVCacheManager(pool, Reuse(tree, PrefixKeys(b"", BLOCK_SIZE), always_loads=True, anywhere=options))
    outcome, seen = SavingsOutcome(), set[str]()
    for request in trace.requests:
        ask = _ask(request, request.documents)
        if strategy.reorders:
            contents = [piece.content for piece in ask.pieces[1:]]
            order = set_cache_order(tree, tree.get(ask.pieces[0].key), contents)
            ask = _ask(request, [request.documents[at] for at in order])
        lease = Lease(ask.prompt, BlockTable(BLOCK_SIZE, ask.num_tokens), ask.pieces)
        reuse, num_query_pass = serve(manager, lease, ask)
        _count(outcome, request, seen)
        outcome.num_computed += ask.num_tokens - reuse.num_cached_tokens + num_query_pass
        outcome.num_redundant_computed -= sum(
            one.num_tokens - one.num_recomputed
            for one in reuse.segments
            if one.kind is SegmentKind.CHUNK and one.source is not None
        )
    outcome.num_redundant_computed += outcome.num_redundant
    kept = {piece.content for one in trace.requests for piece in _ask(one, one.documents).pieces[1:]}
    copies = (sum(node.tier is not None for node in tree.variants(content)) for content in kept)
    outcome.num_copies = tuple(sorted((count for count in copies if count), reverse=True))
    return outcome


def full_recompute(trace: Trace) -> SavingsOutcome:
    """Return the token counts without any reuse."""
    outcome, seen = SavingsOutcome(), set[str]()
    for request in trace.requests:
        _count(outcome, request, seen)
    outcome.num_computed, outcome.num_redundant_computed = outcome.num_tokens, outcome.num_redundant
    return outcome


def set_cache_order(tree: KnowledgeTree, root: Node | None, contents: Sequence[bytes]) -> list[int]:
    """Order documents so that they begin with the longest cached path (SET-CACHE, Cache-Craft 5.1.4).

    Args:
        root: node of the piece before the documents; None if it is not cached.
        contents: content keys of the documents, best first.

    Returns:
        Indices of the documents: first those of the cached path with the most tokens, where ties prefer better
        documents, then the others, best first.
    """

    def longest(node: Node, left: list[int]) -> tuple[int, list[int]]:
        best: tuple[int, list[int]] = (0, [])
        for at in left:
            child = next((one for one in tree.variants(contents[at]) if one.parent is node), None)
            if child is not None:
                num_tokens, path = longest(child, [other for other in left if other != at])
                best = max(best, (num_tokens + child.num_tokens, [at, *path]), key=lambda found: found[0])
        return best

    everything = list(range(len(contents)))
    path = [] if root is None else longest(root, everything)[1]
    return path + [at for at in everything if at not in path]


def _ask(request: Retrieved, documents: Sequence[str]) -> Ask:
    return document_ask([(text, count_tokens(text)) for text in documents], request.question_tokens)


def _count(outcome: SavingsOutcome, request: Retrieved, seen: set[str]) -> None:
    """Add the counts that do not depend on the strategy."""
    lengths = [count_tokens(text) for text in request.documents]
    pairs = zip(request.documents, lengths, strict=True)
    outcome.num_tokens += SYSTEM_TOKENS + sum(lengths) + request.question_tokens
    outcome.num_redundant += sum(length for text, length in pairs if text in seen)
    seen.update(request.documents)


def _parts(trace: Trace) -> dict[str, Any]:
    """Return the share of each part of the prompts (Cache-Craft Figure 5)."""
    passages = [float(sum(map(count_tokens, one.documents))) for one in trace.requests]
    questions = [float(one.question_tokens) for one in trace.requests]
    totals = [SYSTEM_TOKENS + own + asked for own, asked in zip(passages, questions, strict=True)]
    low, middle, high = np.percentile(totals, [5, 50, 95])
    parts = {"passages": passages, "question": questions, "system prompt": [float(SYSTEM_TOKENS)] * len(totals)}
    sizes = {"prompt tokens, p5": round(low), "p50": round(middle), "p95": round(high)}
    shares = {name: str(ratio_of_means(own, totals, block=1)) for name, own in parts.items()}
    return {"trace": trace.name} | sizes | shares


def _repetition(trace: Trace) -> dict[str, Any]:
    """Return how often the trace retrieves the same passages again (Cache-Craft Figures 3, 6 and 8a)."""
    requests = [one.documents for one in trace.requests]
    top, found = top_passages(requests), sources(requests)
    longest = max(map(len, requests))
    row: dict[str, Any] = {
        "trace": trace.name,
        "top 5 % of passages, of retrieved": str(top.of_slots),
        "requests with one of them": str(top.of_requests),
    }
    for length in range(1, longest + 1):
        row[f"first {length} again"] = str(repeated_prefixes(requests, length))
    row["all passages seen"] = 0 if found is None else found.num_requests
    row["of these, from one request"] = "" if found is None else str(found.of_one)
    row["from three or more"] = "" if found is None else str(found.of_at_least_three)
    return row


def _copies(trace: str, room: str, name: str, outcome: SavingsOutcome) -> dict[str, Any]:
    """Return the state of the store after the last request (Cache-Craft Figure 25)."""
    counts = outcome.num_copies
    several = sum(count > 1 for count in counts)
    return {
        "trace": trace,
        "room": room,
        "arm": name,
        "passages": len(counts),
        "copies": sum(counts),
        "passages with several": str(wilson(several, len(counts))) if counts else "-",
        "most of one": max(counts, default=0),
    }


def _row(trace: str, room: str, name: str, outcome: SavingsOutcome, prefix: SavingsOutcome | None) -> dict[str, Any]:
    """Return a row of shares; `prefix` is the outcome of prefix caching with the same capacity."""

    def share(part: int, whole: int) -> str:
        return f"{part / whole:.1%}" if whole else "-"

    row = {
        "trace": trace,
        "room": room,
        "arm": name,
        "computed": share(outcome.num_computed, outcome.num_tokens),
        "redundant saved": share(outcome.num_redundant - outcome.num_redundant_computed, outcome.num_redundant),
        "saved of what prefix cache computes": "",
        "and of its redundant tokens": "",
    }
    if prefix is not None and name != PREFIX:
        fewer = prefix.num_computed - outcome.num_computed
        fewer_redundant = prefix.num_redundant_computed - outcome.num_redundant_computed
        row["saved of what prefix cache computes"] = share(fewer, prefix.num_computed)
        row["and of its redundant tokens"] = share(fewer_redundant, prefix.num_redundant_computed)
    return row
