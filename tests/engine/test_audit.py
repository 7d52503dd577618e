"""Audits: which answers are compared, what counts as agreement, and how the ratio changes."""

import math
import random
import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest

from stillroom.core.batch import Batch, StepResult
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import FinishReason, Request, SamplingParams
from stillroom.core.reuse import PromptReuse, Reason, SegmentReuse
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.audit import Audit
from stillroom.engine.audit_comparison import NUM_TOKENS
from stillroom.engine.events import TokenEvent
from stillroom.engine.reuse_level import ReuseLevel
from stillroom.errors import NonFiniteError
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.models.decoder import Decoder
from tests.engine.engine_fixture import EngineFixture, question
from tests.engine.test_corpora import FakeCorpus

PLACED = PromptReuse((SegmentReuse(SegmentKind.CHUNK, ChunkId(1), 9, Tier.HOST, Reason.ANYWHERE, 2),), 0.0, 0.0)
COMPUTED = PromptReuse((SegmentReuse(SegmentKind.CHUNK, ChunkId(1), 9, None, Reason.NEVER_SEEN),), 0.0, 0.0)
EXACT = PromptReuse((SegmentReuse(SegmentKind.CHUNK, ChunkId(1), 9, Tier.HOST, Reason.HIT),), 0.0, 0.0)


