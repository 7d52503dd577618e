"""Reuse at any position with a real model: exact answers are exact, and inexact KV is never used as exact.

With a recompute ratio of 1 tokens equal a full prefill, through query passes, gaps and placements.
"""

import math
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from stillroom.config.settings import TokenSelector
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.request import SamplingParams
from stillroom.core.reuse import Reason
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.models.decoder import Decoder
from tests.engine.engine_fixture import EngineFixture, Oracle, anywhere_fixture, question, without

ORDERS = [(1, 2, 3), (3, 1, 2), (2, 3), (4, 3, 2, 1), (1, 4, 5, 2)]


@pytest.mark.parametrize("selector", get_args(TokenSelector))
def test_tokens_equal_a_full_prefill_when_everything_is_recomputed(
    decoder: Decoder, oracle: Oracle, selector: TokenSelector
) -> None:
    fixture = anywhere_fixture(decoder, ratio=1.0, selector=selector)
    for number, documents in enumerate(ORDERS):
        one = question(f"r{number}", *documents)
        tokens, reuse = fixture.run(one)
        assert tokens == oracle.answer(one), documents
        assert reuse.has_placed is (number > 0)
        assert reuse.num_recomputed_tokens == sum(
            segment.num_tokens for segment in reuse.segments if segment.reason is Reason.ANYWHERE
        )


def test_logits_equal_a_full_prefill_when_everything_is_recomputed(decoder: Decoder) -> None:
    sampling = SamplingParams(max_tokens=4, logprobs=5)
    fixture, off = anywhere_fixture(decoder, ratio=1.0), EngineFixture(decoder, None, mode="off")
    fixture.run(question("before", 1, 2, 3))
    found = []
    for one in (fixture, off):
        one.engine.submit(replace(question("r", 3, 2, 1), sampling=sampling))
        scores = []
        while one.engine.has_work:
            scores += [event.logprobs for event in one.engine.step() if event.logprobs is not None]
        found.append(scores)
    assert len(found[0]) == len(found[1]) == 4
    for ours, exact in zip(*found, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in exact.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in exact.top], abs=1e-4)


def test_unchanged_prefix_is_exact_at_any_ratio(decoder: Decoder, oracle: Oracle) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.0)
    fixture.run(question("a", 1, 2, 3))
    tokens, reuse = fixture.run(question("b", 1, 2, 3))
    assert tokens == oracle.answer(question("b", 1, 2, 3))
    assert [segment.reason for segment in reuse.segments[:4]] == [Reason.HIT] * 4 and not reuse.has_placed


def test_moved_documents_are_placed_and_a_share_is_recomputed(decoder: Decoder) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.25)
    fixture.run(question("a", 1, 2, 3))
    before = fixture.num_computed
    _, reuse = fixture.run(question("b", 2, 3, max_tokens=1))
    system, two, three, asked = reuse.segments
    assert system.reason is Reason.HIT and asked.source is None
    assert two.reason is three.reason is Reason.ANYWHERE and two.source is Tier.DEVICE
    assert (two.num_tokens, three.num_tokens) == (13, 18)
    assert two.num_recomputed + three.num_recomputed == 8 == reuse.num_recomputed_tokens
    assert reuse.num_cached_tokens == 5 + 31 - 8
    assert fixture.num_computed - before == 3 + 8 + 3, "a query pass, then the chosen tokens and the question"
    stats = fixture.tree.stats
    assert (stats.placed[Tier.DEVICE], stats.placed_tokens, stats.recomputed_tokens) == (2, 31, 8)


def test_without_recompute_there_is_no_query_pass(decoder: Decoder) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.0)
    fixture.run(question("a", 1, 2))
    before = fixture.num_computed
    fixture.run(question("b", 2, 1, max_tokens=1))
    assert fixture.num_computed - before == 3


def test_key_of_a_copy_without_path_includes_its_position(decoder: Decoder) -> None:
    """Otherwise a reader that knows an earlier record of the same key would rotate its keys from the wrong position."""
    names = {}
    for documents in ((2, 5), (2, 1, 5)):
        fixture = anywhere_fixture(decoder)
        fixture.run(question("a", 1, 2))
        fixture.run(question("b", *documents))
        (node,) = [node for node in fixture.tree if node.chunk_id == 5]
        assert node.parent is None
        names[node.first_position] = node.key
    assert sorted(names) == [18, 26] and len(set(names.values())) == 2


