"""Tests `stillroom bench tiered --parts` with a clock of its own, and that the parts are a whole search."""

from typing import Any

import numpy as np
import pytest

from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_parts import PARTS, run_parts, time_parts
from stillroom_bench.experiments.tiered_throughput import SkewedQuestions, made_lists

SCOPE = TieredOptions(size=1000, nlist=16, nprobe=4, batch_sizes=(1, 8), repeat=2)


@pytest.fixture(scope="module")
def lists() -> Any:
    return made_lists(SCOPE)


def test_parts_add_up_to_the_time_of_a_search_of_given_lists(lists: Any) -> None:
    """The clock advances by 1, 2 and 6 seconds: coarse search, tables, and the search of the lists, tables included."""
    moments = iter([0.0, 1.0, 3.0, 9.0])
    queries = SkewedQuestions(lists, 0.8, SCOPE).draw(2, 0)

    parts = time_parts(lists, queries, SCOPE.nprobe, lambda: next(moments))

    assert parts == {"coarse_seconds": 0.5, "tables_seconds": 1.0, "scan_seconds": 2.0}


def test_tables_are_those_of_the_search(lists: Any) -> None:
    """A list's best code by its table is the best result of a search of that list."""
    from stillroom_bench.experiments.tiered_parts import faiss

    query = np.ascontiguousarray(SkewedQuestions(lists, 0.8, SCOPE).draw(1, 0))
    table = np.empty((lists.pq.M, lists.pq.ksub), np.float32)
    lists.pq.compute_inner_prod_table(faiss.swig_ptr(query), faiss.swig_ptr(table))
    nearness, probed = lists.quantizer.search(query, 1)
    size = lists.invlists.list_size(int(probed[0, 0]))
    codes = faiss.rev_swig_ptr(lists.invlists.get_codes(int(probed[0, 0])), size * lists.code_size)
    scores = nearness[0, 0] + table[np.arange(lists.pq.M), codes.reshape(size, -1)].sum(axis=1)

    lists.nprobe = 1
    found, _ = lists.search_preassigned(query, 1, probed, nearness)
    assert found[0, 0] == pytest.approx(scores.max(), abs=1e-4)


@pytest.mark.slow  # trains an index and fits the skew of questions
def test_report_has_every_part_and_batch_size() -> None:
    result = run_parts(SCOPE)

    assert set(result.samples.values) == {f"{skew}, batch {size}" for skew in ("wiki-all", "ORCAS") for size in (1, 8)}
    rows = result.tables["Shares of a search"]
    assert all(set(PARTS) < set(row) for row in rows)
