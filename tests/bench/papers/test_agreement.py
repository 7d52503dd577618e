"""Tests the comparison of a new result with a committed one."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom_bench.papers.agreement import compare_results, intervals_of, overlap

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
BOUNDS = st.floats(-1e3, 1e3).map(lambda value: float(f"{value:.3g}"))


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))
    return found


@given(st.tuples(BOUNDS, BOUNDS).map(sorted), st.tuples(BOUNDS, BOUNDS).map(sorted))
def test_intervals_overlap_if_one_holds_a_bound_of_the_other(one: list[float], other: list[float]) -> None:
    texts = [f"{low:.3g} [{low:.3g}, {high:.3g}]" for low, high in (one, other)]
    holds = [low <= bound <= high for low, high in (one, other) for bound in (*one, *other)]

    assert overlap(*texts) == overlap(*reversed(texts)) == (holds[2] or holds[3] or holds[4] or holds[5])


def test_units_are_the_same_quantity() -> None:
    assert overlap("900 us [850 us, 1.1 ms]", "1.2 ms [1 ms, 1.3 ms]")
    assert not overlap("900 us [850 us, 950 us]", "1 ms [960 us, 1.3 ms]")
    assert not overlap("1 s [0.9 s, 1.1 s]", "1 ms [0.9 ms, 1.1 ms]")


@pytest.mark.parametrize("name", ["2026-11-21-reuse", "2026-11-22-reordering", "2026-11-21-retrieval"])
def test_result_agrees_with_itself(name: str) -> None:
    found = compare_results(result(name), result(name))

    assert found.figures and found.count("agrees") == len(found.figures)
    assert found.num_same == found.num_cells > 0 and not found.changed


def test_a_changed_cell_is_named() -> None:
    old, new = result("2026-11-21-savings"), result("2026-11-21-savings")
    new["tables"]["Traces"][0]["redundant, of all tokens"] = "33.0%"

    (found,) = compare_results(old, new).changed

    assert (found.committed, found.now, found.verdict) == ("32.0%", "33.0%", "differs")
    assert found.figure == "Traces, rag_2wikimultihopqa, 1000, redundant, of all tokens"


def test_an_arm_that_did_not_run_is_absent_and_shifts_no_other_row() -> None:
    old, new = result("2026-11-21-reuse"), result("2026-11-21-reuse")
    new["arms"] = {arm: found for arm, found in new["arms"].items() if not arm.endswith("vllm")}
    new["tables"] = {name: [row for row in rows if row.get("arm") != "vllm"] for name, rows in new["tables"].items()}

    found = compare_results(old, new)

    assert {one.verdict for one in found.figures} == {"agrees", "absent"}
    assert all(", vllm" in one.figure or "/vllm" in one.figure for one in found.figures if one.verdict == "absent")


def test_a_quoted_figure_is_never_kinder_than_its_worst_place() -> None:
    old = result("2026-11-26-first-questions")
    new = copy.deepcopy(old)
    quoted = "0.877 [0.831, 0.925]"  # stands in the arms and in two tables
    assert sum(text == quoted for _, text in intervals_of(old)) == 3
    new["tables"]["Mean time to first token"][3]["ratio to tiers"] = "0.99 [0.95, 1.1]"

    found = compare_results(old, new).quoted(quoted)

    assert found is not None and found.verdict == "differs" and found.now == "0.99 [0.95, 1.1]"
    assert compare_results(old, old).quoted("0.1 [0, 1]") is None
