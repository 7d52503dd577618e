"""Tests which engine of a front gets a request, and that its books agree whatever engines do."""

import contextlib
import re
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stillroom.cluster.front_engine import Sent
from stillroom.cluster.front_engines import Expected, FrontEngines, engine_name
from stillroom.cluster.prediction import EngineCosts
from stillroom.cluster.wire_state import EngineInfo, EngineState
from stillroom.core.ids import ChunkId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.reuse import PromptReuse, Reason, SegmentReuse
from stillroom.errors import EngineUnavailableError
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvcache.tree.pieces import PrefixKeys
from tests.examples import most_examples

A, B = "http://a:9100", "http://b:9100"
EXPECTED = Expected("microworld", b"words", "kb-1")
INFO = EngineInfo(
    run="first",
    version="1",
    model="microworld",
    fingerprint=b"f" * 32,
    vocabulary=b"words",
    knowledge_base="kb-1",
    vocab_size=100,
    max_positions=1000,
    num_blocks=100,
    block_size=16,
    stop_token_ids=frozenset({1}),
    max_num_seqs=8,
    tail_tokens=64,
    places_computed=True,
    costs=EngineCosts(profile=linear_profile(1.0, 0.01, 0.0), bytes_per_token=4),
)


def prompt(chunk: int = 1, num_tokens: int = 100) -> SegmentedPrompt:
    return SegmentedPrompt(
        (
            Segment(SegmentKind.SYSTEM, (1, 2, 3)),
            Segment(SegmentKind.CHUNK, tuple(range(num_tokens)), ChunkId(chunk)),
            Segment(SegmentKind.QUESTION, (chunk, 5)),
        )
    )


def held(one: SegmentedPrompt) -> dict[bytes, Tier | None]:
    """Return the names of the KV of a prompt."""
    pieces = PrefixKeys(INFO.fingerprint, INFO.tail_tokens).pieces(one)
    return {name: Tier.DEVICE for piece in pieces for name in (piece.key, piece.content)}


def state(sequence: int = 1, run: str = "first", **fields: object) -> EngineState:
    return replace(EngineState(run=run, sequence=sequence), **fields)  # type: ignore[arg-type]


def engines(*addresses: str, info: EngineInfo = INFO) -> FrontEngines:
    found = FrontEngines(EXPECTED)
    found.set_addresses(addresses)
    for address in addresses:
        found.on_info(address, info)
        assert found.on_state(address, state(), 0.0)
    return found


def test_engine_gets_requests_once_its_information_and_state_are_there() -> None:
    found = FrontEngines(EXPECTED)
    found.set_addresses([A])
    assert found.asks(A) is None and found.num_alive == 0
    with pytest.raises(EngineUnavailableError, match="ask again later"):
        found.send(prompt(), "", 0.0)
    found.on_info(A, INFO)
    assert found.asks(A) == ("first", 0) and found.num_alive == 0
    assert found.on_state(A, state(7), 0.0)
    assert found.asks(A) == ("first", 7) and found.num_alive == 1
    assert found.send(prompt(), "", 0.0).engine == A


def test_holder_gets_the_request_and_the_prediction_says_why() -> None:
    found = engines(A, B)
    for address in (A, B):
        sent = found.send(prompt(), "", 0.0)
        found.on_first_token(sent, 0.5)
        found.on_end(sent, 0.6)
        kept = held(prompt()) if address == B else {}
        for one in (A, B):
            found.on_state(one, state(2, is_all=True, changes=kept if one == B else {}), 1.0)
    sent = found.send(prompt(), "", 2.0)
    assert sent.engine == B and sent.num_expected_tokens == 103
    assert sent.predicted_seconds == pytest.approx(1.02)
    other = found.send(prompt(), "another tenant", 2.0)
    assert other.num_expected_tokens == 0, "tenants share no KV"


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (replace(INFO, vocabulary=b"other words"), "whose tokens are not those of this front"),
        (replace(INFO, knowledge_base="kb-2"), "another knowledge base"),
        (
            replace(INFO, fingerprint=b"g" * 32, model="bigger"),
            "runs bigger .* and the one at http://a:9100 runs micro",
        ),
    ],
)
def test_engine_that_does_not_fit_gets_nothing_and_says_why(other: EngineInfo, complaint: str) -> None:
    found = engines(A)
    found.set_addresses([A, B])
    found.on_info(B, other)
    assert found.asks(B) is None and found.num_alive == 1 and not found.are_misfits
    assert re.search(complaint, found.problems[B])
    assert {found.send(prompt(number), "", 0.0).engine for number in range(9)} == {A}
    found.on_info(B, INFO)
    assert found.on_state(B, state(), 1.0) and found.num_alive == 2


