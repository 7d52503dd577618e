"""Reuse anywhere with a real model: what is promised to be exact is, and nothing inexact is ever taken for exact.

With a recompute ratio of 1 tokens are those of a full prefill, through looks, gaps and placements; and in a soak that
changes between modes, every request whose report names no placed document answers as if nothing were reused.
"""

import math
import random
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stillroom.backends.assembly import kv_shape
from stillroom.config.settings import TokenSelector
from stillroom.core.batch import Batch, StepResult
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import Request, SamplingParams
from stillroom.core.reuse import Reason
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvstore.device import DeviceStore
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_decoder
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionSpan
from stillroom.ops.attention_mass import attention_weights_reference
from tests.engine.test_reuse import BLOCK, House, Oracle, damage, question, without
from tests.fakes import random_checkpoint


@pytest.fixture(scope="module")
def long_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=2, max_position_embeddings=2048)
    return load_decoder(path, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def oracle(decoder: Decoder) -> Oracle:
    return Oracle(decoder)


def new_house(
    decoder: Decoder,
    folder: Path | None = None,
    *,
    ratio: float = 0.3,
    selector: TokenSelector = "question",
    blocks: int = 60,
    host_tokens: int = 400,
    **changes: Any,
) -> House:
    return House(
        decoder,
        folder,
        blocks=blocks,
        host_tokens=host_tokens,
        disk_records=60,
        mode="anywhere",
        load="always",  # with a ratio of 1 nothing is worth placing
        recompute_ratio=ratio,
        token_selector=selector,
        **changes,
    )


ORDERS = [(1, 2, 3), (3, 1, 2), (2, 3), (4, 3, 2, 1), (1, 4, 5, 2)]


@pytest.mark.parametrize("selector", get_args(TokenSelector))
def test_with_everything_computed_again_tokens_are_those_of_a_full_prefill(
    decoder: Decoder, oracle: Oracle, selector: TokenSelector
) -> None:
    house = new_house(decoder, ratio=1.0, selector=selector)
    for number, documents in enumerate(ORDERS):
        one = question(f"r{number}", *documents)
        tokens, reuse = house.run(one)
        assert tokens == oracle.answer(one), documents
        assert reuse.has_placed is (number > 0)
        assert reuse.num_recomputed_tokens == sum(
            segment.num_tokens for segment in reuse.segments if segment.reason is Reason.ANYWHERE
        )


def test_with_everything_computed_again_logits_are_those_of_a_full_prefill(decoder: Decoder) -> None:
    sampling = SamplingParams(max_tokens=4, logprobs=5)
    house, off = new_house(decoder, ratio=1.0), House(decoder, None, mode="off")
    house.run(question("before", 1, 2, 3))
    found = []
    for one in (house, off):
        one.engine.submit(replace(question("r", 3, 2, 1), sampling=sampling))
        scores = []
        while one.engine.has_work:
            scores += [event.logprobs for event in one.engine.step() if event.logprobs is not None]
        found.append(scores)
    assert len(found[0]) == len(found[1]) == 4
    for ours, exact in zip(*found, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in exact.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in exact.top], abs=1e-4)


def test_an_unchanged_prefix_is_exact_whatever_the_ratio(decoder: Decoder, oracle: Oracle) -> None:
    house = new_house(decoder, ratio=0.0)
    house.run(question("a", 1, 2, 3))
    tokens, reuse = house.run(question("b", 1, 2, 3))
    assert tokens == oracle.answer(question("b", 1, 2, 3))
    assert [segment.reason for segment in reuse.segments[:4]] == [Reason.HIT] * 4 and not reuse.has_placed


