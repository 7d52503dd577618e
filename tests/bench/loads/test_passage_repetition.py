"""Tests the repetition of passages against hand-computed counts and a brute-force search."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from stillroom_bench.loads.passage_repetition import num_sources, repeated_prefixes, sources, top_passages

REQUESTS = [("a", "b", "c"), ("a", "b", "d"), ("b", "a", "c"), ("d", "c", "a"), ("e", "f", "g")]


def test_top_passages_are_those_retrieved_most() -> None:
    found = top_passages(REQUESTS, share=1 / 7)

    assert found.num_passages == 1
    assert found.of_slots.value == 4 / 15, "a is retrieved four times"
    assert found.of_requests.value == 4 / 5


def test_prefixes_repeat_only_in_the_same_order() -> None:
    shares = [repeated_prefixes(REQUESTS, length) for length in (1, 2, 3, 4)]

    assert [one and one.value for one in shares] == [1 / 5, 1 / 5, 0.0, None]


def test_sources_of_a_request_are_the_fewest_earlier_requests_that_have_its_passages() -> None:
    """The third request needs one earlier request, the fourth two; the others have a passage that is new."""
    found = sources(REQUESTS)

    assert found is not None and found.num_requests == 2
    assert found.of_one.value == 0.5 and found.of_at_least_three.value == 0.0
    assert sources([("a",), ("b",)]) is None


LISTS = st.lists(st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1, max_size=4).map(tuple), max_size=6)


@given(st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1, max_size=5), LISTS)
def test_number_of_sources_equals_brute_force(wanted: list[str], earlier: list[tuple[str, ...]]) -> None:
    sizes = (
        count
        for count in range(1, len(wanted) + 1)
        for chosen in combinations(earlier, count)
        if set(wanted) <= {text for request in chosen for text in request}
    )
    assert num_sources(wanted, earlier) == next(sizes, None)
