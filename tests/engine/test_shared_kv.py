"""Two engines that share their KV through a tier: the same answers as one alone, from records of the other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NO_TENANT, Link, NodeKey, Tier
from stillroom.kvstore.shared.shared_tier import SharedTier
from stillroom.models.causal_model import CausalModel
from tests.engine.engine_fixture import EngineFixture, Oracle, question, without
from tests.kvstore.shared.redis_server import needs_server, redis_server


@contextmanager
def engine(
    decoder: CausalModel, tier: Path | str, folder: Path | None = None, **changes: Any
) -> Iterator[EngineFixture]:
    address = tier if isinstance(tier, str) else f"file://{tier}"
    options = {"load": "always", "kv_tier": address, "kv_tier_timeout_s": 1000.0, **changes}
    one = EngineFixture(decoder, folder, **options)
    try:
        yield one
    finally:
        one.cache.close()


def shared(one: EngineFixture) -> SharedTier:
    assert one.cache.tiers is not None and one.cache.tiers.shared is not None
    return one.cache.tiers.shared


def idle(one: EngineFixture) -> None:
    while one.engine.do_idle_work():
        pass
    assert shared(one).settle()


def fill(one: EngineFixture, *documents: int) -> None:
    """Let an engine answer twice about these documents, so that it shares their KV."""
    for name in ("first", "second"):
        one.run(question(name, *documents))
        idle(one)


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


def test_second_engine_loads_what_the_first_has_computed(decoder: CausalModel, tier: Path) -> None:
    oracle = Oracle(decoder)
    with engine(decoder, tier) as first:
        first.run(question("once", 1, 2))
        idle(first)
        assert shared(first).state.stats.num_written == 0, "nothing is shared at its first use"
        first.run(question("twice", 1, 2))
        idle(first)
        assert shared(first).state.stats.num_written == 3, "system prompt and two documents"
        first.run(question("again", 1, 2))
        idle(first)
        assert shared(first).state.stats.num_written == 3
    with engine(decoder, tier) as second:
        tokens, reuse = second.run(question("other", 1, 2))
        idle(second)
        assert tokens == oracle.answer(question("other", 1, 2))
        assert [one.source for one in reuse.segments] == [Tier.NETWORK] * 3 + [None]
        assert second.tree.stats.hits[Tier.NETWORK] == 3
        assert shared(second).state.stats.num_read == 3
        assert second.tree.num_nodes(Tier.NETWORK) == 0, "the tree believes nothing of the tier afterwards"
        assert {path.key for path in second.tree} == {path.key for path in first.tree}
        _, reuse = second.run(question("local", 1, 2))
        assert [one.source for one in reuse.segments] == [Tier.DEVICE] * 3 + [None]
        idle(second)
        assert shared(second).state.stats.num_written == 0, "what came from the tier does not go back"


def test_tier_continues_a_path_that_is_kept_in_part(decoder: CausalModel, tier: Path) -> None:
    with engine(decoder, tier) as first:
        fill(first, 1, 2)
    with engine(decoder, tier) as second:
        second.run(question("own", 1))
        tokens, reuse = second.run(question("both", 1, 2, 3))
        assert tokens == Oracle(decoder).answer(question("both", 1, 2, 3))
        assert [one.source for one in reuse.segments] == [Tier.DEVICE, Tier.DEVICE, Tier.NETWORK, None, None]


def test_engine_with_a_disk_shares_the_record_on_it_byte_by_byte(
    decoder: CausalModel, tier: Path, tmp_path: Path
) -> None:
    with engine(decoder, tier, tmp_path / "kv") as first:
        fill(first, 1, 2)
        own = {path.name: path.read_bytes() for path in (tmp_path / "kv").rglob("*.kv")}
        assert {path.name: path.read_bytes() for path in tier.rglob("*.kv")} == own and len(own) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "garbage", "zeros"])
def test_damaged_record_is_a_miss_and_is_replaced(decoder: CausalModel, tier: Path, damage: str) -> None:
    with engine(decoder, tier) as first:
        fill(first, 1, 2)
    for path in tier.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-7] ^= 1
        flipped, cut = bytes(content), bytes(content[:-40])
        replaced = {"flip": flipped, "cut": cut, "garbage": b"no record at all", "zeros": bytes(len(content))}
        path.write_bytes(replaced[damage])
    with engine(decoder, tier) as second:
        tokens, reuse = second.run(question("other", 1, 2))
        assert tokens == Oracle(decoder).answer(question("other", 1, 2))
        assert reuse.num_cached_tokens == 0
        assert sum(shared(second).state.defects.values()) > 0
        fill(second, 1, 2)
        assert shared(second).state.stats.num_written > 0
    with engine(decoder, tier) as third:
        assert third.run(question("third", 1, 2))[1].num_tokens_from(Tier.NETWORK) > 0


def test_removed_document_leaves_the_tier_and_only_its_own(decoder: CausalModel, tier: Path) -> None:
    """The engine that removes it is not the one that stored it."""
    with engine(decoder, tier) as first:
        fill(first, 1, 2)
        fill(first, 3)
    assert len(list(tier.rglob("*.kv"))) == 4
    with engine(decoder, tier) as second:
        second.engine.scheduler.forget_chunks(lambda ids: without(ChunkId(1), ids))
        second.engine.scheduler.kv.forget_shared(NO_TENANT, [ChunkId(1)])
        idle(second)
        assert shared(second).state.stats.num_forgotten == 2, "document 1, and document 2 behind it"
        assert shared(second).state.num_to_forget == 0
    assert len(list(tier.rglob("*.kv"))) == 2


@pytest.mark.parametrize(
    ("link", "is_used"), [(Link(0.0, 1e12), True), (Link(10.0, 1e12), False), (Link(0.0, 1e3), False)]
)
def test_tier_is_asked_only_where_loading_beats_computing(
    decoder: CausalModel, tier: Path, link: Link, is_used: bool
) -> None:
    with engine(decoder, tier) as first:
        fill(first, 1, 2)
    with engine(decoder, tier, load="measured") as second:
        second.step_seconds = 0.0
        shared(second)._calls.meter._link = link
        tokens, reuse = second.run(question("other", 1, 2))
        assert tokens == Oracle(decoder).answer(question("other", 1, 2))
        assert (reuse.num_tokens_from(Tier.NETWORK) > 0) == is_used
        assert (shared(second).state.stats.num_lookups > 0) == is_used
        if is_used:
            assert reuse.load_seconds > 0 or second.tree.profile.links[Tier.NETWORK] == link


def reads_wait(one: EngineFixture) -> threading.Event:
    """Let all reads of an engine's tier wait for the event that is returned."""
    gate, records = threading.Event(), shared(one)._records
    read = records.read

    def blocked(key: NodeKey, max_bytes: int) -> bytearray | None:
        assert gate.wait(20.0)
        return read(key, max_bytes)

    records.read = blocked  # type: ignore[method-assign]
    return gate