def test_moved_documents_are_placed_and_a_share_of_them_computed_again(decoder: Decoder) -> None:
    house = new_house(decoder, ratio=0.25)
    house.run(question("a", 1, 2, 3))
    before = house.num_computed
    _, reuse = house.run(question("b", 2, 3, max_tokens=1))
    system, two, three, asked = reuse.segments
    assert system.reason is Reason.HIT and asked.source is None
    assert two.reason is three.reason is Reason.ANYWHERE and two.source is Tier.DEVICE
    assert (two.num_tokens, three.num_tokens) == (13, 18)
    assert two.num_recomputed + three.num_recomputed == 8 == reuse.num_recomputed_tokens
    assert reuse.num_cached_tokens == 5 + 31 - 8
    assert house.num_computed - before == 3 + 8 + 3, "a look of the question, then the chosen tokens and the question"
    stats = house.tree.stats
    assert (stats.placed[Tier.DEVICE], stats.placed_tokens, stats.recomputed_tokens) == (2, 31, 8)


def test_without_recompute_nobody_looks(decoder: Decoder) -> None:
    house = new_house(decoder, ratio=0.0)
    house.run(question("a", 1, 2))
    before = house.num_computed
    house.run(question("b", 2, 1, max_tokens=1))
    assert house.num_computed - before == 3


def test_a_copy_kept_alone_is_named_by_its_position_too(decoder: Decoder) -> None:
    """A reader of these records, who knew an earlier one of the name, would turn its keys from where that one stood."""
    names = {}
    for documents in ((2, 5), (2, 1, 5)):
        house = new_house(decoder)
        house.run(question("a", 1, 2))
        house.run(question("b", *documents))
        (node,) = [node for node in house.tree if node.chunk_id == 5]
        assert node.parent is None
        names[node.first_position] = node.key
    assert sorted(names) == [18, 26] and len(set(names.values())) == 2


def test_what_was_placed_is_never_taken_for_exact(decoder: Decoder, oracle: Oracle) -> None:
    house = new_house(decoder, ratio=0.0)
    house.run(question("a", 1, 2))
    house.run(question("b", 2, 1))
    house.cache.manager.allow_anywhere(None)
    one = question("c", 2, 1)
    tokens, reuse = house.run(one)
    assert tokens == oracle.answer(one)
    assert [segment.reason for segment in reuse.segments[1:3]] == [Reason.ORDER_DIFFERS] * 2


def test_a_chunk_computed_behind_placed_ones_is_kept_for_placing_only(decoder: Decoder, oracle: Oracle) -> None:
    house = new_house(decoder, ratio=0.2)
    house.run(question("a", 1))
    house.run(question("b", 2, 1))  # 2 is first, and exact
    house.run(question("c", 1, 2))  # 1 is exact
    house.run(question("d", 2, 9))  # exact again
    house.run(question("e", 9, 5))  # 9 is placed, 5 computed behind it
    _, reuse = house.run(question("f", 5, 9))
    assert [segment.reason for segment in reuse.segments[1:3]] == [Reason.ANYWHERE] * 2
    house.cache.manager.allow_anywhere(None)
    one = question("g", 9, 5)
    tokens, reuse = house.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens == 5


def test_what_is_kept_of_a_running_request_is_no_room_for_others(decoder: Decoder) -> None:
    house = new_house(decoder, ratio=0.0)
    house.run(question("a", 1))
    house.run(question("b", 2, 1))
    one = question("c", 1, 2, 5)
    house.submit(one)
    while not house.tokens[one.request_id]:
        house.step()
    (kept,) = [node for node in house.tree if node.chunk_id == 5]
    assert kept.num_users == 1 and kept.block_ids is not None
    house.finish()
    assert kept.num_users == 0


def test_inserts_are_bounded_by_the_number_of_documents(decoder: Decoder) -> None:
    """However they are shuffled: whoever was placed leaves nothing behind."""
    house = new_house(decoder, ratio=0.1, blocks=200)
    randomness = random.Random(3)
    for number in range(60):
        documents = randomness.sample(range(6), 3)
        house.run(question(f"r{number}", *documents, max_tokens=1))
    assert len(house.tree) <= 1 + 2 * 6


def test_tenants_place_nothing_of_each_other(decoder: Decoder) -> None:
    house = new_house(decoder)
    house.run(replace(question("a", 1, 2), cache_salt="one"))
    _, other = house.run(replace(question("b", 2, 1), cache_salt="two"))
    _, same = house.run(replace(question("c", 2, 1), cache_salt="one"))
    assert other.num_cached_tokens == 0 and {segment.reason for segment in other.segments} == {
        Reason.NEVER_SEEN,
        Reason.TAIL,
    }
    assert same.has_placed