def test_another_model_is_used_once_no_engine_has_the_first() -> None:
    found = engines(A)
    found.set_addresses([A, B])
    other = replace(INFO, fingerprint=b"g" * 32, tail_tokens=0, costs=None)
    found.on_info(B, other)
    found.on_lost(A, "gone")
    found.on_info(B, other)
    found.on_state(B, state(), 1.0)
    sent = found.send(prompt(), "", 1.0)
    assert (sent.engine, sent.fingerprint, sent.predicted_seconds) == (B, b"g" * 32, None)


def test_engine_of_the_fronts_model_replaces_those_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    other = replace(INFO, fingerprint=b"g" * 32, model="bigger")
    found = engines(A, info=other)
    assert "requests go to bigger, as no engine with this front's own model, microworld, takes" in caplog.text
    found.set_addresses([A, B])
    streaming = found.send(prompt(), "", 0.0)
    assert streaming.fingerprint == other.fingerprint
    found.on_info(B, INFO)
    assert found.on_state(B, state(), 1.0)
    assert re.search("at http://a:9100 runs bigger .* and the one at http://b:9100 runs micro", found.problems[A])
    assert not found.on_state(A, state(2), 1.0), "its report may be on the way"
    sent = found.send(prompt(), "", 1.0)
    assert (sent.engine, sent.fingerprint) == (B, INFO.fingerprint)
    found.on_first_token(streaming, 2.0)
    found.on_end(streaming, 3.0)
    found.on_info(A, other)
    assert found.asks(A) is None and found.infos == [INFO]


def test_engine_that_drains_replaces_none_and_keeps_none_away() -> None:
    other = replace(INFO, fingerprint=b"g" * 32, model="bigger")
    found = engines(A, info=other)
    found.set_addresses([A, B])
    found.on_info(B, INFO)
    assert found.on_state(B, state(7, is_draining=True, is_all=True, changes=held(prompt())), 1.0)
    assert (list(found.problems), found.infos, found.preparing) == ([B], [other], [A])
    assert found.asks(B) == ("first", 0), "what it holds is asked for again once it is used"
    found.on_lost(A, "no connection")
    found.on_info(A, other)
    assert found.on_state(A, state(), 2.0) and found.num_alive == 1
    assert found.on_state(B, state(8, is_all=True, changes=held(prompt())), 3.0)
    assert list(found.problems) == [A] and found.infos == [INFO]
    sent = found.send(prompt(), "", 3.0)
    assert (sent.engine, sent.num_expected_tokens) == (B, 103)
    found.on_state(B, state(9, is_draining=True), 4.0)
    found.on_info(A, other)
    assert found.infos == [INFO], "it has not said that it takes requests"
    assert found.on_state(A, state(), 4.0) and list(found.problems) == [B] and found.infos == [other]
    found.on_end(sent, 5.0)


def test_second_of_two_models_that_tell_their_states_late_is_refused() -> None:
    found = FrontEngines(EXPECTED)
    found.set_addresses([A, B])
    found.on_info(A, INFO)
    found.on_info(B, replace(INFO, fingerprint=b"g" * 32, model="bigger"))
    assert found.on_state(A, state(), 1.0)
    assert not found.on_state(B, state(), 1.0)
    assert list(found.problems) == [B] and found.infos == [INFO]


