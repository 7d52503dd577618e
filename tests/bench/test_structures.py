"""Tests `stillroom bench structures`: the alternatives do the same job, and the report has every group."""

import pytest

from stillroom.core.indexed_heap import IndexedHeap
from stillroom.core.token_cache import TokenCache, lru
from stillroom_bench.experiments.experiment_options import StructuresOptions
from stillroom_bench.experiments.structures import (
    LazyHeap,
    PlainLru,
    cache_requests,
    drive_heap,
    heap_operations,
    run_structures,
)


@pytest.mark.parametrize("num_updates", [0, 3])
def test_both_heaps_run_all_operations(num_updates: int) -> None:
    operations = heap_operations(0, 2000, 50, num_updates)
    assert {what for what, _, _ in operations} == {"push", "pop", "remove"} | ({"update"} if num_updates else set())
    ours, theirs = drive_heap(IndexedHeap[int](), operations), drive_heap(LazyHeap(), operations)
    assert ours["entries_held"] == 50
    assert theirs["entries_held"] >= 50, "dead entries stay"


def test_plain_lru_and_token_cache_evict_the_same_keys() -> None:
    ours: TokenCache[int, bool] = TokenCache(20_000, lru)
    plain = PlainLru(20_000)
    for key, num_tokens in cache_requests(0, 3000):
        assert (ours.get(key) is None) == (plain.get(key) is None)
        if key not in ours:
            ours.put(key, True, num_tokens)
            plain.put(key, True, num_tokens)
        assert ours.total_tokens == plain.total


def test_report_has_every_group_and_its_ratios() -> None:
    result = run_structures(StructuresOptions(repeat=2, operations=300))
    groups = {arm.split("/")[0] for arm in result.samples.values}
    assert groups == {
        "heap, 8 re-keyed per departure",
        "heap, never re-keyed",
        "cache",
        "sketch",
        "prefix sharing",
        "knowledge tree",
        "scheduling, 15 waiting",
        "scheduling, 15 submitted",
    }
    assert result.samples.of("scheduling, 15 submitted/batches of 32", "answered") == [15.0] * 2
    ratio = result.ratio("sketch/Counter", "operation_seconds")
    assert ratio is not None and ratio.value > 0
    assert result.ratio("sketch/stillroom", "operation_seconds") is None
    assert min(result.samples.of("sketch/stillroom", "share_within_bound")) > 0.98
