"""KV of chunks in the context of their own document: keeping it, placing it, its budgets and its end.

In the simulated memory each slot holds the hash of all tokens that its KV has seen. So a placed slot tells the exact
context of its copy, and each placement is compared with a hash of the system message and the copy's path.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stillroom.core.clock import VirtualClock
from stillroom.core.ids import ChunkId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.reuse import Reason
from stillroom.errors import NonFiniteError, PreparedFullError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from tests.kvcache.prefix_memory import PrefixMemory, prefix_hash, step

SIZE = 4
"""Tokens per block, per chunk and per system message; one byte each."""
SYSTEM, QUESTION, LENGTH_OF_QUESTION = 200, 300, 2
PREPARED = AnywhereOptions(0.0, "first", only_prepared=True)
ANYWHERE = AnywhereOptions(0.0, "first")

Path = tuple[int, ...]


def text_of(chunk: int) -> int:
    """Return the token of a chunk's text; chunks 100 apart have equal texts."""
    return chunk % 100


@dataclass(frozen=True)
class Answered:
    """Where the KV of an admitted question came from."""

    num_exact: int
    """Chunks of the exact prefix."""
    copies: dict[int, Path]
    """Document path of the copy of each placed chunk."""
    reasons: list[Reason]
    """Of each segment."""
    num_computed: int
    """Tokens."""


