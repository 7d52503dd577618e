"""The loop of several searches, with scripted searches and readings; the oracle is a slow twin of the loop."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.document import Chunk, ScoredChunk
from stillroom.core.ids import ChunkId, DocumentId, RequestId
from stillroom.errors import UsageError
from stillroom.rag.hops import MAX_HOPS, Hop, HopEnd, Reading, checked_hops, hops

NAME = RequestId("req-1")


def scored(number: int) -> ScoredChunk:
    return ScoredChunk(Chunk(ChunkId(number), DocumentId(f"{number}.md"), 0, f"text {number}"), 1.0 / (number + 1), {})


class Script:
    """Searches that find given chunks, and readings that name given questions."""

    def __init__(self, found: Mapping[str, Sequence[int]], readings: Mapping[str, Reading]) -> None:
        self.found, self.readings = found, readings
        self.read_chunks: list[list[int]] = []

    def search(self, text: str) -> list[ScoredChunk]:
        return [scored(number) for number in self.found.get(text, ())]

    def read(self, question: str, found: Sequence[ScoredChunk]) -> Reading:
        self.read_chunks.append([one.chunk.chunk_id for one in found])
        return self.readings[question]

    def run(self, most: int) -> list[tuple[Hop, Sequence[ScoredChunk]]]:
        return list(hops(NAME, "a", most, self.search, self.read))


def ids(found: Sequence[ScoredChunk]) -> list[int]:
    return [one.chunk.chunk_id for one in found]


def test_documents_of_earlier_hops_stay_in_front_and_only_new_ones_are_reported() -> None:
    script = Script({"a": [3, 1], "b": [1, 2], "c": [4]}, {"a": Reading("b", "x"), "b": Reading("c", "y")})
    (first, _), (second, _), (third, found) = script.run(3)
    assert [hop.question for hop in (first, second, third)] == ["a", "b", "c"]
    assert [[one.document for one in hop.sources] for hop in (first, second, third)] == [
        ["3.md", "1.md"],
        ["2.md"],
        ["4.md"],
    ]
    assert ids(found) == [3, 1, 2, 4] and script.read_chunks == [[3, 1], [3, 1, 2]]
    assert [(hop.answer, hop.end) for hop in (first, second, third)] == [
        ("x", None),
        ("y", None),
        (None, HopEnd.LIMIT),
    ]


@pytest.mark.parametrize(
    ("found", "readings", "ends"),
    [
        ({}, {}, [HopEnd.NOTHING_NEW]),
        ({"a": [1]}, {"a": Reading(None)}, [HopEnd.DONE]),
        ({"a": [1], "b": [1]}, {"a": Reading("b")}, [None, HopEnd.NOTHING_NEW]),
        ({"a": [1]}, {"a": Reading("a", "x")}, [None, HopEnd.NOTHING_NEW]),
        ({"a": [1], "b": [2]}, {"a": Reading("b", "x"), "b": Reading("c", "x")}, [None, HopEnd.SAME_ANSWER]),
        ({"a": [1], "b": [2]}, {"a": Reading("b"), "b": Reading("c", is_full=True)}, [None, HopEnd.NO_ROOM]),
        (
            {"a": [1], "b": [2], "c": [3]},
            {"a": Reading("b"), "b": Reading("c"), "c": Reading(None)},
            [None] * 2 + [HopEnd.DONE],
        ),
    ],
)
def test_search_ends_early(
    found: dict[str, list[int]], readings: dict[str, Reading], ends: list[HopEnd | None]
) -> None:
    assert [hop.end for hop, _ in Script(found, readings).run(5)] == ends


def test_one_hop_reads_nothing() -> None:
    script = Script({"a": [1]}, {})
    [(hop, found)] = script.run(1)
    assert (hop.end, ids(found), script.read_chunks) == (HopEnd.LIMIT, [1], [])


@given(
    found=st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 6), max_size=3, unique=True)),
    nexts=st.fixed_dictionaries({key: st.sampled_from([None, *"abcd"]) for key in "abcd"}),
    answers=st.fixed_dictionaries({key: st.sampled_from([None, "x", "y"]) for key in "abcd"}),
    full=st.sets(st.sampled_from("abcd")),
    most=st.integers(1, MAX_HOPS),
)
def test_hops_equal_a_slow_twin(
    found: dict[str, list[int]],
    nexts: dict[str, str | None],
    answers: dict[str, str | None],
    full: set[str],
    most: int,
) -> None:
    readings = {key: Reading(nexts[key], answers[key], is_full=key in full) for key in "abcd"}
    done = Script(found, readings).run(most)

    asked = ["a"]
    kept: list[int] = []
    while True:
        new = [number for number in found.get(asked[-1], []) if number not in kept]
        kept += new
        last = asked[-1]
        is_same = len(asked) > 1 and answers[last] is not None and answers[last] == answers[asked[-2]]
        if len(asked) == most or not new or nexts[last] is None or is_same or last in full:
            break
        asked.append(nexts[last] or "")
    assert [hop.question for hop, _ in done] == asked
    assert ids(done[-1][1]) == kept
    assert [hop.end is None for hop, _ in done] == [True] * (len(asked) - 1) + [False]


@pytest.mark.parametrize("number", [0, -1, MAX_HOPS + 1])
def test_number_of_hops_is_checked(number: int) -> None:
    with pytest.raises(UsageError, match=f"hops={number}; it must be 1 to 5"):
        checked_hops(number)
