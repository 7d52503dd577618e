"""What preparing gains, by budget: the product's engine over documents that were prepared before the questions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.cli.preparing_report import show_preparing
from stillroom.config.settings import PrepareConfig, ReuseConfig, ReuseMode
from stillroom.core.ids import ChunkId
from stillroom.kvstore.files import size_on_disk
from stillroom.planner.choice import Target
from stillroom.planner.forecast import Forecaster, Variation
from stillroom.planner.inputs import PlanInputs
from stillroom.planner.plan_json import plan_as_json
from stillroom.planner.planner import make_plan
from stillroom.planner.preparing import LEAST_FIRST, first_questions, held_out_workload, plan_preparing
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom.planner.splits import Budgets, Split
from stillroom.planner.workload import PlannedWorkload
from tests.planner.made import make_inputs, with_documents

FOUND = [[0, 4], [1, 8], [5, 2], [3, 9], [6, 10], [7, 11], [12, 13], [14, 1], [15, 3], [13, 8]]
"""Chunks that each of ten questions finds, in documents of four chunks: hardly a question finds a whole beginning."""
SPLIT = Split(device_kv=1024, host_kv=10_000, disk_kv=10**6)
BUDGETS = Budgets(device=1024, ram=10_000, disk=10**6)
RECORD = size_on_disk(16)


def inputs(mode: ReuseMode = "exact", disk_bytes: int = 10**6, *, has_lists: bool = False) -> PlanInputs:
    made = with_documents(make_inputs(has_lists=has_lists, num_requests=20, rate=0.5), FOUND)
    policy = EnginePolicy(reuse=ReuseConfig(mode=mode, policy="lru"), prepare=PrepareConfig(disk_bytes=disk_bytes))
    hardware = replace(made.hardware, device_bytes=1024)
    return replace(made, policy=policy, hardware=hardware)


def asked_once(made: PlanInputs, question: int) -> PlanInputs:
    return replace(made, workload=PlannedWorkload((), (question,), (100.0,), 1.0))


def test_prepared_question_computes_only_itself() -> None:
    forecaster = Forecaster(asked_once(inputs(), 4))
    plain = forecaster.forecast(SPLIT)
    prepared = forecaster.forecast(SPLIT, Variation(reuse="prepared", prepared_chunks=16))
    # system message and two chunks of 16 tokens, a question of 3, and the copy of the system message on the host
    assert plain.seconds.tolist() == pytest.approx([0.003 + 0.01 + 0.001 * (48 + 3) + 16 / 1e5])
    assert prepared.seconds.tolist() == pytest.approx([0.003 + 0.01 + 0.001 * 3])
    assert prepared.kept_share == pytest.approx(48 / 51) and plain.prepared.windows == ()


def test_partly_prepared_question_computes_the_rest() -> None:
    """The newest document has chunks 12 to 15, the next 8 to 11; question 5 finds chunks 7 and 11."""
    forecaster = Forecaster(asked_once(inputs(), 5))
    found = forecaster.forecast(SPLIT, Variation(reuse="prepared", prepared_chunks=8))
    assert found.prepared.chunk_ids == set(range(8, 16))
    assert found.seconds.tolist() == pytest.approx([0.003 + 0.01 + 0.001 * (16 + 3)])


def test_configured_budget_ends_preparing_where_the_engine_does() -> None:
    for disk_bytes in (0, 4 * RECORD, 11 * RECORD):
        found = Forecaster(asked_once(inputs("prepared", disk_bytes), 0)).forecast(SPLIT)
        assert found.prepared.num_chunks == disk_bytes // RECORD // 4 * 4
    twice = Forecaster(asked_once(inputs("prepared", 4 * RECORD), 0)).forecast(SPLIT, Variation(prepared=2.0))
    assert twice.prepared.num_chunks == 8


def test_disk_smaller_than_the_budget_ends_preparing_too() -> None:
    """The system message takes a record."""
    found = Forecaster(asked_once(inputs("prepared"), 0)).forecast(replace(SPLIT, disk_kv=10 * RECORD))
    assert found.prepared.num_chunks == 8 and found.prepared.num_bytes <= 10 * RECORD


def test_questions_that_are_scored_decide_nothing() -> None:
    workload = inputs().workload
    held_out = held_out_workload(workload)
    assert not set(held_out.asked) & set(held_out.searched) and not held_out.warm
    assert set(held_out.asked) | set(held_out.searched) == {*workload.warm, *workload.asked}
    assert held_out.dues == workload.dues[: len(held_out.asked)] and held_out.rate == workload.rate


@given(st.lists(st.frozensets(st.integers(0, 6).map(ChunkId), max_size=3), max_size=12))
def test_first_question_has_a_chunk_that_none_before_it_has(asked: list[frozenset[ChunkId]]) -> None:
    found = first_questions(asked).tolist()
    for at, is_first in enumerate(found):
        assert is_first == bool(asked[at] - frozenset[ChunkId]().union(*asked[:at]))


def test_larger_budgets_cover_more_and_are_faster() -> None:
    plan = plan_preparing(inputs(), SPLIT)
    shares, configured = plan.rows[:-1], plan.rows[-1]
    assert [row.share for row in shares] == [0.0, 0.05, 0.25, 1.0] and configured.share is None
    assert [row.prepared.num_chunks for row in shares] == [0, 1, 4, 16]
    # documents are prepared whole, so one chunk needs the room of its document's four
    assert [row.needed_bytes for row in shares] == [0, 4 * RECORD, 4 * RECORD, 16 * RECORD]
    assert [row.all_covered for row in shares] == sorted(row.all_covered for row in shares)
    assert shares[0].partly_covered == 0 and shares[2].partly_covered > 0 and shares[-1].all_covered == 1.0
    assert (shares[-1].prepared.num_bytes, shares[-1].prepared.num_chunks) == (16 * RECORD, plan.num_chunks)
    assert configured.prepared.num_chunks == 16 and configured.first_seconds == shares[-1].first_seconds
    first = [row.first_seconds or 0.0 for row in shares]
    assert first[-1] < first[2] < first[0] == plan.today.first_seconds
    assert 0 < plan.num_first <= plan.num_requests and plan.advice in plan.rows
    assert plan.search_seconds == pytest.approx(0.003)


def test_small_corpus_has_no_two_rows_of_the_same_chunks() -> None:
    made = inputs()
    few = replace(made, documents=replace(made.documents, documents=made.documents.documents[:2]))
    shares = plan_preparing(few, SPLIT).rows[:-1]
    assert [(row.share, row.prepared.num_chunks) for row in shares] == [(0.0, 0), (0.25, 2), (1.0, 8)]


def test_percentages_have_disk_of_their_own() -> None:
    everything = plan_preparing(inputs(), replace(SPLIT, disk_kv=0)).rows[3]
    assert everything.prepared.num_chunks == 16


def test_report_names_the_gain_and_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_preparing(inputs(), SPLIT)
    show_preparing(plan)
    printed = capsys.readouterr().out
    assert "Preparing: 16 chunks in 4 documents." in printed and "exact, none " in printed
    assert "answers 100% of first questions from prepared KV" in printed
    assert 'It needs reuse.mode = "prepared", with which answers may change' in printed

    show_preparing(plan_preparing(inputs("prepared"), SPLIT))
    printed = capsys.readouterr().out
    assert ", none " not in printed and "It needs" not in printed


@pytest.mark.parametrize(
    ("disk_bytes", "disk_kv", "names"),
    [
        (10**6, 10**6, []),
        (4 * RECORD, 10**6, ["prepare.disk_bytes"]),
        (10**6, 8 * RECORD, ["reuse.disk_bytes"]),
        (0, 0, ["prepare.disk_bytes", "reuse.disk_bytes"]),
    ],
)
def test_advice_names_the_budgets_that_are_too_small(
    disk_bytes: int, disk_kv: int, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    made, split = inputs("prepared", disk_bytes), replace(SPLIT, disk_kv=disk_kv)
    plan = plan_preparing(made, split)
    assert plan.advice is not None and plan.advice.prepared.num_chunks == 16
    assert [change.path for change in plan.changes] == names
    show_preparing(plan)
    printed = capsys.readouterr().out
    assert ("Set " in printed) == bool(names)
    for change in plan.changes:
        assert f'{change.path} = "1MiB" instead of ' in printed
    told = plan.as_json()["advice"]["settings"]
    assert told == [{"setting": one.path, "before": one.before, "after": 2**20} for one in plan.changes]

    after = {change.path: change.after for change in plan.changes}
    config = replace(made.policy.prepare, disk_bytes=int(str(after.get("prepare.disk_bytes", disk_bytes))))
    changed = replace(made, policy=replace(made.policy, prepare=config))
    now = plan_preparing(changed, replace(split, disk_kv=int(str(after.get("reuse.disk_bytes", disk_kv)))))
    assert now.rows[-1].prepared.num_chunks == 16 and not now.changes, "the advice is enough"


@pytest.mark.parametrize(("host_bytes", "name"), [(5000, "prepare.host_bytes"), (10**6, "reuse.host_bytes")])
def test_advice_names_the_setting_that_limits_the_host(
    host_bytes: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = inputs()
    small = replace(made.policy.prepare, host_bytes=host_bytes)
    plan = plan_preparing(replace(made, policy=replace(made.policy, prepare=small)), SPLIT)
    show_preparing(plan)
    assert f" of it ({name}); the rest is read from disk." in capsys.readouterr().out
    assert plan.as_json()["advice"]["host_limit"] == {"setting": name, "bytes": min(host_bytes, SPLIT.host_kv)}
    assert plan_preparing(made, replace(SPLIT, host_kv=10**6)).host_limit is None


def test_report_says_what_the_gain_depends_on_and_warns_of_few_first_questions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_preparing(inputs(), SPLIT)
    show_preparing(plan)
    printed = capsys.readouterr().out
    different = len(set(held_out_workload(inputs().workload).asked))
    assert f"{plan.num_requests - different} of these {plan.num_requests} requests repeat an earlier one" in printed
    assert plan.num_first < LEAST_FIRST and f"Warning: only {plan.num_first} first questions." in printed
    assert plan.as_json()["has_few_first_questions"]

    show_preparing(replace(plan, num_first=LEAST_FIRST))
    assert "Warning" not in capsys.readouterr().out
    assert 1.96 * (0.25 / LEAST_FIRST) ** 0.5 < 0.2 < 1.96 * (0.25 / (LEAST_FIRST - 1)) ** 0.5


def test_slow_search_leaves_nothing_to_gain(capsys: pytest.CaptureFixture[str]) -> None:
    made = inputs()
    slow = tuple(replace(one, result=replace(one.result, search_seconds=5.0)) for one in made.found)
    plan = plan_preparing(replace(made, found=slow), SPLIT)
    show_preparing(plan)
    assert plan.advice is None and "gains nothing here" in capsys.readouterr().out


def test_model_that_refuses_the_mode_gets_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    made = inputs()
    refused = replace(made, documents=replace(made.documents, refusal="its positions are not rotary"))
    plan = plan_preparing(refused, SPLIT)
    show_preparing(plan)
    assert not plan.rows and plan.advice is None
    assert "Not possible with this model: its positions are not rotary" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["exact", "prepared"])
def test_plan_offers_the_mode_or_varies_its_budget(mode: ReuseMode) -> None:
    made = inputs(mode, 8 * RECORD)
    plan = make_plan(Forecaster(made), BUDGETS, Target(100.0, 95.0))
    bought = {effect.name: effect for effect in plan.purchases}
    varied = {effect.name: effect for effect in plan.sensitivity}
    if mode == "exact":
        assert bought['reuse.mode = "prepared"'].remark.startswith("50% of the chunks prepared; answers may change")
        assert "twice prepare.disk_bytes" not in varied
    else:
        half, twice = (varied[f"{word} prepare.disk_bytes"].forecast for word in ("half", "twice"))
        assert half is not None and twice is not None
        assert (half.prepared.num_chunks, twice.prepared.num_chunks) == (4, 16)
        assert plan.chosen.forecast.prepared.num_chunks == 8 and 'reuse.mode = "prepared"' not in bought
    payload = plan_as_json(plan, made)["preparing"]
    assert payload["mode"] == mode and payload["budgets"][-1]["chunks"] == 8
    assert payload["first_questions"] == plan.preparing.num_first