@dataclass
class PreparedFixture:
    """A manager over a simulated memory, which can restart."""

    anywhere: AnywhereOptions | None = PREPARED
    num_blocks: int = 256
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = PrefixMemory(SIZE)
        self.open()

    def open(self) -> None:
        self.pool = BlockPool(self.num_blocks, SIZE)
        options = TreeOptions(replicates_system=False, **self.options)
        profile = linear_profile(0.0, 1.0, 0.0)
        self.tree = KnowledgeTree(self.pool, self.memory, profile, options, VirtualClock().monotonic)
        keys = PrefixKeys(b"m", tail_tokens=SIZE)
        self.manager = KVCacheManager(self.pool, Reuse(self.tree, keys, anywhere=self.anywhere))

    def restart(self) -> None:
        """Stop and start again, with what is on disk."""
        on_disk = self.memory.lower[Tier.DISK]
        self.memory.slots.clear()
        self.memory.lower[Tier.HOST].clear()
        self.open()
        orphans = self.tree.restore([record for key, record in self.memory.records.items() if key in on_disk])
        assert orphans == []
        self.check()

    def check(self, *running: Lease) -> None:
        self.manager.check_integrity(running)

    def lease(self, chunks: Sequence[int], *, system: int = 0, **arguments: Any) -> Lease:
        segments = [Segment(SegmentKind.SYSTEM, (SYSTEM + system,) * SIZE)]
        segments += [Segment(SegmentKind.CHUNK, (text_of(one),) * SIZE, ChunkId(one)) for one in chunks]
        segments.append(Segment(SegmentKind.QUESTION, (QUESTION,) * LENGTH_OF_QUESTION))
        prompt = SegmentedPrompt(tuple(segments))
        return self.manager.new_lease(prompt, prompt.num_tokens + 4, **arguments)

    def admit(self, lease: Lease) -> int:
        num_cached = self.manager.try_admit(lease, [len(segment.token_ids) for segment in lease.prompt.segments])
        assert num_cached is not None
        self.check(lease)
        return num_cached

    # Preparing

    def preparing(self, window: Sequence[int], num_known: int = 0, **arguments: Any) -> Lease:
        return self.lease(window, prepares=frozenset(map(ChunkId, window[num_known:])), **arguments)

    def compute(self, lease: Lease, first: int, end: int) -> None:
        """Compute tokens behind an exact context, and keep what is complete after each."""
        slots, tokens = lease.table.slots.tolist(), lease.prompt.token_ids
        for position in range(first, end):
            before = prefix_hash(tokens[:position])
            assert position == 0 or self.memory.slots[slots[position - 1]] == before, "KV of another context"
            self.memory.slots[slots[position]] = step(before, tokens[position])
            self.manager.commit(lease, position + 1)
            self.check(lease)

    def prepare(
        self, window: Sequence[int], num_known: int = 0, *, num_tokens: int | None = None, **arguments: Any
    ) -> int:
        """Prepare a window, as far as its first `num_tokens` tokens; return how many tokens were computed."""
        lease = self.preparing(window, num_known, **arguments)
        num_cached = self.admit(lease)
        assert not lease.placements
        end = max(num_cached, lease.prompt.num_tokens if num_tokens is None else num_tokens)
        self.compute(lease, num_cached, end)
        self.manager.release(lease)
        self.check()
        return end - num_cached

    # Asking

    def ask(self, chunks: Sequence[int], document: Sequence[int] = (), **arguments: Any) -> Answered:
        """Answer a question from chunks, of which those in `document` stand there now in this order."""
        if document:
            places = {chunk: document.index(chunk) for chunk in chunks if chunk in document}
            ids = tuple(map(ChunkId, document))
            arguments["before"] = {ChunkId(chunk): ids[:place] for chunk, place in places.items()}
        lease = self.lease(chunks, **arguments)
        num_cached = self.admit(lease)
        slots, tokens = lease.table.slots.tolist(), lease.prompt.token_ids
        assert [self.memory.slots[slot] for slot in slots[:num_cached]] == _history(tokens[:num_cached])
        copies: dict[int, Path] = {}
        for placement in lease.placements:
            piece, path = lease.pieces[placement.piece_index], placement.node.document_path
            seen = [tokens[0]] * SIZE + [text_of(one) for one in path for _ in range(SIZE)]
            held = [self.memory.slots[slot] for slot in slots[piece.start : piece.end]]
            if path:
                assert held == [b"placed" + value for value in _history(seen)[-SIZE:]], "KV of another context"
            assert piece.chunk_id is not None
            copies[piece.chunk_id] = path
        num_computed = self._end(lease, num_cached)
        reasons = [segment.reason for segment in lease.reuse.segments] if lease.reuse else []
        return Answered(max(0, num_cached // SIZE - 1), copies, reasons, num_computed)

    def _end(self, lease: Lease, num_cached: int) -> int:
        """Compute the rest of a question, keep what may be kept, and release it; return the tokens computed."""
        slots, tokens = lease.table.slots.tolist(), lease.prompt.token_ids
        todo: Sequence[int] = range(num_cached, len(tokens))
        if lease.recompute is not None:
            todo = lease.recompute.to_compute(len(tokens)).tolist()
        for position in todo:
            before = self.memory.slots[slots[position - 1]] if position else b""
            self.memory.slots[slots[position]] = step(before, tokens[position])
        if lease.recompute is not None:
            self.manager.end_recompute(lease)
        self.manager.commit(lease, len(tokens))
        self.check(lease)
        self.manager.release(lease)
        self.check()
        return len(todo)

    # Looking

    def copies(self) -> list[Path]:
        """Return the document paths of all kept copies."""
        return sorted(node.document_path for node in self.tree if node.document_path)

    def copy(self, *path: int) -> Node:
        (node,) = [node for node in self.tree if node.document_path == path]
        return node

    def is_prepared(self, window: Sequence[int], num_known: int = 0, **arguments: Any) -> bool:
        try:
            return not self.manager.has_to_prepare(self.preparing(window, num_known, **arguments))
        except PreparedFullError:
            return False

    def exact(self, *chunks: int, system: int = 0) -> Node | None:
        return self.tree.get(self.lease(chunks, system=system).pieces[-1].key)

    def used(self, tier: Tier) -> set[bytes]:
        return {node.key for node in self.tree if node.is_used and node.is_in(tier)}

    def forget(self, removed: Collection[int], *running: Lease) -> int:
        gone = set(map(ChunkId, removed))
        num_dropped = self.manager.forget_chunks(lambda chunk_ids: chunk_ids - gone, running)
        self.check(*running)
        return num_dropped


def _history(tokens: Sequence[int]) -> list[bytes]:
    found, history = [], b""
    for token in tokens:
        history = step(history, token)
        found.append(history)
    return found


def prefixes(*window: int) -> list[Path]:
    return [window[: end + 1] for end in range(len(window))]


# Placing


@pytest.mark.parametrize("chunks", list(permutations((1, 2, 3, 4))))
def test_a_prompt_in_any_order_places_the_copies_with_the_longest_context(chunks: Path) -> None:
    fixture = PreparedFixture()
    fixture.prepare((2, 3))
    fixture.prepare((1, 2, 3))
    fixture.prepare((3, 4), num_known=1)
    assert fixture.copies() == [(1,), (1, 2), (1, 2, 3), (2,), (2, 3), (3, 4)], "3 alone is known, so it is not kept"
    answered = fixture.ask(chunks, (1, 2, 3, 4))
    assert answered.copies == {1: (1,), 2: (1, 2), 3: (1, 2, 3), 4: (3, 4)}
    assert answered.reasons == [Reason.HIT, *[Reason.PREPARED] * 4, Reason.TAIL]
    assert answered.num_computed == LENGTH_OF_QUESTION and answered.num_exact == 0


def test_chunks_of_an_exact_prefix_are_not_placed() -> None:
    fixture = PreparedFixture()
    fixture.ask((2, 1), (1, 2, 3))
    fixture.prepare((1, 2, 3))
    answered = fixture.ask((2, 1, 3), (1, 2, 3))
    assert answered.num_exact == 2 and answered.copies == {3: (1, 2, 3)}
    assert answered.reasons == [*[Reason.HIT] * 3, Reason.PREPARED, Reason.TAIL]


def test_a_chunk_without_a_copy_is_computed_between_placed_ones() -> None:
    fixture = PreparedFixture()
    fixture.prepare((1, 2))
    answered = fixture.ask((2, 9, 1), (1, 2))
    assert answered.copies == {2: (1, 2), 1: (1,)} and answered.num_computed == SIZE + LENGTH_OF_QUESTION


@dataclass
class Twin:
    """Slow model of what is kept without evictions, and of the document."""

    document: list[int] = field(default_factory=list)
    copies: set[tuple[int, Path]] = field(default_factory=set)
    """System message and path of each copy."""
    exact: dict[tuple[int, Path], int] = field(default_factory=dict)
    """The chunk whose prompt kept each exact path, given by system message and texts."""
    num_created: int = 0

    def create(self, text: int) -> int:
        self.num_created += 1
        return self.num_created * 100 + text

    def prepare(self, window: Sequence[int], num_known: int, num_tokens: int, system: int) -> None:
        for index, path in enumerate(prefixes(*window)):
            if index >= num_known and (index + 2) * SIZE <= num_tokens:
                self.copies.add((system, path))

    def ask(self, chunks: Sequence[int], system: int) -> tuple[int, dict[int, Path]]:
        """Return number of exact chunks and the copies placed behind them, and keep what becomes exact."""
        paths = [(system, tuple(map(text_of, path))) for path in prefixes(*chunks)]
        num_exact = next((index for index, path in enumerate(paths) if path not in self.exact), len(paths))
        placed = {}
        for chunk in chunks[num_exact:]:
            current = self.current_path(chunk)
            usable = [path for start in range(len(current)) if (system, path := current[start:]) in self.copies]
            if usable:
                placed[chunk] = max(usable, key=len)
        for kept, chunk in zip(paths, chunks, strict=True):
            if chunk in placed:
                break
            self.exact.setdefault(kept, chunk)
        return num_exact, placed

    def current_path(self, chunk: int) -> Path:
        return tuple(self.document[: self.document.index(chunk) + 1]) if chunk in self.document else (chunk,)

    def forget(self, chunk: int) -> None:
        self.copies = {(system, path) for system, path in self.copies if chunk not in path}
        dropped = [(system, texts) for (system, texts), owner in self.exact.items() if owner == chunk]
        self.exact = {
            (system, texts): owner
            for (system, texts), owner in self.exact.items()
            if not any(system == other and texts[: len(above)] == above for other, above in dropped)
        }


indices, systems = st.integers(0, 9), st.integers(0, 1)
edits = st.one_of(
    st.tuples(st.just("insert"), indices, st.integers(1, 3)),
    st.tuples(st.just("remove"), indices, st.booleans()),
    st.tuples(st.just("move"), indices, indices),
)
preparations = st.tuples(
    st.just("prepare"), indices, st.integers(1, 5), st.integers(0, 2), st.integers(0, 40), st.sampled_from([0, 0, 1])
)
questions = st.tuples(
    st.just("ask"), st.lists(indices, min_size=1, max_size=5), st.sampled_from([0, 0, 1]), st.booleans()
)


def edit(twin: Twin, fixture: PreparedFixture, name: str, index: int, value: int) -> None:
    document = twin.document
    index %= len(document) + (name == "insert")
    if name == "insert":
        document.insert(index, twin.create(value))
        return
    chunk = document.pop(index)
    if name == "move":
        document.insert(value % (len(document) + 1), chunk)
    elif value:  # else nothing is dropped yet, and the copies that have seen it must not be placed
        fixture.forget([chunk])
        twin.forget(chunk)


def follow(steps: Sequence[tuple[Any, ...]], texts: Sequence[int] = (1, 2, 3, 1, 2)) -> int:
    """Do the same steps with a manager and its twin; return how many chunks were placed."""
    fixture, twin, num_placed = PreparedFixture(), Twin(), 0
    twin.document = [twin.create(text) for text in texts]
    for name, *rest in steps:
        document = twin.document
        if name == "ask":
            chosen, system, knows_outsider = rest
            chunks = list(dict.fromkeys(document[index % len(document)] for index in chosen)) if document else []
            chunks += [9] if knows_outsider else []
            answered = fixture.ask(chunks, document, system=system)
            num_exact, placed = twin.ask(chunks, system)
            copies = {chunk: path for chunk, path in answered.copies.items() if path}  # others: test_behind_prepared
            assert copies == placed and answered.num_exact == num_exact
            num_placed += len(placed)
        elif name == "prepare" and document:
            first, length, num_known, num_tokens, system = rest
            window = document[first % len(document) :][:length]
            num_known = min(num_known, len(window) - 1)
            fixture.prepare(window, num_known, num_tokens=min(num_tokens, (len(window) + 1) * SIZE), system=system)
            twin.prepare(window, num_known, num_tokens, system)
        elif name != "prepare" and (document or name == "insert"):
            edit(twin, fixture, name, *rest)
        assert fixture.copies() == sorted(path for _, path in twin.copies)
    return num_placed


ALL_OF_IT = ("ask", [4, 2, 0, 1, 3], 0, False)


@given(st.lists(preparations | preparations | questions | questions | edits, max_size=14))
@example([("prepare", 0, 5, 0, 40, 0), ("insert", 2, 1), ALL_OF_IT, ("remove", 2, False), ALL_OF_IT])
@example([("prepare", 0, 5, 0, 40, 0), ("move", 0, 3), ALL_OF_IT, ("prepare", 1, 3, 1, 40, 0), ALL_OF_IT])
@settings(max_examples=120, deadline=None)
def test_a_copy_is_placed_if_and_only_if_its_path_ends_the_current_path_of_its_chunk(
    steps: list[tuple[Any, ...]],
) -> None:
    follow(steps)


@pytest.mark.parametrize(
    ("steps", "num_placed"),
    [
        ([ALL_OF_IT], 5),
        ([("insert", 0, 1), ("ask", [1, 2, 3, 4, 5], 0, False)], 5),
        ([("insert", 2, 1), ("ask", [0, 1, 2, 3, 4, 5], 0, False)], 2),
        ([("insert", 5, 1), ("ask", [0, 1, 2, 3, 4, 5], 0, False)], 5),
        ([("remove", 1, False), ("ask", [0, 1, 2, 3], 0, False)], 1),
        ([("remove", 1, True), ("ask", [0, 1, 2, 3], 0, False)], 1),
        ([("remove", 0, False), ("ask", [0, 1, 2, 3], 0, False)], 0),
        ([("move", 4, 0), ("ask", [0, 1, 2, 3, 4], 0, False)], 4),
    ],
)
def test_an_edit_leaves_the_copies_that_have_seen_only_what_is_unchanged(steps: list[Any], num_placed: int) -> None:
    """A text inserted at the beginning changes no context: what follows is still the end of the current path."""
    assert follow([("prepare", 0, 5, 0, 40, 0), *steps]) == num_placed


def test_a_chunk_of_equal_text_in_another_place_does_not_take_the_copy() -> None:
    fixture = PreparedFixture()
    fixture.prepare((1, 2, 101))
    assert fixture.ask((101,), (1, 2, 101)).copies == {101: (1, 2, 101)}
    assert fixture.ask((201,), (201, 2)).copies == {}


def test_each_order_of_a_document_has_its_own_copy() -> None:
    fixture = PreparedFixture()
    fixture.prepare((3, 1, 2))
    fixture.prepare((1, 3, 2))
    assert fixture.ask((2,), (1, 3, 2)).copies == {2: (1, 3, 2)}
    assert fixture.ask((2,), (3, 1, 2)).copies == {2: (3, 1, 2)}


# Not placing


@pytest.fixture
def prepared() -> PreparedFixture:
    fixture = PreparedFixture()
    fixture.prepare((1, 2, 3))
    return fixture


def test_copies_behind_an_inserted_chunk_are_not_placed(prepared: PreparedFixture) -> None:
    assert prepared.ask((3, 2, 1), (1, 7, 2, 3)).copies == {1: (1,)}


def test_copies_from_a_window_that_begins_behind_the_inserted_chunk_are_placed(prepared: PreparedFixture) -> None:
    prepared.prepare((2, 3))
    assert prepared.ask((3, 2), (1, 7, 2, 3)).copies == {2: (2,), 3: (2, 3)}


def test_without_the_chunks_before_it_a_chunk_takes_only_a_copy_that_has_seen_none(prepared: PreparedFixture) -> None:
    assert prepared.ask((3, 2, 1)).copies == {1: (1,)}


def test_copies_behind_another_system_message_are_not_placed(prepared: PreparedFixture) -> None:
    assert prepared.ask((3, 2, 1), (1, 2, 3), system=1).copies == {}
    prepared.prepare((1, 2, 3), system=1)
    assert prepared.ask((2, 3), (1, 2, 3), system=1).copies == {2: (1, 2), 3: (1, 2, 3)}


def test_a_tenant_takes_no_copy_of_another(prepared: PreparedFixture) -> None:
    assert prepared.ask((3, 2, 1), (1, 2, 3), salt="other").copies == {}
    assert prepared.ask((3, 2, 1), (1, 2, 3)).copies == {1: (1,), 2: (1, 2), 3: (1, 2, 3)}


@pytest.mark.parametrize(
    ("chunks", "allowed", "copies"),
    [
        ((3,), {1, 2, 3}, {3: (1, 2, 3)}),
        ((3,), {2, 3}, {}),
        ((3,), {1, 2}, {3: (1, 2, 3)}),  # a request may see its own prompt
        ((3, 2, 1), set(), {1: (1,), 2: (1, 2), 3: (1, 2, 3)}),
        ((2, 3), {2, 3}, {}),
    ],
)
def test_a_copy_that_has_seen_a_forbidden_chunk_is_not_placed(
    prepared: PreparedFixture, chunks: Path, allowed: set[int], copies: dict[int, Path]
) -> None:
    answered = prepared.ask(chunks, (1, 2, 3), may_see=lambda ids: set(ids) <= allowed)
    assert answered.copies == copies


def test_a_shorter_context_is_placed_where_the_longest_is_forbidden(prepared: PreparedFixture) -> None:
    prepared.prepare((2, 3))
    assert prepared.ask((3,), (1, 2, 3), may_see=lambda ids: 1 not in ids).copies == {3: (2, 3)}


def test_a_request_that_may_not_place_computes_everything(prepared: PreparedFixture) -> None:
    answered = prepared.ask((3, 2), (1, 2, 3), may_place=False)
    assert answered.copies == {} and answered.num_computed == 2 * SIZE + LENGTH_OF_QUESTION
    assert prepared.copy(1, 2, 3).is_used is False


def test_prepared_copies_are_placed_in_no_other_mode(prepared: PreparedFixture) -> None:
    for options in (ANYWHERE, None):
        prepared.manager.allow_anywhere(options)
        assert prepared.ask((3, 2), (1, 2, 3), system=1).copies == {}
        assert prepared.ask((2, 1), (1, 2, 3)).copies == {}


def test_kv_of_questions_is_not_placed_in_this_mode() -> None:
    fixture = PreparedFixture(ANYWHERE)
    fixture.ask((1, 2))
    fixture.ask((2, 3))
    assert any(node.detached_seen for node in fixture.tree), "3 is kept behind a placed 2"
    fixture.manager.allow_anywhere(PREPARED)
    assert fixture.ask((4, 3, 2, 1), (1, 2, 3)).copies == {}


# Interrupted preparing


@pytest.mark.parametrize("anywhere", [PREPARED, ANYWHERE, None])
@pytest.mark.parametrize("num_tokens", range(0, 4 * SIZE + LENGTH_OF_QUESTION, 3))
def test_an_interrupted_prompt_goes_on_behind_the_chunks_that_it_has_kept(
    anywhere: AnywhereOptions | None, num_tokens: int
) -> None:
    fixture, window = PreparedFixture(anywhere), (1, 2, 3)
    assert not fixture.is_prepared(window)
    assert fixture.prepare(window, num_tokens=num_tokens) == num_tokens
    num_kept = num_tokens // SIZE * SIZE
    assert fixture.is_prepared(window) == (num_kept == 4 * SIZE)
    assert fixture.prepare(window) == 4 * SIZE + LENGTH_OF_QUESTION - num_kept
    assert fixture.is_prepared(window) and len(fixture.tree) == 4
    assert fixture.copies() == (prefixes(*window) if anywhere is PREPARED else [])


def test_an_interrupted_prompt_goes_on_with_chunks_from_lower_tiers() -> None:
    fixture = PreparedFixture(options={"host_bytes": 100, "unused_host_bytes": 100})
    fixture.prepare((1, 2, 3), num_tokens=3 * SIZE)
    assert fixture.tree.make_room(fixture.num_blocks)
    assert {node.tier for node in fixture.tree} == {Tier.HOST}
    assert fixture.prepare((1, 2, 3)) == SIZE + LENGTH_OF_QUESTION
    assert fixture.is_prepared((1, 2, 3)) and fixture.copy(1, 2).tier is Tier.DEVICE


def test_an_interrupted_window_with_known_chunks_ends_with_the_same_copies() -> None:
    """Its known chunks are kept in their own context only, so it begins again behind the system message."""
    fixture = PreparedFixture()
    fixture.prepare((1, 2))
    fixture.prepare((2, 3, 4), num_known=1, num_tokens=3 * SIZE)
    assert fixture.copies() == [(1,), (1, 2), (2, 3)] and not fixture.is_prepared((2, 3, 4), num_known=1)
    fixture.prepare((2, 3, 4), num_known=1)
    assert fixture.copies() == [(1,), (1, 2), (2, 3), (2, 3, 4)] and fixture.is_prepared((2, 3, 4), num_known=1)


@pytest.mark.parametrize("anywhere", [PREPARED, None])
def test_chunks_of_a_running_prompt_are_not_evicted(anywhere: AnywhereOptions | None) -> None:
    fixture = PreparedFixture(anywhere, num_blocks=8)
    lease = fixture.preparing((1, 2, 3))
    fixture.compute(lease, fixture.admit(lease), 3 * SIZE)
    assert fixture.tree.num_idle_blocks == 0 and not fixture.tree.make_room(4)
    fixture.manager.release(lease)
    fixture.check()
    assert fixture.tree.num_idle_blocks == 3 and fixture.tree.make_room(8)


def test_only_chunks_that_a_prompt_prepares_count_for_is_prepared(prepared: PreparedFixture) -> None:
    assert prepared.is_prepared((1, 2, 3)) and prepared.is_prepared((1, 2, 3), num_known=2)
    assert not prepared.is_prepared((2, 3)) and not prepared.is_prepared((1, 3))
    assert not prepared.is_prepared((1, 2, 3), system=1) and not prepared.is_prepared((1, 2, 3), salt="other")


def test_kv_that_is_not_finite_is_not_kept() -> None:
    fixture = PreparedFixture()
    fixture.memory.poisoned.add(prefix_hash([SYSTEM] * SIZE + [1] * SIZE + [2] * SIZE))
    lease = fixture.preparing((1, 2, 3))
    with pytest.raises(NonFiniteError):
        fixture.compute(lease, fixture.admit(lease), lease.prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.check()
    assert fixture.copies() == [(1,)]


# Counting


@pytest.mark.parametrize("anywhere", [PREPARED, ANYWHERE, None])
def test_preparing_counts_no_use_and_no_hit_or_miss(anywhere: AnywhereOptions | None) -> None:
    fixture = PreparedFixture(anywhere)
    fixture.prepare((1, 2), num_tokens=2 * SIZE)
    fixture.prepare((1, 2))
    stats = fixture.tree.stats
    assert (stats.hits.total(), stats.misses, stats.prepared) == (0, 0, 2)
    assert len(fixture.tree) == 3
    chunks = [node for node in fixture.tree if node.chunk_id is not None]
    assert all(node.frequency.value(0.0) == 0.0 and not node.is_used for node in chunks)


def test_each_placement_counts_one_use(prepared: PreparedFixture) -> None:
    copy, other = prepared.copy(1, 2), prepared.copy(1, 2, 3)
    for num_uses in (1, 2, 3):
        prepared.ask((2,), (1, 2, 3))
        assert copy.frequency.value(0.0) == num_uses and copy.is_used and not other.is_used
    stats = prepared.tree.stats
    assert stats.prepared_tokens == stats.placed_tokens == 3 * SIZE and stats.misses == 0
    assert stats.hits == {Tier.DEVICE: 3}, "the system message"
    assert stats.placed == {Tier.DEVICE: 3} and stats.recomputed_tokens == 0


def test_a_question_that_begins_with_prepared_chunks_counts_a_use_of_each() -> None:
    fixture = PreparedFixture(None)
    fixture.prepare((1, 2))
    assert fixture.ask((1, 3)).num_exact == 1
    root, first, second = fixture.exact(), fixture.exact(1), fixture.exact(1, 2)
    assert root is not None and first is not None and second is not None
    assert [node.frequency.value(0.0) for node in (root, first, second)] == [2, 1, 0]
    assert root.is_used and first.is_used and not second.is_used


# Budgets


def test_unused_copies_stop_at_the_budget_of_the_disk() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 3 * SIZE + 1})
    assert fixture.tree.unused_room() == 3 * SIZE + 1
    fixture.prepare((1, 2, 3, 4))
    rooms = []
    while fixture.manager.store_next():
        fixture.check()
        rooms.append(fixture.tree.unused_room())
    assert rooms == [3 * SIZE + 1, 2 * SIZE + 1, SIZE + 1, 1], "the system message counts as used"
    assert fixture.tree.num_unused_bytes(Tier.DISK) == 3 * SIZE
    fixture.tree.flush()
    assert fixture.tree.num_bytes(Tier.DISK) == 4 * SIZE
    fixture.ask((9,))
    while fixture.manager.store_next():
        fixture.check()
    assert fixture.tree.num_bytes(Tier.DISK) == 5 * SIZE, "the chunk of a question is still stored"


def test_unused_copies_stop_at_the_budget_of_the_host() -> None:
    fixture = PreparedFixture(options={"host_bytes": 100, "unused_host_bytes": 3 * SIZE})
    fixture.prepare((1, 2, 3, 4))
    assert fixture.tree.make_room(fixture.num_blocks)
    fixture.check()
    assert fixture.tree.num_unused_bytes(Tier.HOST) == 3 * SIZE and len(fixture.tree) == 4
    assert fixture.tree.unused_room() == 0


def test_unused_room_is_that_of_the_disk_where_there_is_one() -> None:
    budgets = {"host_bytes": 8 * SIZE, "unused_host_bytes": 3 * SIZE, "disk_bytes": 9, "unused_disk_bytes": 5 * SIZE}
    assert PreparedFixture(options=budgets).tree.unused_room() == 9
    assert PreparedFixture(options=budgets | {"disk_bytes": 0}).tree.unused_room() == 3 * SIZE


def test_used_nodes_reduce_the_room_of_unused_copies_where_little_is_free() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 4 * SIZE, "unused_disk_bytes": 3 * SIZE})
    fixture.ask((8,))
    fixture.tree.flush()
    assert fixture.tree.unused_room() == 2 * SIZE
    fixture.ask((8, 9))
    fixture.tree.flush()
    assert fixture.tree.unused_room() == SIZE


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("anywhere", [PREPARED, None])
def test_unused_copies_displace_no_used_node(tier: Tier, anywhere: AnywhereOptions | None) -> None:
    name = tier.label
    fixture = PreparedFixture(anywhere, options={f"{name}_bytes": 3 * SIZE, f"unused_{name}_bytes": 100})
    fixture.ask((8, 9))
    assert fixture.tree.make_room(fixture.num_blocks)
    used = fixture.used(tier)
    assert len(used) == 3
    fixture.prepare((1, 2))
    assert fixture.tree.make_room(fixture.num_blocks)
    fixture.tree.flush()
    fixture.check()
    assert fixture.used(tier) == used and len(fixture.tree) == 3