def test_a_warm_start_places_from_disk(decoder: Decoder, tmp_path: Path) -> None:
    first = new_house(decoder, tmp_path)
    first.run(question("a", 1, 2))
    first.run(question("b", 2, 5))  # 5 stands behind a placed chunk
    first.cache.close()
    second = new_house(decoder, tmp_path)
    _, reuse = second.run(question("c", 5, 1))
    assert [(segment.reason, segment.source) for segment in reuse.segments[1:3]] == [(Reason.ANYWHERE, Tier.DISK)] * 2


def test_what_will_be_placed_is_read_ahead(decoder: Decoder, tmp_path: Path) -> None:
    first = new_house(decoder, tmp_path, ratio=0.2)
    first.run(question("a", 1, 2))
    first.cache.close()
    answers = []
    for folder in ("with", "without"):
        shutil.copytree(tmp_path, tmp_path.parent / folder)
        prefetch_bytes = 2**20 if folder == "with" else 0
        house = new_house(decoder, tmp_path.parent / folder, ratio=0.2, prefetch_bytes=prefetch_bytes)
        answers.append(house.run(question("b", 2, 1)))
        assert house.cache.tiers is not None
        prefetch = house.cache.tiers.stats.prefetch
        assert prefetch.used_bytes <= 26 * house.bytes_per_token and prefetch.wasted_bytes == 0
        house.cache.close()
    assert answers[0] == answers[1] and answers[0][1].has_placed


def test_a_damaged_copy_is_computed(decoder: Decoder, oracle: Oracle, tmp_path: Path) -> None:
    first = new_house(decoder, tmp_path)
    first.run(question("a", 1, 2))
    first.cache.close()
    for path in tmp_path.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
    one = question("b", 2, 1)
    second = new_house(decoder, tmp_path, ratio=0.0)
    tokens, reuse = second.run(one)
    assert tokens == oracle.answer(one)
    assert reuse.num_cached_tokens == 0 and not list(tmp_path.rglob("*.kv"))


def test_what_stands_above_a_placed_copy_makes_no_room_for_it(decoder: Decoder) -> None:
    """The pool has blocks for the copies or for their sources' path, and nothing else can leave."""
    house = new_house(decoder, ratio=0.0, blocks=10)
    house.run(question("a", 1, 2, 3))
    tokens, reuse = house.run(question("b", 3, 4, max_tokens=2))
    assert len(tokens) == 2 and not reuse.has_placed


def test_an_edited_document_takes_its_own_copies_along(decoder: Decoder) -> None:
    house = new_house(decoder, ratio=0.0)
    house.run(question("a", 1, 2))
    house.run(question("b", 2, 5))
    house.engine.scheduler.forget_chunks(partial(without, ChunkId(5)))
    _, reuse = house.run(question("c", 5, 2))
    assert [segment.reason for segment in reuse.segments[1:3]] == [Reason.NEVER_SEEN, Reason.ANYWHERE]


def test_who_waits_again_says_what_was_placed_the_last_time(decoder: Decoder) -> None:
    """A document is removed while a request runs, and then the request has to make room."""
    house = new_house(decoder, ratio=0.3)
    house.run(question("a", 1, 2, 3))
    one = question("b", 3, 2, 1)
    house.submit(one)
    house.step()
    house.engine.scheduler.forget_chunks(partial(without, ChunkId(2)))
    assert house.engine.scheduler.restart(one.request_id)
    house.finish()
    reuse = house.reuse[one.request_id]
    placed = {segment.chunk_id for segment in reuse.segments if segment.reason is Reason.ANYWHERE}
    assert placed == {1} and reuse.num_recomputed_tokens == 3, "3 stood behind 2, and went with it"