def test_hanging_tier_delays_no_other_request_and_its_own_a_bounded_time(decoder: CausalModel, tier: Path) -> None:
    with engine(decoder, tier) as first:
        fill(first, 1, 2)
    with engine(decoder, tier, kv_tier_timeout_s=2.0) as second:
        running, waiting = question("running", 5, max_tokens=8), question("waiting", 1, 2)
        second.submit(running)
        while not second.tokens[running.request_id]:
            second.step()
        gate = reads_wait(second)
        second.waits_for_tier = False
        begun = second.clock.monotonic()
        second.submit(waiting)
        while waiting.request_id not in second.last:
            second.step()
            if not second.tokens[waiting.request_id]:
                assert second.clock.monotonic() - begun <= 2.5, "it waits no longer than the timeout"
        assert running.request_id in second.last
        oracle = Oracle(decoder)
        assert second.tokens[running.request_id] == oracle.answer(running)
        assert second.tokens[waiting.request_id] == oracle.answer(waiting)
        assert second.reuse[waiting.request_id].num_cached_tokens in (0, 5), "at most the shared system prompt"
        gate.set()
        assert shared(second).settle()


def test_request_that_is_cancelled_while_it_waits_leaves_nothing(decoder: CausalModel, tier: Path) -> None:
    with engine(decoder, tier) as first:
        fill(first, 1, 2)
    with engine(decoder, tier) as second:
        for name in ("one", "two"):
            second.submit(question(name, 1, 2))
        assert shared(second).settle()
        gate = reads_wait(second)  # else a request may be admitted, and its nodes be loaded, in the same step
        second.engine.scheduler.schedule(second.clock.monotonic())  # reading begins
        assert second.tree.num_nodes(Tier.NETWORK) == 3
        second.engine.cancel(question("one").request_id)
        second.engine.check_integrity()
        gate.set()
        second.finish()
        assert second.tokens[question("two").request_id] == Oracle(decoder).answer(question("two", 1, 2))
        assert second.tree.num_nodes(Tier.NETWORK) == 0 and not shared(second)._fetcher.is_reading
        assert shared(second)._fetcher.num_bytes == 0


@needs_server
def test_engines_share_through_a_server_that_dies(decoder: CausalModel, tmp_path: Path) -> None:
    oracle = Oracle(decoder)
    with redis_server(tmp_path) as server:
        with engine(decoder, server.url, kv_tier_timeout_s=5.0, kv_tier_key="secret") as first:
            fill(first, 1, 2)
        with engine(decoder, server.url, kv_tier_timeout_s=5.0, kv_tier_key="secret") as second:
            tokens, reuse = second.run(question("other", 1, 2))
            assert tokens == oracle.answer(question("other", 1, 2))
            assert reuse.num_tokens_from(Tier.NETWORK) == 5 + 8 + 13
            second.tree.clear()
            second.submit(question("dies", 1, 2))
            assert shared(second).settle()
            server.kill()
            second.finish()
            assert second.tokens[question("dies").request_id] == oracle.answer(question("dies", 1, 2))
            for number in range(4):
                assert second.run(question(f"without {number}", 10 + number))[0]
            assert not shared(second).is_usable
