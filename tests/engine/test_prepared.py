"""Documents prepared before a question: its answer is that of KV computed in the documents' own context."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.request import SamplingParams
from stillroom.core.reuse import Reason
from stillroom.engine.async_engine import AsyncEngine
from stillroom.errors import EngineClosedError, EngineError, PromptTooLongError
from stillroom.models.decoder import Decoder
from stillroom.telemetry import catalogue
from tests.engine.engine_fixture import Oracle, question
from tests.engine.prepared_engine import DOCUMENTS, DocumentOracle, Documents, PreparedFixture, preparing


@pytest.mark.parametrize("chunks", [(3, 1, 2), (4, 7), (7, 2, 5, 3), (2,), (4, 3, 2, 1), (5, 6)])
def test_answers_are_those_of_kv_in_its_documents_context(
    decoder: Decoder, folder: Path, chunks: tuple[int, ...]
) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    assert fixture.prepare(1, 2, 3, 4) and fixture.prepare(6, 5, 7)
    one = question("r", *chunks)
    tokens, reuse = fixture.run(one)
    assert tokens == DocumentOracle(folder, fixture.corpus).answer(one)
    assert {segment.reason for segment in reuse.segments if segment.chunk_id} == {Reason.PREPARED}
    assert reuse.num_recomputed_tokens == 0 and reuse.has_placed


def test_document_in_its_own_order_answers_as_a_full_prefill(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, 3, 4)
    one = question("r", 1, 2, 3, 4)
    assert fixture.run(one)[0] == Oracle(decoder).answer(one)


def test_chunks_without_prepared_kv_are_computed_beside_prepared_ones(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, new=[1, 2])
    assert fixture.reasons(question("r", 3, 2, 7, 1)) == [
        Reason.NEVER_SEEN,
        Reason.PREPARED,
        Reason.NEVER_SEEN,
        Reason.PREPARED,
    ]
    kept = {node.chunk_id for node in fixture.tree if not node.document_path}
    assert kept == {None, 3, 7}, "3 began the prompt, 7 stands behind a prepared chunk"


def test_prompt_that_returns_computes_its_question_only_and_answers_the_same(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, new=[1, 2])
    tokens, _ = fixture.run(question("r", 2, 7, 3, 1))
    computed = fixture.num_computed
    again, reuse = fixture.run(question("s", 2, 7, 3, 1))
    assert again == tokens and fixture.num_computed - computed == 3 + len(tokens) - 1
    chunks = [Reason.PREPARED, Reason.ANYWHERE, Reason.ANYWHERE, Reason.PREPARED]
    assert [segment.reason for segment in reuse.segments[1:5]] == chunks
    assert [one.variant.behind for one in reuse.segments[2:4] if one.variant is not None] == [(2,), (2, 7)]


def test_exact_prefix_is_used_before_prepared_kv(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.run(question("first", 2, 7))
    fixture.prepare(1, 2, 3)
    tokens, reuse = fixture.run(question("r", 2, 7))
    assert [one.reason for one in reuse.segments[1:3]] == [Reason.HIT, Reason.HIT]
    assert tokens == Oracle(decoder).answer(question("r", 2, 7))


def test_question_interrupts_preparing_which_goes_on_later(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.offer(1, 2, 3, 4)
    fixture.clock.advance(60.0)
    while fixture.tree.stats.prepared == 0:
        fixture.engine.do_idle_work()
        fixture.step()
    computed = fixture.num_computed
    assert fixture.engine.scheduler.num_running == 0, "preparing is not counted as load"
    one = question("r", 7)
    assert fixture.run(one)[0] == Oracle(decoder).answer(one)
    assert not fixture.ended
    assert not fixture.engine.do_idle_work() or not fixture.engine.has_work, "the engine was busy just now"
    fixture.idle()
    assert fixture.ended == [(None, True)] and fixture.num_computed > computed
    assert not fixture.prepare(1, 2, 3, 4), "all of it is kept"
    assert fixture.reasons(question("s", 4, 3)) == [Reason.PREPARED] * 2


def test_prepared_kv_survives_the_process(decoder: Decoder, tmp_path: Path) -> None:
    first = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    first.prepare(1, 2, 3, 4)
    first.idle()
    first.cache.close()
    second = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    assert not second.prepare(1, 2, 3, 4) and second.num_computed == 0
    tokens, reuse = second.run(question("r", 4, 2))
    assert [(one.reason, one.source) for one in reuse.segments[1:3]] == [(Reason.PREPARED, Tier.DISK)] * 2
    assert tokens == first.run(question("r", 4, 2))[0]


def test_prepared_kv_that_was_used_stays_used_after_a_restart(decoder: Decoder, tmp_path: Path) -> None:
    first = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    first.prepare(1, 2, 3, 4)
    first.idle()
    first.run(question("r", 4, 2))
    readings = first.cache.readings()
    assert readings[catalogue.KV_IN_DOCUMENT] == {"device": 4, "host": 0, "disk": 4}
    unused = {node.key: node.disk_bytes for node in first.tree if not node.is_used}
    assert first.tree.num_unused_bytes(Tier.DISK) == sum(unused.values()) > 0
    assert first.cache.tiers is not None and first.cache.tiers.disk is not None
    first.cache.tiers.disk.close()  # as a kill does: nothing else is written

    second = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    assert {node.key for node in second.tree if not node.is_used} == set(unused)
    assert {node.chunk_id for node in second.tree if node.document_path and node.is_used} == {2, 4}
    assert second.tree.num_unused_bytes(Tier.DISK) == sum(unused.values())


def test_damaged_prepared_record_is_computed_and_named(decoder: Decoder, tmp_path: Path) -> None:
    first = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    first.prepare(1, 2, 3, 4)
    first.idle()
    (damaged,) = [node.key for node in first.tree if node.chunk_id == 3]
    first.cache.close()
    (path,) = tmp_path.rglob(f"{damaged.hex()}.kv")
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)

    second = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    assert second.reasons(question("a", 4, 3, 2)) == [Reason.PREPARED, Reason.RECORD_FAILED, Reason.PREPARED]
    assert second.reasons(question("b", 3, 7)) == [Reason.RECORD_FAILED, Reason.NEVER_SEEN], "it is computed here too"
    second.prepare(1, 2, 3, 4)
    assert second.reasons(question("c", 2, 3)) == [Reason.PREPARED] * 2
    second.tree.clear()
    assert second.reasons(question("d", 2, 3)) == [Reason.NEVER_SEEN] * 2, "evicted since"


def test_changed_document_loses_its_prepared_kv(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, 3, 4)
    fixture.corpus.insert(0, 2, 8)
    assert fixture.reasons(question("a", 2, 3, 4)) == [Reason.PREPARED, Reason.ORDER_DIFFERS, Reason.ORDER_DIFFERS]
    fixture.corpus.remove(0, 1)
    fixture.engine.catch_up()
    assert fixture.reasons(question("b", 5, 2)) == [Reason.NEVER_SEEN] * 2
    assert all(1 not in node.seen for node in fixture.tree)


def test_other_modes_prepare_the_beginnings_of_prompts(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS), mode="exact")
    assert fixture.prepare(2) and fixture.prepare(7) and not fixture.prepare(2)
    one = question("r", 2, 3)
    tokens, reuse = fixture.run(one)
    assert tokens == Oracle(decoder).answer(one) and not reuse.has_placed
    assert [segment.reason for segment in reuse.segments[:3]] == [Reason.HIT, Reason.HIT, Reason.NEVER_SEEN]


def test_window_that_does_not_fit_ends_with_an_error(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS), blocks=4)
    fixture.offer(1, 2, 3, 4)
    fixture.idle()
    ((error, _),) = fixture.ended
    assert isinstance(error, PromptTooLongError)
    assert fixture.run(question("r", 1, max_tokens=2))[0]


def test_end_of_the_engine_ends_waiting_windows(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    errors: list[Exception | None] = []
    ended = threading.Event()

    def on_end(error: Exception | None, *, is_computed: bool) -> None:
        errors.append(error)
        ended.set()

    running = AsyncEngine(fixture.engine)
    running.prepare(preparing("p", 1, 2), on_end)  # the clock stands still, so that it waits
    running.close()
    assert ended.wait(10) and isinstance(errors[0], EngineClosedError)
    with pytest.raises(EngineClosedError):
        running.prepare(preparing("q", 1), on_end)


def test_cancelled_window_ends_and_its_complete_chunks_stay(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.offer(1, 2, 3, 4)
    fixture.clock.advance(60.0)
    while fixture.tree.stats.prepared < 2:
        fixture.engine.do_idle_work()
        fixture.step()
    fixture.engine.cancel_preparing(RequestId("prepare-0-(1, 2, 3, 4)"))
    ((error, _),) = fixture.ended
    assert isinstance(error, EngineError) and not fixture.engine.has_work
    assert fixture.reasons(question("r", 2, 1)) == [Reason.PREPARED] * 2
    assert fixture.engine.scheduler.kv.pool.num_used == sum(len(node.block_ids or ()) for node in fixture.tree)


def test_sampled_answers_use_prepared_kv_too(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, 3, 4)
    group = [
        replace(question(f"s{n}", 3, 2), sampling=SamplingParams(max_tokens=4, temperature=1.0, seed=n)) for n in (1, 2)
    ]
    fixture.submit(*group)
    fixture.finish()
    reused = [[one.reason for one in fixture.reuse[request.request_id].segments[1:3]] for request in group]
    assert reused == [[Reason.PREPARED] * 2] * 2


def test_command_stops_a_preparing_step_between_two_layers(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(len(asked))
        return len(asked) == 2

    fixture.engine.should_stop = should_stop
    fixture.offer(1, 2, 3, 4)
    fixture.idle()
    assert fixture.ended == [(None, True)] and len(asked) > 2, "the step that was stopped ran again"
    one = question("r", 4, 2)
    assert fixture.run(one)[0] == PreparedFixture(decoder, Documents(*DOCUMENTS)).answer_prepared(one)


def test_questions_are_never_stopped(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.engine.should_stop = lambda: True
    assert fixture.run(question("r", 1, 2))[0] == Oracle(decoder).answer(question("r", 1, 2))


def test_question_that_is_searched_for_interrupts_preparing(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.offer(1, 2, 3, 4)
    fixture.clock.advance(60.0)
    fixture.engine.do_idle_work()
    assert fixture.engine.scheduler.request_ids == ["prepare-0-(1, 2, 3, 4)"]
    fixture.engine.expect_question()
    assert fixture.engine.scheduler.request_ids == [] and not fixture.ended
    fixture.engine.do_idle_work()
    assert fixture.engine.scheduler.request_ids == [], "the engine was needed just now"
    fixture.idle()
    assert fixture.ended == [(None, True)]