@pytest.mark.parametrize("anywhere", [PREPARED, None])
def test_the_device_evicts_unused_copies_before_any_used_node(anywhere: AnywhereOptions | None) -> None:
    fixture = PreparedFixture(anywhere, num_blocks=12)
    fixture.ask((8,))
    fixture.prepare((1, 2, 3))
    fixture.ask((9,))
    used = fixture.used(Tier.DEVICE)
    assert fixture.tree.make_room(12 - len(used))
    fixture.check()
    assert {node.key for node in fixture.tree} == used, "the unused copies are gone although they are newer than 8"


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_full_tier_evicts_unused_copies_before_any_used_node(tier: Tier) -> None:
    name = tier.label
    fixture = PreparedFixture(options={f"{name}_bytes": 5 * SIZE, f"unused_{name}_bytes": 100})
    fixture.ask((8,))
    assert fixture.tree.make_room(fixture.num_blocks)
    fixture.prepare((1, 2, 3))
    assert fixture.tree.make_room(fixture.num_blocks)
    assert fixture.tree.num_unused_bytes(tier) == 3 * SIZE
    used = fixture.used(tier)
    for chunk, num_unused in ((9, 2), (10, 1), (11, 0)):
        fixture.ask((chunk,))
        assert fixture.tree.make_room(fixture.num_blocks)
        fixture.check()
        assert used < fixture.used(tier) and fixture.tree.num_unused_bytes(tier) == num_unused * SIZE
        used = fixture.used(tier)


