"""Tests tokens saved on traces against hand-computed values and a brute-force model, and the trace reader's errors."""

import json
from itertools import permutations
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.errors import UsageError
from stillroom_bench.loads.retrieved_traces import QUESTION_TOKENS, Retrieved, count_tokens, read_retrieved
from stillroom_bench.loads.reuse_workloads import SYSTEM_TOKENS
from stillroom_bench.quality.quality_options import SavingsOptions
from stillroom_bench.quality.savings import (
    FULL,
    PREFIX,
    SET,
    SavingsOutcome,
    Strategy,
    Trace,
    full_recompute,
    replay,
    run_savings,
)

WORDS = {"A": 10, "B": 20, "C": 37, "D": 3, "E": 16}
"""Number of words of each passage; a word has about 1.3 tokens."""
TEXTS = {letter: " ".join([letter] * count) for letter, count in WORDS.items()}
TOKENS = {letter: count_tokens(text) for letter, text in TEXTS.items()}


def trace(*requests: str) -> Trace:
    """Make a trace in which each letter is a passage."""
    return Trace("by hand", tuple(Retrieved(tuple(TEXTS[letter] for letter in one), None) for one in requests))


def twin(requests: list[str], strategy: Strategy) -> SavingsOutcome:
    """Compute the outcome with unlimited capacity from the sets of exact paths and seen passages."""
    exact: set[str] = set()
    seen: set[str] = set()
    outcome = SavingsOutcome()
    for number, request in enumerate(requests):
        order = request
        if strategy.reorders:
            paths = {"".join(one)[:end] for one in permutations(request) for end in range(1, len(request) + 1)}
            kept = max((size(path) for path in paths & exact), default=0)
            best = [path for path in paths & exact if size(path) == kept] or [""]
            path = min(best, key=lambda one: [request.index(letter) for letter in one])
            order = path + "".join(letter for letter in request if letter not in path)
        found = max(("", *(order[:end] for end in range(1, len(order) + 1) if order[:end] in exact)), key=len)
        rest = order[len(found) :]
        placed = [letter for letter in rest if letter in seen] if strategy.ratio is not None else []
        again = ceil((strategy.ratio or 0.0) * size("".join(placed)) - 1e-9)
        has_query_pass = bool(placed) and 0 < (strategy.ratio or 0.0) < 1
        end = order.index(placed[0]) if placed else len(order)
        exact |= {order[:length] for length in range(1, end + 1)}
        redundant = size("".join(letter for letter in order if letter in seen))
        saved = size(found) + size("".join(placed)) - again
        outcome.num_tokens += SYSTEM_TOKENS + size(order) + QUESTION_TOKENS
        outcome.num_computed += (SYSTEM_TOKENS if number == 0 else 0) + size(order) - saved + QUESTION_TOKENS
        outcome.num_computed += QUESTION_TOKENS if has_query_pass else 0
        outcome.num_redundant += redundant
        outcome.num_redundant_computed += redundant - saved
        seen |= set(order)
    return outcome


def size(letters: str) -> int:
    return sum(TOKENS[letter] for letter in letters)


def test_savings_equal_hand_computed_values() -> None:
    """A has 13 tokens, B 26, C 48. The second request reverses A and B, the third appends C."""
    requests = trace("AB", "BA", "ABC")
    total = 3 * (64 + 32) + 3 * (13 + 26) + 48
    full = full_recompute(requests)
    assert full == SavingsOutcome(total, total, 2 * (13 + 26), 2 * (13 + 26))
    other_tokens = 64 + 3 * 32  # the system prompt once, each question
    assert replay(requests, Strategy(), None) == SavingsOutcome(
        total, other_tokens + 2 * (13 + 26) + 48, 2 * (13 + 26), 13 + 26
    )
    assert replay(requests, Strategy(reorders=True), None) == SavingsOutcome(total, other_tokens + 13 + 26 + 48, 78, 0)
    assert replay(requests, Strategy(ratio=0.0), None) == SavingsOutcome(total, other_tokens + 13 + 26 + 48, 78, 0)
    half = replay(requests, Strategy(ratio=0.5), None)  # 20 of the second request's 39, after a query pass
    assert half == SavingsOutcome(total, other_tokens + 13 + 26 + 48 + 20 + 32, 78, 20)