def no_chunks(salt: str, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
    return {}


class AuditFixture:
    """An audit, and the options that it allowed."""

    def __init__(self, ratio: float = 0.15, share: float = 1.0, limit: float = 0.2) -> None:
        self.allowed: list[float] = []
        options = AnywhereOptions(ratio, "question")
        level = ReuseLevel(options, lambda options: self.allowed.append(options.recompute_ratio), limit)
        self.audit = Audit(level, share=share, randomness=random.Random(1))
        self._number = 0

    def is_suspended(self) -> bool:
        return self.audit.is_suspended

    def answer(
        self, *tokens: int, reuse: PromptReuse = PLACED, reason: FinishReason = FinishReason.STOP
    ) -> Request | None:
        """Finish an answer; returns its audit."""
        self._number += 1
        request = Request(
            request_id=RequestId(f"r{self._number}"),
            prompt=SegmentedPrompt((Segment(SegmentKind.QUESTION, (1, 2)),)),
            sampling=SamplingParams(max_tokens=50),
        )
        self.audit.on_submit(request)
        for place, token in enumerate(tokens):
            event = TokenEvent(request.request_id, token, None, 0.0, reuse=None if place else reuse)
            assert not self.audit.observe(event)
        assert not self.audit.observe(TokenEvent(request.request_id, None, reason, 0.0))
        return self.audit.next(no_chunks)

    def check(self, shadow: Request | None, *tokens: int, reuse: PromptReuse = EXACT) -> None:
        assert shadow is not None
        for token in tokens:
            assert self.audit.observe(TokenEvent(shadow.request_id, token, None, 0.0, reuse=reuse))
        assert self.audit.observe(TokenEvent(shadow.request_id, None, FinishReason.LENGTH, 0.0))


def test_audit_that_computes_nan_is_not_counted() -> None:
    fixture = AuditFixture()
    shadow = fixture.answer(5, 6, 7)
    assert shadow is not None
    assert fixture.audit.observe(TokenEvent(shadow.request_id, None, FinishReason.ABORTED, 0.0, NonFiniteError()))
    assert fixture.audit.stats.num_audited == 0 and fixture.audit.next(no_chunks) is None


def test_audited_prompt_runs_again_without_placing() -> None:
    fixture = AuditFixture()
    shadow = fixture.answer(5, 6, 7)
    assert shadow is not None and not shadow.may_place and shadow.request_id == "audit-r1"
    assert shadow.sampling.max_tokens == NUM_TOKENS, "the answer ended after three, so the fourth must not come"
    fixture.check(shadow, 5, 6, 7)
    assert (fixture.audit.stats.num_audited, fixture.audit.stats.num_disagreed) == (1, 0)
    fixture.check(fixture.answer(5, 6, 7), 5, 6, 7, 8)
    assert fixture.audit.stats.num_disagreed == 1


def test_audit_compares_the_first_tokens_of_a_long_answer() -> None:
    fixture = AuditFixture()
    shadow = fixture.answer(*range(30))
    assert shadow is not None and shadow.sampling.max_tokens == NUM_TOKENS
    fixture.check(shadow, *range(NUM_TOKENS))
    assert fixture.audit.stats.num_disagreed == 0


def test_audit_compares_the_tokens_of_an_aborted_answer() -> None:
    fixture = AuditFixture()
    shadow = fixture.answer(1, 2, reason=FinishReason.ABORTED)
    assert shadow is not None and shadow.sampling.max_tokens == 2


def test_exact_answers_are_not_audited() -> None:
    assert AuditFixture().answer(1, 2, reuse=EXACT) is None


def test_configured_share_of_answers_is_audited() -> None:
    fixture = AuditFixture(share=0.1)
    count = 0
    for _ in range(500):
        shadow = fixture.answer(1)
        if shadow is not None:
            fixture.check(shadow, 1)
            count += 1
    assert 30 <= count <= 70
    assert fixture.allowed == []


def test_ratio_doubles_until_nothing_is_placed() -> None:
    fixture = AuditFixture(ratio=0.2, limit=0.2)
    for _ in range(12):
        fixture.check(fixture.answer(1), 2)
        if fixture.audit.is_suspended:
            break
    assert fixture.allowed == [0.4] and fixture.audit.is_suspended
    assert fixture.audit.stats.upper_bound == 1.0


def test_placing_resumes_at_the_largest_ratio() -> None:
    fixture = AuditFixture(ratio=0.4, limit=0.2)
    while not fixture.is_suspended():
        fixture.check(fixture.answer(1), 2)
    num_bad = fixture.audit.stats.num_audited
    assert fixture.answer(1, reuse=EXACT) is None, "it would place nothing"
    shadow = fixture.answer(1, reuse=COMPUTED)
    assert shadow is not None and shadow.may_place and shadow.most_exact == 0
    fixture.check(shadow, 1)
    assert fixture.audit.stats.num_audited == num_bad, "the audit placed nothing either"
    while fixture.is_suspended():
        fixture.check(fixture.answer(1, reuse=COMPUTED), 1, reuse=PLACED)
    assert fixture.audit.stats.num_audited - num_bad == 100 and fixture.allowed == []


def test_answers_of_the_old_ratio_are_no_evidence_for_the_new_one() -> None:
    fixture = AuditFixture(ratio=0.2, limit=0.2)
    shadow = fixture.answer(1)
    for _ in range(8):
        assert fixture.answer(1) is None, "one audit at a time; others wait"
    answering = Request(
        request_id=RequestId("answering"),
        prompt=SegmentedPrompt((Segment(SegmentKind.QUESTION, (1, 2)),)),
        sampling=SamplingParams(max_tokens=50),
    )
    fixture.audit.on_submit(answering)
    fixture.audit.observe(TokenEvent(answering.request_id, 1, None, 0.0, reuse=PLACED))
    while not fixture.allowed:
        fixture.check(shadow, 2)
        shadow = fixture.audit.next(no_chunks)
    fixture.audit.observe(TokenEvent(answering.request_id, None, FinishReason.STOP, 0.0))
    assert shadow is None and fixture.audit.next(no_chunks) is None
    fixture.check(fixture.answer(1), 2)
    assert fixture.allowed == [0.4] and fixture.audit.stats.upper_bound == 1.0, "the evidence of one answer"


def test_next_safer_setting_doubles_until_a_full_prefill_is_as_fast() -> None:
    ratio, alpha = AnywhereOptions(0.2, "question"), AnywhereOptions(0.2, "question", alpha=1.5)
    safer = ratio.next_safer()
    assert safer is not None and safer.recompute_ratio == 0.4 and safer.next_safer() is None
    none = AnywhereOptions(0.0, "question").next_safer()
    assert none is not None and none.recompute_ratio == 0.15
    safer = alpha.next_safer()
    assert safer is not None and safer.alpha == 3.0 and safer.next_safer() is None
    assert (str(ratio), str(alpha)) == ("recompute ratio 0.2", "alpha 1.5")


def test_chance_alone_does_not_change_the_ratio() -> None:
    """One answer in ten differs and one in four may, so a significant excess is rare."""
    fixture, randomness = AuditFixture(limit=0.25), random.Random(4)
    for _ in range(300):
        fixture.check(fixture.answer(1), 1 if randomness.random() > 0.1 else 2)
    assert fixture.allowed == []
    assert 0.1 < fixture.audit.stats.upper_bound < 0.2


def test_ratio_is_lowered_again_when_audits_agree() -> None:
    fixture = AuditFixture(ratio=0.15, limit=0.25)
    while fixture.allowed != [0.3]:
        fixture.check(fixture.answer(1), 2)
    num_bad = fixture.audit.stats.num_audited
    while fixture.allowed == [0.3]:
        fixture.check(fixture.answer(1), 1)
    assert fixture.allowed == [0.3, 0.15]
    assert fixture.audit.stats.num_audited - num_bad == 100, "the patience after one rise"
    assert fixture.audit.stats.options == AnywhereOptions(0.15, "question")
    for _ in range(1000):
        fixture.check(fixture.answer(1), 1)
    assert fixture.allowed == [0.3, 0.15], "never below the configured ratio"


def test_ratio_stays_raised_while_nearly_too_many_answers_differ() -> None:
    fixture, randomness = AuditFixture(ratio=0.15, limit=0.25), random.Random(6)
    while not fixture.allowed:
        fixture.check(fixture.answer(1), 2)
    for _ in range(1000):
        fixture.check(fixture.answer(1), 1 if randomness.random() > 0.2 else 2)
    assert fixture.allowed == [0.3]


def test_ratio_that_keeps_failing_is_tried_less_and_less_often() -> None:
    """Half of the answers differ at 0.15 and none at 0.3, without end."""
    fixture, randomness = AuditFixture(ratio=0.15, limit=0.25), random.Random(7)
    returns = []
    for number in range(5_000):
        is_bad = not fixture.allowed or fixture.allowed[-1] == 0.15
        num_changes = len(fixture.allowed)
        fixture.check(fixture.answer(1), 2 if is_bad and randomness.random() < 0.5 else 1)
        if len(fixture.allowed) > num_changes and fixture.allowed[-1] == 0.15:
            returns.append(number)
    assert set(fixture.allowed) == {0.15, 0.3}
    assert 4 <= len(returns) <= math.log2(5_000 / 50)
    gaps = [later - earlier for earlier, later in pairwise(returns)]
    assert all(later > 1.7 * earlier for earlier, later in pairwise(gaps)), gaps


def test_failed_audit_is_not_repeated(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = EngineFixture(
        decoder, None, blocks=80, mode="anywhere", load="always", recompute_ratio=0.0, audit_share=1.0, disk_records=0
    )
    fixture.run(question("a", 1, 2))
    fixture.run(question("b", 2, 1))
    engine = fixture.engine
    assert engine.do_idle_work() and engine.has_work
    execute = engine.runner.execute

    def broken(batch: Batch) -> StepResult:
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine.runner, "execute", broken)
    with AsyncEngine(engine) as running:
        while running.num_running or running.num_waiting:
            pass  # the failed step abandons the audit
        monkeypatch.setattr(engine.runner, "execute", execute)
        ended = threading.Event()
        running.submit(question("c", 1), lambda event: ended.set() if event.finish_reason else None)
        assert ended.wait(30)
    audit = engine.auditing.audit
    assert audit is not None and audit.stats.num_audited == 0


@pytest.mark.parametrize("is_running", [False, True])
def test_answer_from_a_removed_document_is_not_audited(decoder: Decoder, is_running: bool) -> None:
    fixture = EngineFixture(
        decoder, None, blocks=80, mode="anywhere", load="always", recompute_ratio=0.0, audit_share=1.0, disk_records=0
    )
    engine, corpus = fixture.engine, FakeCorpus(1, 2)
    engine.follow("", corpus)
    fixture.run(question("a", 1, 2))
    fixture.run(question("b", 2, 1))
    if is_running:
        assert engine.do_idle_work() and engine.has_work
    corpus.remove(1)
    engine.catch_up()
    assert not engine.has_work and not engine.do_idle_work()
    engine.check_integrity()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_idle_engine_audits_without_events(decoder: Decoder, ratio: float) -> None:
    fixture = EngineFixture(
        decoder,
        None,
        blocks=80,
        mode="anywhere",
        load="always",
        recompute_ratio=ratio,
        audit_share=1.0,
        max_disagreement=1.0,
    )
    fixture.run(question("a", 1, 2, 3))
    fixture.run(question("b", 3, 1, 2, max_tokens=8))
    is_waiting = False
    while not is_waiting and fixture.engine.do_idle_work():
        is_waiting = fixture.engine.has_work
    assert is_waiting, "an audit waits"
    fixture.run(question("c", 1))  # not while a request runs
    audit = fixture.engine.auditing.audit
    assert audit is not None and audit.stats.num_audited == 0
    while fixture.engine.has_work or fixture.engine.do_idle_work():
        fixture.step()
    assert audit.stats.num_audited == 1 and set(fixture.last) == {"a", "b", "c"}
    if ratio == 1.0:
        assert audit.stats.num_disagreed == 0, "with everything recomputed every answer agrees"