def test_samples_share_a_repaired_prompt(decoder: Decoder, oracle: Oracle) -> None:
    house = new_house(decoder, ratio=1.0)
    house.run(question("a", 1, 2, 3))
    group = [question(name, 3, 2, 1) for name in ("b", "b/1", "b/2")]
    house.submit(*group)
    house.finish()
    assert all(house.tokens[one.request_id] == oracle.answer(one) for one in group)


def test_a_sample_goes_on_with_the_repair_of_a_leader_that_leaves(decoder: Decoder, oracle: Oracle) -> None:
    house = new_house(decoder, ratio=1.0)
    house.run(question("a", 1, 2, 3, 4))
    group = [question(name, 4, 3, 2, 1) for name in ("b", "b/1")]
    house.submit(*group)
    house.step()  # of three, at 33 tokens each
    assert house.engine.cancel(RequestId("b")) is not None
    house.finish()
    assert house.tokens[RequestId("b/1")] == oracle.answer(group[1])


def disturb(house: House, folder: Path, randomness: random.Random) -> None:
    if randomness.random() < 0.02:
        damage(folder, randomness)
    elif randomness.random() < 0.005:
        house.cache.device.lose()
    elif randomness.random() < 0.01:
        house.engine.scheduler.forget_chunks(partial(without, ChunkId(randomness.randint(0, 14))))
    elif not house.engine.has_work:
        house.engine.do_idle_work()


def slow_masses(decoder: Decoder, token_ids: tuple[int, ...], slots: torch.Tensor) -> torch.Tensor:
    """[tokens, tokens] attention of a whole prompt, mean over heads and layers, from explicit weights."""
    total = torch.zeros(len(token_ids), len(token_ids), dtype=torch.float64)

    class Everything:
        def observe(self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, *limits: object) -> None:
            weights_HQK = attention_weights_reference(q_THD, k_SGD[slots], scale)
            total.add_(weights_HQK.mean(0) / decoder.spec.num_layers)

    store = DeviceStore(kv_shape(decoder), 20, BLOCK, torch.device("cpu"))
    numbers = torch.arange(len(token_ids))
    span = AttentionSpan(0, len(token_ids), slots, len(token_ids))
    packed = PackedInput(torch.tensor(token_ids), numbers, slots, [span], [len(token_ids) - 1])
    decoder.hidden_states(packed, store.layer, Everything())
    return total


def test_what_chunks_pay_to_each_other_is_measured_when_they_are_computed(decoder: Decoder) -> None:
    """In pieces of 33 tokens, beside another prompt; Equations 3, 4 and 14 against whole attention matrices."""
    house = new_house(decoder, selector="context")
    one = question("a", 1, 2, 3, 4)
    house.submit(question("other", 7, 8))
    house.submit(one)
    house.finish()
    ids = one.prompt.token_ids
    paid_TT = slow_masses(decoder, ids, torch.randperm(100, generator=torch.Generator().manual_seed(0))[: len(ids)])
    start = 5
    starts = [5]
    for document, length in ((1, 8), (2, 13), (3, 18), (4, 6)):
        (node,) = [node for node in house.tree if node.chunk_id == document]
        mass = node.mass
        assert (node.first_position, node.num_tokens) == (start, length) and mass is not None
        own_TT = paid_TT[start : start + length]
        assert mass.token_inter is not None and mass.received is not None
        close(mass.token_inter, own_TT[:, 5:start].sum(1))
        assert mass.intra == pytest.approx(float(own_TT[:, start : start + length].tril(-1).sum()), rel=1e-3)
        assert mass.prefix_lengths == tuple(end - first for first, end in pairwise(starts))
        inter = [own_TT[:, first:end].sum() for first, end in pairwise(starts)]
        close(mass.inter, torch.tensor(inter, dtype=torch.float64))
        start += length
        starts.append(start)


def close(found: NDArray[np.float32], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found), wanted.float(), rtol=1e-3, atol=1e-5)