def test_copies_at_the_end_are_those_behind_different_passages() -> None:
    """Exact reuse keeps A first and behind B, B first and behind A, and C behind A and B."""
    requests = trace("AB", "BA", "ABC")
    assert replay(requests, Strategy(), None).num_copies == (2, 2, 1)
    assert replay(requests, Strategy(ratio=0.0), None).num_copies == (1, 1, 1), "placed passages are not kept again"


@given(
    st.lists(
        st.lists(st.sampled_from("ABCDE"), unique=True, min_size=1, max_size=4).map("".join), min_size=1, max_size=12
    ),
    st.sampled_from([Strategy(), Strategy(reorders=True), *(Strategy(ratio=ratio) for ratio in (0.0, 0.15, 0.3, 1.0))]),
)
def test_unlimited_capacity_matches_the_brute_force_model(requests: list[str], strategy: Strategy) -> None:
    assert replay(trace(*requests), strategy, None) == twin(requests, strategy)


@pytest.mark.parametrize("capacity", [0.0, 0.3, 1.0])
def test_smaller_capacity_saves_less(capacity: float) -> None:
    requests = trace(*["AB", "CD", "EA", "BC", "DE", "AC"] * 4)
    for strategy in (Strategy(), Strategy(reorders=True), Strategy(ratio=0.0)):
        all_kept, some = replay(requests, strategy, None), replay(requests, strategy, capacity)
        assert all_kept.num_computed <= some.num_computed <= some.num_tokens
        assert 0 <= some.num_redundant_computed <= some.num_redundant


def test_report_lists_traces_capacities_and_arms(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"retrieved_docs": [["a b", "c"], ["c", "a b"]]}))
    (tmp_path / "two.jsonl").write_text('["a b", "c"]\n\n{"retrieved_docs": ["d"], "question": "what is d ?"}\n')
    paths = [tmp_path / "one.json", tmp_path / "two.jsonl"]
    result = run_savings(SavingsOptions(tuple(paths), (0.5,), (0.15,)))
    assert [row["trace"] for row in result.tables["Traces"]] == ["one", "two"]
    assert [row["first 2 again"] for row in result.tables["Repeated passages"]] == ["0 [0, 0.658]", "0 [0, 0.793]"]
    assert len(result.tables["Copies kept at the end of the trace"]) == 12
    rows = result.tables["Tokens computed"]
    assert [row["room"] for row in rows] == ["none", *["all"] * 3, *["50%"] * 3] * 2
    assert [row["arm"] for row in rows[:4]] == [FULL, PREFIX, SET, "anywhere, 15% computed again"]
    assert rows[1]["redundant saved"] == "0.0%" and rows[2]["redundant saved"] == "100.0%"
    assert rows[2]["and of its redundant tokens"] == "100.0%"
    assert rows[-1]["redundant saved"] == "-", "the second trace repeats no passage"
    with pytest.raises(UsageError, match="same name"):
        run_savings(SavingsOptions((paths[0], paths[0])))


def test_questions_are_read_with_their_requests(tmp_path: Path) -> None:
    whole = tmp_path / "one.json"
    whole.write_text(json.dumps({"retrieved_docs": [["a"], []], "questions": ["one two three", "four"]}))
    assert read_retrieved(whole) == [Retrieved(("a",), "one two three"), Retrieved((), "four")]
    assert [one.question_tokens for one in read_retrieved(whole)] == [4, 1]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "[1]", "not a trace"),
        ("a.json", '{"retrieved_docs": [["a"], "b"]}', "request 2 is not a list of texts"),
        ("a.json", '{"retrieved_docs": []}', "no requests"),
        ("a.json", '{"retrieved_docs": [["a"]], "questions": ["?", "?"]}', "not a trace"),
        ("a.jsonl", '["a"]\n["b", 3]\n', "line 2 is not a list of texts"),
        ("a.jsonl", '{"retrieved_docs": ["a"], "question": 3}', "question of line 1"),
        ("a.jsonl", "nothing", "not a trace"),
    ],
)
def test_invalid_trace_is_refused_by_name(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=words) as error:
        read_retrieved(tmp_path / name)
    assert name in str(error.value)
