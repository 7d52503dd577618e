"""Tests the traffic of `stillroom bench reuse`: curves, prompts, arrivals, KV capacity."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stillroom.errors import UsageError
from stillroom.planner.simulation.arrivals import arrivals
from stillroom_bench.loads.popularity import CURVES
from stillroom_bench.loads.reuse_traffic import (
    DEVICE_SHARE,
    MAX_SEQS,
    Pool,
    ReuseTraffic,
    budget_for,
    made_pool,
    popularity,
    read_pool,
    word_tokens,
)

POOL = made_pool(200, 1000, seed=0)


@pytest.mark.parametrize(("curve", "size"), [("mmlu", 100), ("mmlu", 2600), ("nq", 300)])
def test_top_three_percent_have_their_share(curve: str, size: int) -> None:
    shares = popularity(size, CURVES[curve])
    assert shares[: round(0.03 * size)].sum() == pytest.approx(CURVES[curve], abs=1e-6)
    assert shares.sum() == pytest.approx(1.0) and (np.diff(shares) < 0).all()


def test_drawn_requests_follow_the_curve() -> None:
    counts = Counter(documents[0] for documents in ReuseTraffic(POOL, "mmlu", 1, "drawn", 0).retrieved(4000, 0))
    assert sum(count for _, count in counts.most_common(6)) / 4000 == pytest.approx(0.6, abs=0.04)
    flatter = Counter(documents[0] for documents in ReuseTraffic(POOL, "nq", 1, "drawn", 0).retrieved(4000, 0))
    assert len(flatter) > len(counts)


def test_too_few_documents_for_a_curve_are_refused() -> None:
    with pytest.raises(UsageError, match="--documents"):
        popularity(2, CURVES["nq"])


def test_prompts_are_seeded_and_made_of_the_pool() -> None:
    traffic = ReuseTraffic(POOL, "mmlu", 3, "drawn", 7)
    prompts = traffic.prompts(20, 1)
    assert prompts == traffic.prompts(20, 1) != traffic.prompts(20, 2)
    assert prompts != ReuseTraffic(POOL, "mmlu", 3, "drawn", 8).prompts(20, 1)
    for prompt, documents in zip(prompts, traffic.retrieved(20, 1), strict=True):
        assert len(set(documents)) == 3
        assert prompt[:-1] == (POOL.system, *(POOL.documents[at] for at in documents))
        assert prompt[-1] in POOL.questions[documents[0]]


def test_repetitions_share_the_most_popular_document() -> None:
    traffic = ReuseTraffic(POOL, "mmlu", 1, "drawn", 0)
    tops = [Counter(row[0] for row in traffic.retrieved(500, at)).most_common(1)[0][0] for at in (0, 1)]
    assert tops[0] == tops[1]


def test_fixed_companions_come_with_their_document() -> None:
    found: dict[int, set[tuple[int, ...]]] = {}
    for first, *others in ReuseTraffic(POOL, "mmlu", 3, "fixed", 0).retrieved(300, 0):
        found.setdefault(first, set()).add(tuple(others))
    assert all(len(lists) == 1 for lists in found.values()) and len(found) > 10
    drawn = {tuple(row) for row in ReuseTraffic(POOL, "mmlu", 3, "drawn", 0).retrieved(300, 0)}
    assert len(drawn) > 2 * len(found)


def test_impossible_traffic_is_refused() -> None:
    for curve, k, companions in (("zipf", 1, "drawn"), ("mmlu", 201, "drawn"), ("mmlu", 1, "some")):
        with pytest.raises(UsageError):
            ReuseTraffic(POOL, curve, k, companions, 0)  # type: ignore[arg-type]


def test_arrivals_have_the_requested_rate() -> None:
    moments = arrivals(2000, 4.0, [1, 2])
    assert moments == sorted(moments) == arrivals(2000, 4.0, [1, 2]) != arrivals(2000, 4.0, [1, 3])
    assert moments[0] >= 0 and moments[-1] <= 500
    gaps = np.diff(moments)
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(0.25, rel=0.1), "exponential gaps spread as much as their mean"


def test_budget_equals_hand_computed_values() -> None:
    pool = Pool((1,) * 16, ((2,) * 100, (3,) * 60), (((4,) * 5,), ((5,) * 5,)))
    prompts = [(pool.system, pool.documents[0], pool.questions[0][0]), (pool.system, *pool.documents, (5,) * 5)]
    budget = budget_for(pool, prompts, max_tokens=2)
    needs = [16 + 112 + 16 + 16, 16 + 112 + 64 + 16 + 16]
    running = MAX_SEQS * sum(needs) // 2
    assert budget.device == -(-(running + round(DEVICE_SHARE * 176)) // 32) * 32
    assert (budget.host, budget.disk, budget.longest) == (70, 704, 16 + 160 + 5 + 2)
    assert budget.plenty >= running + 2 * 176


def make_dataset(folder: Path, num_documents: int) -> Path:
    folder.mkdir()
    documents = [{"_id": f"d{n}", "title": "", "text": f"number {n} " * (5 + n)} for n in range(num_documents)]
    queries = [{"_id": f"q{n}", "text": f"which is number {n}?"} for n in range(num_documents)]
    for name, records in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    judged = "".join(f"q{n}\td{n}\t1\n" for n in range(1, num_documents))  # d0 has no question
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


def test_pool_of_a_data_set_has_judged_documents_only(tmp_path: Path) -> None:
    encode = word_tokens(500)
    dataset = make_dataset(tmp_path / "set", 12)
    pool = read_pool(dataset, 8, encode, seed=0)
    assert len(pool.documents) == 8 and pool == read_pool(dataset, 8, encode, seed=0)
    assert len(read_pool(dataset, 100, encode, seed=0).documents) == 11, "questions were judged for 11"
    texts = {encode(f"number {n} " * (5 + n)): encode(f"which is number {n}?") for n in range(1, 12)}
    assert [texts[document] for document in pool.documents] == [asked[0] for asked in pool.questions]


def test_data_set_without_judged_documents_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "set", 3)
    (dataset / "corpus.jsonl").write_text('{"_id": "other", "text": "x"}\n')
    with pytest.raises(UsageError, match="ids agree"):
        read_pool(dataset, 5, word_tokens(500), seed=0)
    (dataset / "corpus.jsonl").unlink()
    with pytest.raises(UsageError, match=r"corpus\.jsonl"):
        read_pool(dataset, 5, word_tokens(500), seed=0)


def test_word_tokens_are_ids_of_the_vocabulary() -> None:
    ids = word_tokens(50)("Extraordinary, isn't it? It isn't.")
    assert len(ids) == len(["Extra", "ordin", "ary", ",", "isn", "'", "t", "it", "?", "It", "isn", "'", "t", "."])
    assert all(1 <= token < 50 for token in ids) and ids[4] == ids[10]