def test_the_first_use_frees_the_budget_in_every_tier() -> None:
    budgets = {"host_bytes": 100, "disk_bytes": 100, "unused_host_bytes": 5 * SIZE, "unused_disk_bytes": 4 * SIZE}
    fixture = PreparedFixture(options=budgets)
    fixture.prepare((1, 2))
    fixture.tree.flush()
    assert fixture.tree.make_room(fixture.num_blocks)
    unused = [fixture.tree.num_unused_bytes(tier) for tier in Tier]
    assert unused == [0, 2 * SIZE, 2 * SIZE] and fixture.tree.unused_room() == 2 * SIZE
    fixture.ask((2,), (1, 2))
    unused = [fixture.tree.num_unused_bytes(tier) for tier in Tier]
    assert unused == [0, SIZE, SIZE], "system message and 2 are used, 1 is not"
    assert fixture.tree.unused_room() == 3 * SIZE
    fixture.ask((2, 1), (1, 2))
    assert [fixture.tree.num_unused_bytes(tier) for tier in Tier] == [0, 0, 0]
    assert fixture.tree.num_bytes(Tier.HOST) == fixture.tree.num_bytes(Tier.DISK) == 3 * SIZE


small = st.integers(0, 6).map(lambda count: count * SIZE)
windows = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)
actions = st.one_of(
    st.tuples(st.just("prepare"), windows),
    st.tuples(st.just("ask"), windows),
    st.tuples(st.just("evict"), st.integers(1, 20)),
    st.tuples(st.just("store")),
    st.tuples(st.just("restart")),
)