def test_placed_kv_is_never_used_as_exact(decoder: Decoder, oracle: Oracle) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.0)
    fixture.run(question("a", 1, 2))
    fixture.run(question("b", 2, 1))
    fixture.cache.manager.allow_anywhere(None)
    one = question("c", 2, 1)
    tokens, reuse = fixture.run(one)
    assert tokens == oracle.answer(one)
    assert [segment.reason for segment in reuse.segments[1:3]] == [Reason.ORDER_DIFFERS] * 2


def test_chunk_computed_after_placed_chunks_is_kept_for_placing_only(decoder: Decoder, oracle: Oracle) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.2)
    fixture.run(question("a", 1))
    fixture.run(question("b", 2, 1))  # 2 is first, and exact
    fixture.run(question("c", 1, 2))  # 1 is exact
    fixture.run(question("d", 2, 9))  # exact again
    fixture.run(question("e", 9, 5))  # 9 is placed, 5 computed after it
    _, reuse = fixture.run(question("f", 5, 9))
    assert [segment.reason for segment in reuse.segments[1:3]] == [Reason.ANYWHERE] * 2
    fixture.cache.manager.allow_anywhere(None)
    one = question("g", 9, 5)
    tokens, reuse = fixture.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens == 5


def test_kv_used_by_a_running_request_is_not_evictable(decoder: Decoder) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.0)
    fixture.run(question("a", 1))
    fixture.run(question("b", 2, 1))
    one = question("c", 1, 2, 5)
    fixture.submit(one)
    while not fixture.tokens[one.request_id]:
        fixture.step()
    (kept,) = [node for node in fixture.tree if node.chunk_id == 5]
    assert kept.num_users == 1 and kept.block_ids is not None
    fixture.finish()
    assert kept.num_users == 0


def test_number_of_copies_is_bounded_by_the_number_of_documents(decoder: Decoder) -> None:
    """In any order: placed chunks store no further copies."""
    fixture = anywhere_fixture(decoder, ratio=0.1, blocks=200)
    randomness = random.Random(3)
    for number in range(60):
        documents = randomness.sample(range(6), 3)
        fixture.run(question(f"r{number}", *documents, max_tokens=1))
    assert len(fixture.tree) <= 1 + 2 * 6


def test_tenants_never_place_kv_of_each_other(decoder: Decoder) -> None:
    fixture = anywhere_fixture(decoder)
    fixture.run(replace(question("a", 1, 2), cache_salt="one"))
    _, other = fixture.run(replace(question("b", 2, 1), cache_salt="two"))
    _, same = fixture.run(replace(question("c", 2, 1), cache_salt="one"))
    assert other.num_cached_tokens == 0 and {segment.reason for segment in other.segments} == {
        Reason.NEVER_SEEN,
        Reason.TAIL,
    }
    assert same.has_placed


def test_warm_start_places_from_disk(decoder: Decoder, tmp_path: Path) -> None:
    first = anywhere_fixture(decoder, tmp_path)
    first.run(question("a", 1, 2))
    first.run(question("b", 2, 5))  # 5 follows a placed chunk
    first.cache.close()
    second = anywhere_fixture(decoder, tmp_path)
    _, reuse = second.run(question("c", 5, 1))
    assert [(segment.reason, segment.source) for segment in reuse.segments[1:3]] == [(Reason.ANYWHERE, Tier.DISK)] * 2


def test_copies_to_be_placed_are_prefetched(decoder: Decoder, tmp_path: Path) -> None:
    first = anywhere_fixture(decoder, tmp_path, ratio=0.2)
    first.run(question("a", 1, 2))
    first.cache.close()
    answers = []
    for folder in ("with", "without"):
        shutil.copytree(tmp_path, tmp_path.parent / folder)
        prefetch_bytes = 2**20 if folder == "with" else 0
        fixture = anywhere_fixture(decoder, tmp_path.parent / folder, ratio=0.2, prefetch_bytes=prefetch_bytes)
        answers.append(fixture.run(question("b", 2, 1)))
        assert fixture.cache.tiers is not None
        prefetch = fixture.cache.tiers.stats.prefetch
        assert prefetch.used_bytes <= 26 * fixture.bytes_per_token and prefetch.wasted_bytes == 0
        fixture.cache.close()
    assert answers[0] == answers[1] and answers[0][1].has_placed