def test_documents_are_shared_by_engines_that_fit() -> None:
    lost, later = "http://c:9100", "http://d:9100"
    found = engines(A, lost)
    found.set_addresses([A, B, lost, later])
    assert sorted(found.preparing) == [A, B, lost, later], "those not asked yet are likely to be there"
    found.on_info(B, replace(INFO, fingerprint=b"g" * 32, model="bigger"))
    found.on_silent(lost, "silent for 2 s")
    assert sorted(found.preparing) == [A, lost, later]
    found.on_lost(lost, "silent for 10 s")
    found.on_lost(later, "no connection")
    assert found.preparing == [A]
    found.on_info(lost, INFO)
    assert found.preparing == [A], "it has not reported yet"
    found.on_state(lost, state(), 1.0)
    assert found.preparing == [A, lost]
    found.on_state(lost, state(2, is_draining=True), 2.0)
    assert found.preparing == [A]


def test_model_is_chosen_once_an_engine_has_the_fronts_or_all_were_asked() -> None:
    other = replace(INFO, fingerprint=b"g" * 32, model="bigger")
    found = engines(A, info=other)
    found.set_addresses([A, B])
    chosen = [found.is_model_chosen]
    found.on_lost(B, "no connection")
    chosen.append(found.is_model_chosen)
    found = engines(A)
    found.set_addresses([A, B])
    assert [*chosen, found.is_model_chosen] == [False, True, True]


def test_all_engines_that_do_not_fit_are_told_apart_from_silent_ones() -> None:
    found = FrontEngines(EXPECTED)
    seen = [found.are_misfits]
    found.set_addresses([A, B])
    seen.append(found.are_misfits)
    found.on_misfit(A, "it refuses the secret")
    seen.append(found.are_misfits)
    found.on_misfit(B, "it refuses the secret")
    seen.append(found.are_misfits)
    found.on_lost(B, "no connection")
    assert [*seen, found.are_misfits] == [False, False, False, True, False]


def test_engine_of_another_run_holds_nothing_until_it_tells() -> None:
    found = engines(A)
    found.on_state(A, state(2, changes=held(prompt())), 1.0)
    assert found.send(prompt(), "", 1.0).num_expected_tokens == 103
    assert not found.on_state(A, state(1, run="second"), 2.0)
    assert found.asks(A) is None and found.num_alive == 0
    found.on_info(A, replace(INFO, run="second"))
    found.on_state(A, state(1, run="second"), 2.0)
    assert found.send(prompt(), "", 2.0).num_expected_tokens == 0


def test_state_with_all_names_replaces_those_before() -> None:
    found = engines(A)
    found.on_state(A, state(2, changes=held(prompt(1)) | held(prompt(2, 50))), 1.0)
    found.on_state(A, state(9, is_all=True, changes=held(prompt(2, 50))), 2.0)
    assert found.send(prompt(2, 50), "", 3.0).num_expected_tokens == 53
    sent = found.send(prompt(1), "", 3.0)
    assert sent.num_expected_tokens == 3, "the system prompt is that of the other prompt"


def test_full_engine_gets_nothing_until_its_next_report() -> None:
    found = engines(A, B)
    sent = found.send(prompt(), "", 0.0)
    found.on_refused(sent, "full", is_lost=False)
    found.on_end(sent, 0.0)
    other = found.send(prompt(), "", 0.1)
    assert other.engine != sent.engine
    found.on_refused(other, "full", is_lost=False)
    with pytest.raises(EngineUnavailableError):
        found.send(prompt(), "", 0.2)
    assert found.num_alive == 2, "a full engine is alive"
    found.on_state(sent.engine, state(2), 0.3)
    assert found.send(prompt(), "", 0.4).engine == sent.engine


def test_broken_stream_loses_its_engine_once() -> None:
    found = engines(A)
    one, two = found.send(prompt(), "", 0.0), found.send(prompt(), "", 0.0)
    found.on_broken(one, "reset")
    found.on_end(one, 0.1)
    assert found.num_alive == 0 and found.asks(A) is None
    found.on_info(A, INFO)
    found.on_state(A, state(), 1.0)
    found.on_broken(two, "reset")
    found.on_first_token(two, 1.1)
    found.on_end(two, 1.1)
    assert found.num_alive == 1, "the second stream was of the connection before"
    assert found.counts[A].num_broken == 2 and found.counts[A].num_losses == 1