def check_eviction(fixture: PreparedFixture, num_blocks: int) -> None:
    """Make room on the device, and check the order in which nodes leave it."""
    before = {node.key for node in fixture.tree if node.block_ids is not None and node.is_used}
    fixture.tree.make_room(num_blocks)
    after = {node.key: node for node in fixture.tree if node.block_ids is not None}
    if not before <= after.keys():
        leaves = [node for node in after.values() if not node.num_children_in[Tier.DEVICE]]
        assert all(node.is_used for node in leaves), "a used node left the device before an unused one"


@given(small, small, small, small, st.sampled_from([PREPARED, None]), st.lists(actions, max_size=16))
@settings(max_examples=80, deadline=None)
def test_budgets_hold_and_unused_kv_is_evicted_first(
    host: int, disk: int, unused_host: int, unused_disk: int, anywhere: AnywhereOptions | None, steps: list[Any]
) -> None:
    budgets = {
        "host_bytes": host,
        "disk_bytes": disk,
        "unused_host_bytes": unused_host,
        "unused_disk_bytes": unused_disk,
    }
    fixture = PreparedFixture(anywhere, num_blocks=20, options=budgets)
    document, most_on_disk = tuple(range(1, 10)), unused_disk
    for name, *rest in steps:
        used = {tier: fixture.used(tier) for tier in (Tier.HOST, Tier.DISK)}
        if name == "prepare":
            fixture.prepare(sorted(rest[0]))
        elif name == "ask":
            fixture.ask(rest[0], document)
        elif name == "evict":
            check_eviction(fixture, rest[0])
        elif name == "store":
            fixture.manager.store_next()
            assert all(used[tier] <= fixture.used(tier) for tier in used), "storing while idle displaces nothing"
        else:
            fixture.restart()  # a record tells whether its KV was used when it was stored
            most_on_disk = max(unused_disk, fixture.tree.num_unused_bytes(Tier.DISK))
        fixture.check()
        assert fixture.tree.num_unused_bytes(Tier.HOST) <= unused_host
        assert fixture.tree.num_unused_bytes(Tier.DISK) <= most_on_disk