def test_damaged_copy_is_recomputed(decoder: Decoder, oracle: Oracle, tmp_path: Path) -> None:
    first = anywhere_fixture(decoder, tmp_path)
    first.run(question("a", 1, 2))
    first.cache.close()
    for path in tmp_path.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
    one = question("b", 2, 1)
    second = anywhere_fixture(decoder, tmp_path, ratio=0.0)
    tokens, reuse = second.run(one)
    assert tokens == oracle.answer(one)
    assert reuse.num_cached_tokens == 0 and not list(tmp_path.rglob("*.kv"))


def test_path_above_a_placed_copy_is_not_evicted_for_it(decoder: Decoder) -> None:
    """The pool has blocks for the copies or for their sources' path, and nothing else can be evicted."""
    fixture = anywhere_fixture(decoder, ratio=0.0, blocks=10)
    fixture.run(question("a", 1, 2, 3))
    tokens, reuse = fixture.run(question("b", 3, 4, max_tokens=2))
    assert len(tokens) == 2 and not reuse.has_placed


def test_edited_document_drops_its_own_copies(decoder: Decoder) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.0)
    fixture.run(question("a", 1, 2))
    fixture.run(question("b", 2, 5))
    fixture.engine.scheduler.forget_chunks(partial(without, ChunkId(5)))
    _, reuse = fixture.run(question("c", 5, 2))
    assert [segment.reason for segment in reuse.segments[1:3]] == [Reason.NEVER_SEEN, Reason.ANYWHERE]


def test_preempted_request_reports_its_last_placements(decoder: Decoder) -> None:
    """A document is removed while a request runs, and then the request is preempted."""
    fixture = anywhere_fixture(decoder, ratio=0.3)
    fixture.run(question("a", 1, 2, 3))
    one = question("b", 3, 2, 1)
    fixture.submit(one)
    fixture.step()
    fixture.engine.scheduler.forget_chunks(partial(without, ChunkId(2)))
    assert fixture.engine.scheduler.restart(one.request_id)
    fixture.finish()
    reuse = fixture.reuse[one.request_id]
    placed = {segment.chunk_id for segment in reuse.segments if segment.reason is Reason.ANYWHERE}
    assert placed == {1} and reuse.num_recomputed_tokens == 3, "3 was computed after 2, and was dropped with it"


def test_samples_share_a_recomputed_prompt(decoder: Decoder, oracle: Oracle) -> None:
    fixture = anywhere_fixture(decoder, ratio=1.0)
    fixture.run(question("a", 1, 2, 3))
    group = [question(name, 3, 2, 1) for name in ("b", "b/1", "b/2")]
    fixture.submit(*group)
    fixture.finish()
    assert all(fixture.tokens[one.request_id] == oracle.answer(one) for one in group)


def test_sample_continues_the_recompute_of_a_cancelled_leader(decoder: Decoder, oracle: Oracle) -> None:
    fixture = anywhere_fixture(decoder, ratio=1.0)
    fixture.run(question("a", 1, 2, 3, 4))
    group = [question(name, 4, 3, 2, 1) for name in ("b", "b/1")]
    fixture.submit(*group)
    fixture.step()  # of three, at 33 tokens each
    assert fixture.engine.cancel(RequestId("b")) is not None
    fixture.finish()
    assert fixture.tokens[RequestId("b/1")] == oracle.answer(group[1])