def test_silence_is_a_loss_and_counts_once() -> None:
    found = engines(A)
    for _ in range(3):
        found.on_silent(A, "silent for 2 s")
    assert found.counts[A].num_losses == 1
    found.on_lost(A, "silent for 10 s")
    assert found.counts[A].num_losses == 1, "it was counted when it fell silent"
    found.on_silent(A, "silent for 2 s")
    assert found.counts[A].num_losses == 1, "it was not in use"
    found.on_info(A, INFO)
    found.on_state(A, state(), 20.0)
    found.on_silent(A, "silent for 2 s")
    found.on_state(A, state(2), 21.0)
    found.on_lost(A, "no connection")
    assert found.counts[A].num_losses == 3


def test_draining_and_silent_engines_get_nothing() -> None:
    found = engines(A, B)
    found.on_state(A, state(2, is_draining=True), 1.0)
    found.on_silent(B, "silent for 2 s")
    assert found.num_alive == 0 and found.problems == {A: "it is shutting down", B: "silent for 2 s"}
    assert found.asks(B) == ("first", 1), "its names are still known"
    found.on_state(B, state(2), 2.0)
    assert found.send(prompt(), "", 2.0).engine == B
    with pytest.raises(EngineUnavailableError):
        found.send(prompt(), "", 12.1)


def test_prompt_that_was_never_computed_is_not_expected_for_ever() -> None:
    found = engines(A)
    sent = found.send(prompt(), "", 0.0)
    assert found.send(prompt(), "", 0.1).num_expected_tokens == 103
    found.on_end(sent, 0.2)
    second = found.send(prompt(2, 40), "", 0.2)
    found.on_end(second, 0.3)
    found.on_state(A, state(2), 1.0)
    assert found.send(prompt(2, 40), "", 1.1).num_expected_tokens == 3


def test_counts_compare_prediction_and_reality() -> None:
    found = engines(A)
    sent = found.send(prompt(), "", 10.0)
    found.on_first_token(sent, 13.0)
    counts = found.counts[A]
    assert counts.num_predicted == 1 and counts.first_token_seconds == 3.0
    assert counts.predicted_seconds == sent.predicted_seconds == pytest.approx(2.05)


def test_counts_tell_what_of_the_prompts_an_engine_had_kept() -> None:
    found = engines(A)
    reports = [
        None,
        PromptReuse((SegmentReuse(SegmentKind.SYSTEM, None, 3, Tier.HOST, Reason.HIT),), 0.0, 0.0),
        PromptReuse((SegmentReuse(SegmentKind.CHUNK, ChunkId(1), 100, None, Reason.NEVER_SEEN),), 0.0, 0.0),
    ]
    for report in reports:
        found.on_first_token(found.send(prompt(), "", 1.0), 2.0, report)
    assert (found.counts[A].num_prompt_tokens, found.counts[A].num_reused_tokens) == (103, 3)


def test_starts_of_an_engine_count_once_each_and_last_reports_are_there_while_it_may_get_requests() -> None:
    found = engines(A)
    assert found.counts[A].num_runs == 1 and found.states == {A: state()}
    found.on_lost(A, "no connection")
    assert found.states == {}
    found.on_info(A, INFO)
    found.on_state(A, state(), 1.0)
    assert found.counts[A].num_runs == 1, "the same start is back"
    assert not found.on_state(A, state(run="second"), 2.0)
    found.on_info(A, replace(INFO, run="second"))
    assert found.counts[A].num_runs == 2 and found.states == {}, "it has not reported yet"
    found.on_state(A, state(run="second", num_outstanding=4), 2.5)
    assert found.states[A].num_outstanding == 4