def test_a_sample_of_the_tokens_stands_for_all_and_survives_a_restart(decoder: Decoder, tmp_path: Path) -> None:
    house = new_house(decoder, tmp_path)
    house.run(question("a", 1, 2, 3))
    masses = {node.key: node.mass for node in house.tree}
    for node in house.tree:
        if node.chunk_id is None:
            assert node.mass is None
            continue
        assert node.mass is not None and node.mass.token_inter is None
        assert len(node.mass.prefix) == node.chunk_id - 1 and node.mass.intra > 0
        assert all(node.mass.inter > 0) and 0.5 <= node.mass.impact < 1
    house.cache.close()
    again = new_house(decoder, tmp_path)
    for node in again.tree:
        before = masses[node.key]
        assert (node.mass is None) == (before is None)
        assert node.mass is None or before is None or node.mass.impact == pytest.approx(before.impact)


LONG = tuple(10 + i * i % 280 for i in range(1000))


def chosen_again(house: House, *documents: int) -> list[int]:
    """Ask over the documents (0: one of 1,000 tokens); return the positions that were computed.

    Requires room for all of them.
    """
    one = question("-".join(map(str, documents)), *documents)
    segments = tuple(
        replace(segment, token_ids=LONG) if segment.chunk_id == 0 else segment for segment in one.prompt.segments
    )
    positions: list[int] = []
    execute = house.engine.runner.execute

    def observed(batch: Batch) -> StepResult:
        for scheduled in batch.sequences:
            if scheduled.positions is not None and not scheduled.is_query_pass:
                positions.extend(scheduled.positions.tolist())
        return execute(batch)

    house.engine.runner.execute = observed  # type: ignore[method-assign]
    _, reuse = house.run(replace(one, prompt=SegmentedPrompt(segments)))
    house.engine.runner.execute = execute  # type: ignore[method-assign]
    assert reuse.has_placed is (documents[0] == 0)
    return positions


def test_tokens_of_a_long_document_are_chosen_alike_after_a_restart(long_decoder: Decoder, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"blocks": 400, "host_tokens": 3000, "disk_records": 300}
    settings: dict[str, Any] = {"mode": "anywhere", "load": "always", "token_selector": "context"}
    stays = House(long_decoder, None, **sizes, **settings)
    chosen_again(stays, 1, 0)
    wanted = chosen_again(stays, 0, 1)
    closes = House(long_decoder, tmp_path, **sizes, **settings)
    chosen_again(closes, 1, 0)
    closes.cache.close()
    assert chosen_again(House(long_decoder, tmp_path, **sizes, **settings), 0, 1) == wanted
    assert not set(range(5, 5 + 150)) <= set(wanted), "these are not simply the first tokens"


@pytest.mark.parametrize("selector", ["context", "received"])
def test_a_copy_whose_tokens_were_not_weighed_is_computed_where_the_selector_ranks_them(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, selector: TokenSelector
) -> None:
    sampled = new_house(decoder, tmp_path, selector="question")
    sampled.run(question("a", 1, 2, 3))
    sampled.cache.close()
    house = new_house(decoder, tmp_path, selector=selector)
    tokens, reuse = house.run(question("b", 3, 2, 1))
    assert not reuse.has_placed and tokens == oracle.answer(question("b", 3, 2, 1))
    _, reuse = house.run(question("c", 2, 1, 3))
    assert reuse.has_placed, "of the copies that were weighed just now"


def test_nothing_is_measured_where_nothing_is_placed(decoder: Decoder) -> None:
    house = House(decoder, None, mode="exact")
    house.run(question("a", 1, 2))
    assert all(node.mass is None for node in house.tree)


def test_the_report_says_which_copy_was_placed(decoder: Decoder) -> None:
    house = new_house(decoder, ratio=0.25)
    house.run(question("a", 1, 2, 3))
    _, reuse = house.run(question("b", 2, 3))
    _, two, three, _ = (segment.variant for segment in reuse.segments)
    assert two is not None and three is not None
    assert (two.behind, three.behind) == ((1,), (1, 2)) and (two.first_position, three.first_position) == (13, 26)
    assert two.overlap == 0 and 0 < three.overlap < 1, "2 stands before 3 again, 1 does not"
    assert two.impact is not None and two.overhead == pytest.approx(two.impact) and three.overhead < two.overhead
    assert two.is_focused is None and two.saved_seconds > 0
    assert house.tree.stats.placed_overlap == two.overlap + three.overlap