def test_report_names_the_placed_copy(decoder: Decoder) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.25)
    fixture.run(question("a", 1, 2, 3))
    _, reuse = fixture.run(question("b", 2, 3))
    _, two, three, _ = (segment.variant for segment in reuse.segments)
    assert two is not None and three is not None
    assert (two.behind, three.behind) == ((1,), (1, 2)) and (two.first_position, three.first_position) == (13, 26)
    assert two.overlap == 0 and 0 < three.overlap < 1, "2 precedes 3 again, 1 does not"
    assert two.impact is not None and two.overhead == pytest.approx(two.impact) and three.overhead < two.overhead
    assert two.is_focused is None and two.saved_seconds > 0
    assert fixture.tree.stats.placed_overlap == two.overlap + three.overlap


def test_recompute_budget_follows_the_context(decoder: Decoder) -> None:
    """CFO instead of one ratio: the more of its old context precedes a chunk again, the less is recomputed."""
    fixture = anywhere_fixture(decoder, ratio=0.5)
    fixture.run(question("a", 1, 2, 3))
    fixture.cache.manager.allow_anywhere(AnywhereOptions(0.5, "first", alpha=1.0))
    _, reuse = fixture.run(question("b", 2, 3))
    for segment in reuse.segments:
        if segment.variant is not None:
            assert segment.num_recomputed == math.ceil(segment.variant.overhead * segment.num_tokens)
    placed = [one for one in reuse.segments if one.variant is not None]
    planned = sum(one.variant.overhead * one.num_tokens for one in placed if one.variant is not None)
    assert len(placed) == 2 and reuse.recompute_ratio == pytest.approx(planned / 31)


def test_deviation_pass_selects_tokens_whose_context_changed(decoder: Decoder) -> None:
    """CacheBlend: only tokens whose context changed differ in the second layer, and some of these are recomputed."""
    fixture = anywhere_fixture(decoder, ratio=0.25, selector="deviation")
    fixture.run(question("a", 1, 2, 3))
    before = fixture.num_computed
    _, reuse = fixture.run(question("b", 2, 3, max_tokens=1))
    assert reuse.num_recomputed_tokens == 8
    assert fixture.num_computed - before == 34 + 8 + 3, (
        "a deviation pass over everything in two layers, then the computing pass"
    )


def test_deviation_pass_ignores_uninitialised_slots(decoder: Decoder) -> None:
    """Device memory may hold any values, NaN too, before it is written."""
    found = []
    for garbage in (0.0, float("nan"), 3e38):
        fixture = anywhere_fixture(decoder, ratio=0.25, selector="deviation")
        for kv in (fixture.cache.device.k_LSGD, fixture.cache.device.v_LSGD):
            kv.fill_(garbage)
        fixture.run(question("a", 1, 2, 3))
        fixture.submit(question("b", 2, 3))
        fixture.finish()
        assert fixture.last[RequestId("b")].error is None, garbage
        found.append(fixture.tokens[RequestId("b")])
    assert found[0] == found[1] == found[2]


def test_answers_are_wrong_without_rerotated_keys(decoder: Decoder, oracle: Oracle) -> None:
    """Cache-Craft's Table 3: without recompute, the exact answer needs rerotated keys."""
    fixture = anywhere_fixture(decoder, ratio=0.0)
    fixture.run(question("a", 1))
    scores = {}
    for rotates_keys in (True, False):
        fixture.cache.manager.allow_anywhere(AnywhereOptions(0.0, "first", rotates_keys=rotates_keys))
        one = question(f"b{rotates_keys}", 2, 1)
        fixture.engine.submit(replace(one, sampling=SamplingParams(max_tokens=1, logprobs=5)))
        while fixture.engine.has_work:
            for event in fixture.engine.step():
                scores[rotates_keys] = event.logprobs
    assert scores[True] != scores[False]


def test_copy_that_fails_during_preloading_is_recomputed(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = anywhere_fixture(decoder, ratio=0.0, preload="layers")
    fixture.run(question("a", 1, 2))

    def fails(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr("stillroom.ops.cpu_kernels.rotate_into_single_threaded", fails)
    one = question("b", 2, 1)
    fixture.submit(one)
    fixture.step()
    monkeypatch.undo()
    fixture.finish()
    assert len(fixture.tokens[one.request_id]) == 6
    fixture.cache.manager.allow_anywhere(None)
    one = question("c", 1, 2)
    assert fixture.run(one)[0] == oracle.answer(one)
