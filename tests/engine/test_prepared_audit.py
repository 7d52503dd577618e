"""Audits of answers from prepared KV: both references, falling back, coming back, and what is forgotten."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stillroom.backends.prompt_builder import in_document_order
from stillroom.core.batch import Batch, StepResult
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import Request
from stillroom.core.reuse import Reason
from stillroom.engine.audit import AuditStats
from stillroom.engine.events import TokenEvent
from stillroom.models.decoder import Decoder
from stillroom.telemetry import catalogue
from tests.engine.engine_fixture import Oracle, question
from tests.engine.prepared_engine import Documents, PreparedFixture

DOCUMENTS = ((1, 2, 3, 4), (6, 5, 7))


def document_prompt(prompt: SegmentedPrompt, chunks: Sequence[Chunk]) -> SegmentedPrompt:
    """Return the prompt of these chunks in document order, with the question of another prompt."""
    before = question("documents", *(chunk.chunk_id for chunk in in_document_order(chunks))).prompt.segments[:-1]
    return SegmentedPrompt((*before, prompt.segments[-1]))


class AuditedFixture(PreparedFixture):
    """An engine that audits every answer from prepared KV."""

    def __init__(self, decoder: Decoder, *documents: Sequence[int], **changes: Any) -> None:
        options: dict[str, Any] = {"audit_share": 1.0, "document_prompt": document_prompt} | changes
        super().__init__(decoder, Documents(*(documents or DOCUMENTS)), **options)
        self.runs: list[tuple[SegmentedPrompt, list[int]]] = []
        """Prompt and tokens of each run of an audit."""
        self._add = self.engine.scheduler.add
        self.engine.scheduler.add = self._watched  # type: ignore[method-assign]
        assert self.engine.auditing.audit is not None
        self.audit = self.engine.auditing.audit
        self._observe = self.audit.observe
        self.audit.observe = self._watching  # type: ignore[method-assign]

    @property
    def stats(self) -> AuditStats:
        return self.audit.stats

    def is_suspended(self) -> bool:
        return self.stats.is_suspended

    def _watched(self, request: Request, *samples: Request, now: float = 0.0) -> None:
        self._add(request, *samples, now=now)
        if request.is_background:
            self.runs.append((request.prompt, []))

    def _watching(self, event: TokenEvent) -> bool:
        is_own = self._observe(event)
        if is_own and event.token_id is not None:
            self.runs[-1][1].append(event.token_id)
        return is_own

    def prepare_all(self) -> None:
        for document in self.corpus.documents:
            self.prepare(*document)

    def begin_audit(self) -> None:
        """Do idle work until an audit computes."""
        while not self.engine.has_work:
            assert self.engine.do_idle_work()

    def damage(self, *path: int) -> None:
        """Change a prepared copy on the device, as if it had been computed wrongly."""
        (node,) = (one for one in self.tree if one.document_path == tuple(map(ChunkId, path)))
        assert node.block_ids
        for block_id in node.block_ids:
            slots = slice(block_id * 8, (block_id + 1) * 8)
            self.cache.device.v_LSGD[:, slots] = torch.flip(self.cache.device.v_LSGD[:, slots], (-1,)) * -2.0

    def ask_about(self, number: int, *, is_damaged: bool = False) -> list[Reason]:
        """Prepare a document of one chunk, ask about it, and audit the answer. Right KV gives exact answers."""
        self.corpus.documents.append([number])
        self.prepare(number)
        if is_damaged:
            self.damage(number)
        reasons = self.reasons(question(f"r{number}", number, max_tokens=1))
        self.idle()
        return reasons


def test_audits_change_no_later_answer_and_take_no_room(decoder: Decoder) -> None:
    fixture = AuditedFixture(decoder)
    fixture.prepare_all()
    answer, reuse = fixture.run(question("r", 7, 2, 5, max_tokens=8))
    kept = {node.key for node in fixture.tree}
    fixture.idle()
    assert fixture.stats.num_audited == 1 and {node.key for node in fixture.tree} == kept
    again, reuse_again = fixture.run(question("s", 7, 2, 5, max_tokens=8))
    assert again == answer
    assert [one.reason for one in reuse_again.segments] == [one.reason for one in reuse.segments]


@pytest.mark.parametrize(
    ("chunks", "documents"),
    [((7, 2, 5, 3), (6, 5, 7, 1, 2, 3)), ((2,), (1, 2)), ((4, 6), (1, 2, 3, 4, 6)), ((3, 1, 2), (1, 2, 3))],
)
def test_answer_is_compared_with_full_prefills_of_its_prompt_and_of_what_its_copies_have_read(
    decoder: Decoder, chunks: tuple[int, ...], documents: tuple[int, ...]
) -> None:
    fixture = AuditedFixture(decoder)
    fixture.prepare_all()
    one = question("r", *chunks, max_tokens=8)
    answer, _ = fixture.run(one)
    fixture.idle()
    oracle = Oracle(decoder)
    other = question("documents", *documents, max_tokens=8)
    references = [(each.prompt, oracle.answer(each)) for each in (one, other)]
    assert fixture.runs == references
    as_prompt, as_documents = (answer == tokens for _, tokens in references)
    stats = fixture.stats
    assert (stats.num_as_prompt, stats.num_as_documents) == (as_prompt, as_documents)
    assert (stats.num_audited, stats.num_disagreed) == (1, not (as_prompt or as_documents))
    assert set(fixture.last) == {"r"}, "no event of an audit is delivered"
    readings = fixture.cache.readings()
    assert readings[catalogue.AUDIT_REFERENCES] == {"prompt": as_prompt, "documents": as_documents}


def test_chunks_that_were_computed_in_the_prompt_are_read_in_their_documents_too(decoder: Decoder) -> None:
    fixture = AuditedFixture(decoder)
    fixture.prepare(1, 2)
    fixture.run(question("r", 7, 2, 4))
    fixture.idle()
    assert fixture.runs[1][0].chunk_ids == (7, 1, 2, 4)


def test_audits_run_in_short_steps_that_stop_for_a_command(decoder: Decoder) -> None:
    fixture = AuditedFixture(decoder)
    fixture.prepare_all()
    fixture.run(question("r", 7, 2, 5, 3))
    execute, sizes = fixture.engine.runner.execute, list[int]()

    def watching(batch: Batch) -> StepResult:
        assert batch.should_stop is not None
        sizes.append(sum(entry.num_scheduled_tokens for entry in batch.sequences))
        return execute(batch)

    fixture.engine.runner.execute = watching  # type: ignore[method-assign]
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked % 7 == 0

    fixture.engine.should_stop = should_stop
    fixture.idle()
    assert fixture.stats.num_audited == 1 and asked > 7
    assert max(sizes) <= fixture.engine.scheduler.limits.preparing_tokens
    oracle = Oracle(decoder)
    assert fixture.runs[1][1] == oracle.answer(question("documents", 6, 5, 7, 1, 2, 3))


def test_documents_that_do_not_fit_into_the_pool_are_left_out(decoder: Decoder) -> None:
    fixture = AuditedFixture(decoder, blocks=12)
    fixture.prepare_all()
    fixture.run(question("r", 4, 7))
    fixture.idle()
    assert [prompt.chunk_ids for prompt, _ in fixture.runs] == [(4, 7)]
    assert (fixture.stats.num_audited, fixture.stats.num_without_documents) == (1, 1)
    assert fixture.stats.num_disagreed == 1 - fixture.stats.num_as_prompt


def test_documents_that_cannot_be_read_are_left_out(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = AuditedFixture(decoder)
    fixture.prepare_all()
    fixture.run(question("r", 4, 7))

    def broken(chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(fixture.corpus, "chunks", broken)
    fixture.idle()
    assert (fixture.stats.num_audited, fixture.stats.num_without_documents) == (1, 1)


@pytest.mark.parametrize("is_running", [False, True])
def test_audit_is_dropped_when_a_chunk_that_a_copy_has_read_is_removed(decoder: Decoder, is_running: bool) -> None:
    fixture = AuditedFixture(decoder)
    fixture.prepare_all()
    fixture.run(question("r", 3))
    if is_running:
        fixture.begin_audit()
    fixture.corpus.remove(0, 1)
    fixture.engine.catch_up()
    assert not fixture.engine.has_work
    fixture.idle()
    assert fixture.stats.num_audited == 0 and len(fixture.runs) == is_running


def test_question_interrupts_an_audit_which_goes_on_later_and_then_preparing(decoder: Decoder) -> None:
    fixture = AuditedFixture(decoder)
    fixture.prepare(1, 2, 3, 4)
    fixture.run(question("r", 4, 2))
    fixture.offer(6, 5, 7)
    fixture.begin_audit()
    fixture.finish()
    fixture.begin_audit()
    assert fixture.runs[1][0].chunk_ids == (1, 2, 3, 4) and len(fixture.ended) == 1
    fixture.submit(question("s", 8))
    assert fixture.engine.scheduler.request_ids == ["s"]
    fixture.finish()
    fixture.idle()
    assert fixture.stats.num_audited == 1 and fixture.ended[1:] == [(None, True)]


def test_wrong_kv_suspends_placing_until_it_is_right_again(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    fixture = AuditedFixture(decoder, blocks=120, host_tokens=4000, disk_records=0)
    number = 10
    while not fixture.is_suspended():
        assert fixture.ask_about(number, is_damaged=True) == [Reason.PREPARED]
        number += 1
    assert fixture.stats.num_disagreed == fixture.stats.num_audited <= 6
    assert "KV is reused for exact prefixes only" in caplog.text and "reuse.mode" in caplog.text
    assert fixture.cache.readings()[catalogue.PLACING_SUSPENDED] == 1.0

    one, oracle = question("suspended", number, max_tokens=2), Oracle(decoder)
    fixture.corpus.documents.append([number])
    assert fixture.prepare(number), "preparing goes on"
    fixture.damage(number)
    tokens, reuse = fixture.run(one)
    assert tokens == oracle.answer(one) and reuse.segments[1].reason is Reason.SUSPENDED
    fixture.idle()
    assert fixture.is_suspended() and fixture.stats.upper_bound == 1.0

    num_bad, last = fixture.stats.num_audited, number
    while fixture.is_suspended():
        number += 1
        assert fixture.ask_about(number) == [Reason.SUSPENDED]
        assert fixture.stats.num_audited - num_bad == number - last <= 150, "each of them is audited"
    assert "used again" in caplog.text and fixture.cache.readings()[catalogue.PLACING_SUSPENDED] == 0.0
    assert fixture.ask_about(number + 1) == [Reason.PREPARED]


def test_placing_stays_suspended_if_the_audit_fails(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = AuditedFixture(decoder, blocks=200, host_tokens=800, disk_records=0)
    number = 10
    while not fixture.is_suspended():
        fixture.ask_about(number, is_damaged=True)
        number += 1

    def broken(*_: object) -> None:
        raise ImportError("no module named scipy")

    monkeypatch.setattr(fixture.audit, "next", broken)
    fixture.idle()
    assert fixture.engine.auditing.audit is None
    assert fixture.ask_about(number, is_damaged=True) == [Reason.SUSPENDED]


def test_answers_from_prepared_kv_are_not_audited_without_their_documents(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS), audit_share=1.0)
    assert fixture.engine.auditing.audit is None