# Restart


def test_a_restored_copy_is_unused_and_placed_in_its_context() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 6 * SIZE})
    fixture.prepare((3, 1, 2))
    fixture.tree.flush()
    records = {record.seen: record for record in fixture.memory.records.values() if record.is_in_document}
    assert sorted(records) == sorted(map(tuple, prefixes(3, 1, 2))), "in the order of the document"
    assert not any(record.is_used for record in records.values())
    fixture.restart()
    assert fixture.copies() == sorted(prefixes(3, 1, 2)) and fixture.is_prepared((3, 1, 2))
    assert not any(node.is_used for node in fixture.tree if node.chunk_id is not None)
    assert fixture.tree.num_unused_bytes(Tier.DISK) == 3 * SIZE and fixture.tree.unused_room() == 3 * SIZE
    answered = fixture.ask((2, 1), (3, 1, 2))
    assert answered.copies == {2: (3, 1, 2), 1: (3, 1)} and answered.num_computed == LENGTH_OF_QUESTION
    assert fixture.tree.num_unused_bytes(Tier.DISK) == SIZE, "the system message and two copies are used"
    assert fixture.ask((2,), (1, 3, 2)).copies == {}, "the document has another order now"


def test_a_copy_that_was_used_before_it_was_stored_is_restored_as_used() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    fixture.prepare((1, 2))
    fixture.ask((2,), (1, 2))
    fixture.tree.flush()
    fixture.restart()
    assert fixture.copy(1, 2).is_used and not fixture.copy(1).is_used
    assert fixture.tree.num_unused_bytes(Tier.DISK) == SIZE


