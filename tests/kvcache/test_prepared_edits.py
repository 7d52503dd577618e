"""Copies of chunks in the context of their document after edits of it, against a slow model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import most_examples
from tests.kvcache.prepared_fixture import SIZE, Path, PreparedFixture, prefixes, text_of


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
        paths = prefixes(*window)
        self.copies |= {(system, path) for index, path in enumerate(paths) if (index + 2) * SIZE <= num_tokens}
        if (len(window) + 1) * SIZE <= num_tokens:  # known chunks are kept until their window is complete
            self.copies -= {(system, path) for path in paths[:num_known] if self.has_longer(system, path)}

    def has_longer(self, system: int, path: Path) -> bool:
        return any(other == system and one[-len(path) :] == path != one for other, one in self.copies)

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
            end = min(num_tokens, (len(window) + 1) * SIZE)
            if fixture.prepare(window, num_known, num_tokens=end, system=system):  # else no step ran
                twin.prepare(window, num_known, num_tokens, system)
        elif name != "prepare" and (document or name == "insert"):
            edit(twin, fixture, name, *rest)
        assert fixture.copies() == sorted(path for _, path in twin.copies)
    return num_placed


ALL_OF_IT = ("ask", [4, 2, 0, 1, 3], 0, False)


@given(st.lists(preparations | preparations | questions | questions | edits, max_size=14))
@example([("prepare", 0, 5, 0, 40, 0), ("insert", 2, 1), ALL_OF_IT, ("remove", 2, False), ALL_OF_IT])
@example([("prepare", 0, 5, 0, 40, 0), ("move", 0, 3), ALL_OF_IT, ("prepare", 1, 3, 1, 40, 0), ALL_OF_IT])
@example([("prepare", 0, 2, 0, 12, 0), ("prepare", 1, 2, 0, 12, 0), ("prepare", 1, 2, 1, 12, 0)])
@settings(max_examples=most_examples(120), deadline=None)
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