def test_totals_are_sums_of_engines_that_take_requests() -> None:
    found = engines(A, B)
    for address, number in ((A, 1), (B, 10)):
        found.on_state(
            address, state(2, num_waiting=number, num_running=2 * number, num_blocks=99, num_free_blocks=number), 1.0
        )
    assert found.totals == {"num_waiting": 11, "num_running": 22, "num_blocks": 198, "num_free_blocks": 11}
    found.on_lost(B, "gone")
    assert found.totals["num_waiting"] == 1


def test_names_of_engines_hide_their_addresses() -> None:
    assert engine_name(A) != engine_name(B) and "9100" not in engine_name(A)


ADDRESSES = st.sampled_from([A, B, "http://c:9100"])
CHANGES = st.sampled_from([{}, held(prompt(1)), dict.fromkeys(held(prompt(1)))])


class Books(RuleBasedStateMachine):
    """Engines, reports and streams in any order: nothing fails, and no request stays outstanding."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = FrontEngines(EXPECTED)
        self.runs: dict[str, int] = {}
        self.streams: list[Sent] = []
        self.now = 0.0

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(addresses=st.lists(ADDRESSES, unique=True))
    def look(self, addresses: list[str]) -> None:
        self.engines.set_addresses(addresses)

    @rule(address=ADDRESSES, starts_again=st.booleans(), is_other=st.booleans())
    def tell_info(self, address: str, starts_again: bool, is_other: bool) -> None:
        if address in self.engines.addresses and self.engines.asks(address) is None:
            self.runs[address] = self.runs.get(address, 0) + starts_again
            info = replace(INFO, fingerprint=b"g" * 32, model="bigger") if is_other else INFO
            self.engines.on_info(address, replace(info, run=str(self.runs[address])))
            assert is_other or self.engines.asks(address) is not None, "the front's model is always taken"

    @rule(address=ADDRESSES, changes=CHANGES, is_all=st.booleans(), is_draining=st.booleans())
    def tell_state(
        self, address: str, changes: dict[bytes, Tier | None], is_all: bool, is_draining: bool = False
    ) -> None:
        told = state(1, str(self.runs.get(address, 0)), changes=changes, is_all=is_all, is_draining=is_draining)
        before = self.engines.num_alive
        self.engines.on_state(address, told, self.now)
        if is_draining and address in self.engines.problems:
            assert self.engines.num_alive >= before - 1, "an engine that drains replaces none"

    @invariant()
    def one_model_is_in_use(self) -> None:
        used = [one.info for one in self.engines._engines.values() if not one.problem or one.is_used]
        assert len({one.model for one in used if one is not None}) <= 1 and None not in used
        assert len(self.engines.infos) == len(used)

    @rule(address=ADDRESSES)
    def lose(self, address: str) -> None:
        self.engines.on_lost(address, "gone")

    @rule(chunk=st.integers(1, 3))
    def send(self, chunk: int) -> None:
        with contextlib.suppress(EngineUnavailableError):
            self.streams.append(self.engines.send(prompt(chunk), "", self.now))

    @precondition(lambda self: self.streams)
    @rule(draw=st.data(), has_token=st.booleans(), end=st.sampled_from(["broken", "full", "unreached", "complete"]))
    def end(self, draw: st.DataObject, has_token: bool, end: str) -> None:
        stream = self.streams.pop(draw.draw(st.integers(0, len(self.streams) - 1)))
        if has_token:
            self.engines.on_first_token(stream, self.now)
        if end == "broken":
            self.engines.on_broken(stream, "broken")
        elif end != "complete":
            self.engines.on_refused(stream, end, is_lost=end == "unreached")
        self.engines.on_end(stream, self.now)

    def teardown(self) -> None:
        for stream in self.streams:
            self.engines.on_end(stream, self.now)
        for address in self.engines.addresses:
            self.tell_state(address, {}, is_all=True)
        for belief in self.engines._beliefs.at(self.now):
            assert belief.num_outstanding == 0
            assert not belief.held, "a prompt is still expected"


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=most_examples(40), stateful_step_count=30, deadline=None)