def test_restored_chunks_of_an_interrupted_prompt_are_not_computed_again() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    fixture.prepare((1, 2, 3), num_tokens=3 * SIZE)
    fixture.tree.flush()
    fixture.restart()
    assert fixture.prepare((1, 2, 3)) == SIZE + LENGTH_OF_QUESTION


def test_a_disk_with_a_smaller_budget_loses_unused_copies_first() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    fixture.ask((8, 9))
    fixture.prepare((1, 2))
    fixture.tree.flush()
    fixture.options["disk_bytes"] = 3 * SIZE
    fixture.restart()
    assert fixture.copies() == [] and fixture.exact(8, 9) is not None


# Forgetting


def test_removing_a_chunk_drops_every_copy_that_has_seen_it_from_every_tier() -> None:
    fixture = PreparedFixture(options={"host_bytes": 100, "disk_bytes": 100, "unused_host_bytes": 100})
    fixture.prepare((1, 2, 3))
    fixture.prepare((3, 4), num_known=1)
    assert fixture.tree.make_room(fixture.num_blocks)
    fixture.prepare((5, 2))
    assert fixture.forget([2]) == 3
    assert fixture.copies() == [(1,), (3, 4), (5,)] and fixture.exact() is not None
    assert set(fixture.memory.lower[Tier.HOST]) == {node.key for node in fixture.tree if node.is_lower[Tier.HOST]}