def test_the_budget_follows_the_context(decoder: Decoder) -> None:
    """CFO in the place of one ratio: the more of its old context is there again, the less is computed again."""
    house = new_house(decoder, ratio=0.5)
    house.run(question("a", 1, 2, 3))
    house.cache.manager.allow_anywhere(AnywhereOptions(0.5, "first", alpha=1.0))
    _, reuse = house.run(question("b", 2, 3))
    for segment in reuse.segments:
        if segment.variant is not None:
            assert segment.num_recomputed == math.ceil(segment.variant.overhead * segment.num_tokens)
    placed = [one for one in reuse.segments if one.variant is not None]
    planned = sum(one.variant.overhead * one.num_tokens for one in placed if one.variant is not None)
    assert len(placed) == 2 and reuse.recompute_ratio == pytest.approx(planned / 31)


def test_a_probe_measures_how_far_values_are_from_those_computed_here(decoder: Decoder) -> None:
    """CacheBlend: only tokens whose context changed differ in the second layer, and those of it are recomputed."""
    house = new_house(decoder, ratio=0.25, selector="deviation")
    house.run(question("a", 1, 2, 3))
    before = house.num_computed
    _, reuse = house.run(question("b", 2, 3, max_tokens=1))
    assert reuse.num_recomputed_tokens == 8
    assert house.num_computed - before == 34 + 8 + 3, "a probe of everything, in two layers, then the pass"


def test_what_a_slot_held_before_its_token_was_computed_does_not_matter_to_a_probe(decoder: Decoder) -> None:
    """Memory of the device holds anything, NaN too, until it is written."""
    found = []
    for garbage in (0.0, float("nan"), 3e38):
        house = new_house(decoder, ratio=0.25, selector="deviation")
        for kv in (house.cache.device.k_LSGD, house.cache.device.v_LSGD):
            kv.fill_(garbage)
        house.run(question("a", 1, 2, 3))
        house.submit(question("b", 2, 3))
        house.finish()
        assert house.last[RequestId("b")].error is None, garbage
        found.append(house.tokens[RequestId("b")])
    assert found[0] == found[1] == found[2]


def test_keys_that_are_not_turned_are_wrong(decoder: Decoder, oracle: Oracle) -> None:
    """What Cache-Craft's Table 3 shows: with nothing computed again, the exact answer needs turned keys."""
    house = new_house(decoder, ratio=0.0)
    house.run(question("a", 1))
    scores = {}
    for rotates_keys in (True, False):
        house.cache.manager.allow_anywhere(AnywhereOptions(0.0, "first", rotates_keys=rotates_keys))
        one = question(f"b{rotates_keys}", 2, 1)
        house.engine.submit(replace(one, sampling=SamplingParams(max_tokens=1, logprobs=5)))
        while house.engine.has_work:
            for event in house.engine.step():
                scores[rotates_keys] = event.logprobs
    assert scores[True] != scores[False]


def soak(decoder: Decoder, oracle: Oracle, folder: Path, num_requests: int, seed: int) -> House:
    """Modes, ratios and selectors change at any time, also while requests run."""
    randomness, house = random.Random(seed), new_house(decoder, folder, blocks=45)
    alive: dict[RequestId, Request] = {}
    number = num_exact = 0
    while number < num_requests or house.engine.has_work:
        if randomness.random() < 0.15:
            options = AnywhereOptions(
                randomness.choice((0.0, 0.1, 0.5, 1.0)),
                randomness.choice(get_args(TokenSelector)),
                randomness.choice((None, 0.5)),
                randomness.choice((0, 1)),
            )
            house.cache.manager.allow_anywhere(None if randomness.random() < 0.4 else options)
        if number < num_requests and len(alive) < 12 and randomness.random() < 0.6:
            number += 1
            documents = [min(int(randomness.expovariate(0.35)), 14) for _ in range(randomness.randint(0, 4))]
            one = question(
                f"r{number}", *documents, tail=randomness.choice((1, 3, 20)), max_tokens=randomness.randint(1, 8)
            )
            group = [one]
            if randomness.random() < 0.1:
                group += [replace(one, request_id=RequestId(f"r{number}/{i}")) for i in range(1, 3)]
            alive |= {member.request_id: member for member in group}
            house.submit(*group)
        elif randomness.random() < 0.03 and alive:
            victim = randomness.choice(sorted(alive))
            assert house.engine.cancel(victim) is not None
            del alive[victim]
        else:
            disturb(house, folder, randomness)
        house.step()
        for request_id in [request_id for request_id in alive if request_id in house.last]:
            one = alive.pop(request_id)
            if request_id in house.reuse and not house.reuse[request_id].has_placed:
                num_exact += 1
                assert house.tokens[request_id] == oracle.answer(one), request_id
    assert not alive and num_exact > num_requests / 5
    return house