def test_removing_a_chunk_leaves_the_copies_of_other_tenants(prepared: PreparedFixture) -> None:
    prepared.prepare((1, 2), salt="other")
    assert prepared.forget([1]) == 3
    assert prepared.ask((2,), (1, 2), salt="other").copies == {2: (1, 2)}


@pytest.mark.parametrize("anywhere", [PREPARED, None])
@pytest.mark.parametrize("removed", [1, 2, 3, 4])
@pytest.mark.parametrize("num_done", [1, 2, 3, 4])
def test_a_running_prompt_keeps_nothing_behind_a_removed_chunk(
    anywhere: AnywhereOptions | None, removed: int, num_done: int
) -> None:
    fixture, window = PreparedFixture(anywhere), (1, 2, 3, 4)
    lease = fixture.preparing(window)
    fixture.admit(lease)
    fixture.compute(lease, 0, num_done * SIZE + 1)
    fixture.forget([removed], lease)
    fixture.compute(lease, num_done * SIZE + 1, lease.prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.check()
    kept = sorted(node.seen for node in fixture.tree if node.chunk_id is not None)
    assert sorted(map(sorted, kept)) == [list(path) for path in prefixes(*window[: removed - 1])]


def test_a_resumed_prompt_keeps_nothing_behind_a_chunk_that_is_removed_while_it_runs() -> None:
    fixture = PreparedFixture()
    fixture.prepare((1, 2, 3, 4), num_tokens=4 * SIZE)
    lease = fixture.preparing((1, 2, 3, 4))
    num_cached = fixture.admit(lease)
    assert num_cached == 4 * SIZE
    assert fixture.forget([2], lease) == 2
    fixture.compute(lease, num_cached, lease.prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.check()
    assert fixture.copies() == [(1,)]


def test_removing_a_tenant_drops_its_copies_and_keeps_nothing_of_a_running_prompt() -> None:
    fixture = PreparedFixture()
    lease = fixture.preparing((1, 2, 3))
    fixture.admit(lease)
    fixture.compute(lease, 0, 2 * SIZE)
    assert fixture.manager.forget_owner(lease.pieces[0].owner, [lease]) == 2
    fixture.compute(lease, 2 * SIZE, lease.prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.check()
    assert len(fixture.tree) == 0


def test_preparing_takes_nothing_from_copies_of_other_contexts(prepared: PreparedFixture) -> None:
    assert prepared.prepare((2, 3)) == 2 * SIZE + LENGTH_OF_QUESTION
    assert prepared.prepare((1, 2, 4)) == SIZE + LENGTH_OF_QUESTION, "(1, 2) is kept in this context"


def test_a_chunk_at_the_beginning_of_a_prompt_without_system_message_is_restored_in_its_context() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    chunks = [Segment(SegmentKind.CHUNK, (one,) * SIZE, ChunkId(one)) for one in (1, 2)]
    prompt = SegmentedPrompt((*chunks, Segment(SegmentKind.QUESTION, (QUESTION,) * LENGTH_OF_QUESTION)))
    lease = fixture.manager.new_lease(prompt, 14, prepares=frozenset(map(ChunkId, (1, 2))))
    fixture.admit(lease)
    fixture.compute(lease, 0, prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.tree.flush()
    fixture.restart()
    assert fixture.copies() == [(1,), (1, 2)]


def test_a_long_end_of_a_preparing_prompt_is_not_kept() -> None:
    fixture = PreparedFixture()
    chunk = Segment(SegmentKind.CHUNK, (1,) * SIZE, ChunkId(1))
    system, end = Segment(SegmentKind.SYSTEM, (SYSTEM,) * SIZE), Segment(SegmentKind.QUESTION, (QUESTION,) * 3 * SIZE)
    lease = fixture.manager.new_lease(SegmentedPrompt((system, chunk, end)), 6 * SIZE, prepares=frozenset({ChunkId(1)}))
    fixture.admit(lease)
    fixture.compute(lease, 0, 5 * SIZE)
    fixture.manager.release(lease)
    assert len(fixture.tree) == 2 and fixture.copies() == [(1,)]


@pytest.mark.parametrize("anywhere", [PREPARED, None])
def test_a_window_is_refused_where_the_budget_has_no_room_for_what_is_missing(anywhere: AnywhereOptions | None) -> None:
    fixture = PreparedFixture(anywhere, options={"disk_bytes": 100, "unused_disk_bytes": 2 * SIZE})
    fixture.prepare((1, 2))
    fixture.tree.flush()
    assert not fixture.manager.has_to_prepare(fixture.preparing((1, 2))), "all of it is kept"
    with pytest.raises(PreparedFullError):
        fixture.manager.has_to_prepare(fixture.preparing((3,)))
    fixture.ask((1,), (1, 2))
    assert fixture.manager.has_to_prepare(fixture.preparing((3,))), "the first use freed room"