@pytest.mark.parametrize(("num_requests", "seed"), [(250, 1), pytest.param(2_000, 2, marks=pytest.mark.slow)])
def test_a_soak_through_all_modes(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, num_requests: int, seed: int
) -> None:
    house = soak(decoder, oracle, tmp_path, num_requests, seed)
    stats = house.tree.stats
    assert stats.placed[Tier.DEVICE] and stats.placed[Tier.HOST] and stats.hits[Tier.DEVICE], stats
    house.tree.clear()
    house.engine.check_integrity()
    assert house.cache.manager.pool.num_used == 0, "a block leaked"


def test_loading_ahead_changes_nothing(decoder: Decoder, tmp_path: Path) -> None:
    """The same traffic through two engines: placements, loads, evictions, preemptions and aborts, in tiny tiers."""
    houses = [
        new_house(decoder, tmp_path / name, blocks=30, host_tokens=40, prefetch_bytes=num_bytes, preload=preload)
        for name, num_bytes, preload in (("at once", 0, "off"), ("ahead", 2**14, "layers"))
    ]
    randomness, num_requests = random.Random(4), 100
    alive: set[RequestId] = set()
    number = 0
    while number < num_requests or alive:
        if number < num_requests and len(alive) < 6 and randomness.random() < 0.6:
            number += 1
            documents = [min(int(randomness.expovariate(0.35)), 9) for _ in range(randomness.randint(1, 4))]
            one = question(f"r{number}", *documents, max_tokens=randomness.randint(1, 8))
            alive.add(one.request_id)
            for house in houses:
                house.submit(one)
        elif alive and randomness.random() < 0.03:
            victim = randomness.choice(sorted(alive))
            alive.remove(victim)
            assert all(house.engine.cancel(victim) is not None for house in houses)
        elif alive and randomness.random() < 0.02:
            victim = randomness.choice(sorted(alive))
            assert len({house.engine.scheduler.restart(victim) for house in houses}) == 1
        for house in houses:
            house.step()
        at_once, ahead = houses
        assert at_once.tokens == ahead.tokens and at_once.reuse == ahead.reuse
        alive -= set(ahead.last)
    assert all(ahead.tree.stats.placed[tier] for tier in Tier) and ahead.tree.stats.loads, ahead.tree.stats
    assert ahead.cache.tiers is not None and ahead.cache.tiers._prefetcher is not None
    assert ahead.cache.tiers.stats.prefetch.used_bytes > 0 and ahead.cache.tiers._prefetcher.num_bytes == 0
    for house in houses:
        house.cache.close()


def test_a_copy_that_fails_while_others_compute_is_computed_again(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = new_house(decoder, ratio=0.0, preload="layers")
    house.run(question("a", 1, 2))

    def fails(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr("stillroom.ops.cpu_kernels.rotate_into_single_threaded", fails)
    one = question("b", 2, 1)
    house.submit(one)
    house.step()
    monkeypatch.undo()
    house.finish()
    assert len(house.tokens[one.request_id]) == 6
    house.cache.manager.allow_anywhere(None)
    one = question("c", 1, 2)
    assert house.run(one)[0] == oracle.answer(one)
