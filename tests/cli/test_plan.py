"""`stillroom plan` with real knowledge bases and the bundled model."""

import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from stillroom.backends import engine_building
from stillroom.backends.prompt_builder import in_document_order
from stillroom.cli.plan import MISSED
from stillroom.cli.plan_report import show_accuracy
from stillroom.config.load import load_config
from stillroom.config.settings import GenerationConfig, IndexConfig, RuntimeConfig, StillroomConfig
from stillroom.core.clock import SystemClock
from stillroom.models import bundled_models
from stillroom.planner.accuracy import Accuracy, load_accuracy
from stillroom.planner.inputs import measure_inputs
from stillroom.planner.workload import PlannedWorkload, QuestionCounts
from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.index import ivf_pq
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.server.error_kinds import FAILED, WRONG_CALL
from stillroom.telemetry.trace import TRACE_FILE, TraceLog
from tests.cli.harness import Run
from tests.server.knowledge import QUESTION, write_knowledge

pytestmark = pytest.mark.microworld

MODEL = ("--model", "bundled:microworld")
SMALL = (*MODEL, "--requests", 6, "--different", 3, "--answer-tokens", 2, "--device-memory", "64MiB", "--quiet")


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documents, in a flat index."""
    folder = tmp_path_factory.mktemp("plan")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
    return folder / "kb"


@pytest.fixture(scope="module")
def lists_kb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough short records to train lists."""
    folder = tmp_path_factory.mktemp("lists")
    records = [{"_id": f"r{number}", "text": f"key {number} of town {number * 37 % 101}"} for number in range(640)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = StillroomConfig(index=IndexConfig(kind="ivf_pq", nlist=16, nprobe=4))
    with pytest.MonkeyPatch.context() as patch, Stillroom.open(folder / "kb", config=config) as stillroom:
        patch.setattr(ivf_pq, "_POINTS_PER_CENTROID", 2)  # 8 bits, as a device wants, without 9,984 records
        stillroom.add(folder / "records.jsonl")
    return folder / "kb"


@pytest.fixture(autouse=True)
def no_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ignores calibrations of this machine."""
    monkeypatch.setattr(engine_building, "cache_root", lambda: tmp_path / "cache")


def test_plan_for_an_index_that_cannot_be_split(run: Run, kb: Path) -> None:
    nodes = ("--nodes", 2, "--tier-speed", "1GiB")
    found = run("plan", "--slo-ttft", "100s", "--rate", 2, "--kb", kb, *nodes, *SMALL)

    assert found.code == 0
    assert "Machines with the planned memory each, behind a router, at 2/s" in found.out
    rows = [line.split() for line in found.out.partition("Machines with")[2].splitlines() if line.strip()[:1] in "12"]
    assert [row[0] for row in rows if row] == ["1", "2", "1", "2"], "without a tier, and with one"
    assert "Met: p95 of at most 1 min 40 s at 2/s" in found.out and "What to get next" in found.out
    assert "The index (flat) cannot be split, so the plan covers KV only." in found.out
    assert "Preparing: 4 chunks in 2 documents." in found.out and "100% of the chunks" in found.out
    assert "6 requests at 2/s" in found.out and "stillroom calibrate measures them better" in found.out
    assert "Measured beyond search and steps alone: " in found.out and "Good for the order of choices" in found.out


@pytest.mark.slow
def test_plan_uses_configured_prompt_limit_and_batch_delay(kb: Path) -> None:
    config = StillroomConfig(
        runtime=RuntimeConfig(kv_bytes=2**26, batch_delay_ms=20.0), generation=GenerationConfig(max_prompt_tokens=60)
    )
    asked = QuestionCounts((QUESTION,), (1,), "one")
    with closing(KnowledgeBase.open(kb, config, clock=SystemClock())) as opened:
        make_inputs = measure_inputs(opened, config, asked, PlannedWorkload((0,), (0,), (0.0,), 1.0), 2, SystemClock())
    assert 40 < sum(map(len, make_inputs.found[0].prompt)) <= 60
    assert make_inputs.hardware.batch_delay_seconds == 0.02


@pytest.mark.slow
def test_plan_orders_chunks_as_configured(kb: Path) -> None:
    """The best chunk of this question is the last of its document."""
    config = StillroomConfig(runtime=RuntimeConfig(kv_bytes=2**26), generation=GenerationConfig(chunk_order="document"))
    asked = QuestionCounts(("Which subject did Jatha Jurlow choose as a student ?",), (1,), "one")
    with closing(KnowledgeBase.open(kb, config, clock=SystemClock())) as opened:
        made = measure_inputs(opened, config, asked, PlannedWorkload((0,), (0,), (0.0,), 1.0), 2, SystemClock())
    ranked = [scored.chunk for scored in made.found[0].result.results]
    ordered = in_document_order(ranked)
    assert ordered != ranked and made.found[0].chunk_ids == tuple(chunk.chunk_id for chunk in ordered)


def test_a_plan_for_index_and_kv(run: Run, lists_kb: Path) -> None:
    found = run("plan", "--slo-ttft", "100s", "--kb", lists_kb, "--ram", "64MiB", "--json", *SMALL).json

    assert found["index"] == "ivf_pq" and found["is_met"] and found["binding"] is None
    lists = found["now"]["bytes"]["host_lists"]
    assert lists > 640 * 8
    for option in found["options"]:
        held = option["bytes"]
        assert held["host_lists"] <= held["disk_lists"] == lists
        assert held["host_lists"] + held["host_kv"] == 64 * 2**20
    rates = [option["predicted"]["list_hit_rate"] for option in found["options"]]
    # whole lists fill the bytes: a little more RAM may hold a hot large list in place of two cooler small ones
    assert (rates[0], rates[-1]) == (0.0, 1.0) and all(b >= a - 0.1 for a, b in pairwise(rates))
    best = min(option["predicted"]["p95_seconds"] for option in found["options"])
    assert found["chosen"]["predicted"]["p95_seconds"] <= 1.01 * best
    assert {"hit_rate", "binding"} & found["smallest_hit_rate"].keys()
    assert found["accuracy"] is None and found["overheads"]["request_seconds"] >= 0
    assert min(found["overheads"]["cores"].values()) >= 1
    assert found["search_model"]["per_query"] >= 0 and found["workload"]["requests"] == 6


@pytest.mark.parametrize("hot_bytes", [pytest.param(0, marks=pytest.mark.slow), 1000])
def test_plan_searches_with_the_calibrated_effort_and_copies_no_vectors(
    lists_kb: Path, hot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    goal = IndexConfig(kind="ivf_pq", nlist=16, nprobe=1, ann_recall=0.9, hot_bytes=hot_bytes)
    config = StillroomConfig(runtime=RuntimeConfig(kv_bytes=2**26), index=goal)
    asked = QuestionCounts(("key 7 of town 58", "key 9 of town 30"), (1, 1), "two")
    with closing(KnowledgeBase.open(lists_kb, config, clock=SystemClock())) as opened:
        index = opened.indexes.current()[0]
        assert isinstance(index, TieredIvfPqIndex) == bool(hot_bytes)
        monkeypatch.delattr(type(index), "to_arrays")
        workload = PlannedWorkload((0, 1), (0, 1), (0.0, 1.0), 1.0)
        make_inputs = measure_inputs(opened, config, asked, workload, 2, SystemClock())
        effort = opened.indexes.effort()
    assert make_inputs.index is not None and make_inputs.index.nprobe == effort and effort > 1
    assert make_inputs.index.profile.sizes.sum() == 640 and all(one.dense_seconds > 0 for one in make_inputs.found)


@pytest.mark.slow
def test_plan_for_a_device_shared_by_lists_and_kv(run: Run, lists_kb: Path) -> None:
    Path("stillroom.toml").write_text('[index]\nkind = "ivf_pq"\ndevice_bytes = 1000000\ndevices = "cpu"\n')
    ran = run("plan", "--slo-ttft", "100s", "--kb", lists_kb, "--ram", "64MiB", "--apply", "--json", *SMALL)

    assert ran.code == 0, ran.err
    found = ran.json
    codes = 640 * 48
    now = found["now"]["bytes"]
    assert (now["device_lists"], now["host_lists"], now["disk_lists"]) == (codes, 0, codes + 640 * 8)
    assert found["now"]["predicted"]["device_hit_rate"] == 1.0 and found["search_model"]["device"]
    options = [option["bytes"] for option in found["options"]]
    assert {option["device_lists"] for option in options} > {0, codes}
    assert all(option["device_lists"] + option["device_kv"] == 64 * 2**20 for option in options)
    names = [effect["name"] for effect in found["sensitivity"] + found["purchases"]]
    assert "half the lists on devices" in names and "twice the device memory" in names
    loaded = load_config(env={})
    chosen = found["chosen"]["bytes"]
    assert (loaded.index.device_bytes, loaded.index.devices) == (chosen["device_lists"], "cpu")
    assert loaded.index.hot_bytes == max(1, chosen["host_lists"])


def test_missed_target_names_the_limit_and_writes_nothing(run: Run, kb: Path) -> None:
    found = run("plan", "--slo-ttft", "1us", "--kb", kb, *SMALL)
    assert found.code == MISSED == FAILED
    assert (
        "Missed: p95 of at most 1 us at 1/s, by " in found.out
        and " is the limit: one question alone takes" in found.out
    )

    refused = run("plan", "--slo-ttft", "1us", "--kb", kb, "--apply", *SMALL)
    assert refused.code == WRONG_CALL and "nothing was written" in refused.err
    assert not Path("stillroom.toml").exists()


def test_apply_writes_what_was_planned(run: Run, kb: Path) -> None:
    Path("stillroom.toml").write_text("# ours\n[reuse]\nhost_bytes = 1\n")
    flags = ("--ram", "3MiB", "--disk", "5MiB", "--apply")

    first = run("plan", "--slo-ttft", "100s", "--kb", kb, *flags, *SMALL)
    again = run("plan", "--slo-ttft", "100s", "--kb", kb, *flags, *SMALL)

    assert first.code == again.code == 0
    assert "stillroom.toml: reuse.host_bytes = 3145728 (was 1)" in first.out
    assert "stillroom.toml: runtime.kv_bytes = 67108864 (was not set)" in first.out
    assert "stillroom.toml has these values already" in again.out
    assert "mode" not in Path("stillroom.toml").read_text(), "answers may change with another mode"
    assert Path("stillroom.toml").read_text().startswith("# ours\n[reuse]\n")
    loaded = load_config(env={})
    assert (loaded.reuse.host_bytes, loaded.reuse.disk_bytes) == (3 * 2**20, 5 * 2**20)
    assert loaded.runtime.kv_bytes == 64 * 2**20


def test_validate_runs_the_workload(run: Run, kb: Path, tmp_path: Path) -> None:
    Path("stillroom.toml").write_text('[reuse]\nmode = "prepared"\n')
    asked = tmp_path / "asked.txt"
    asked.write_text(f"{QUESTION}\n{QUESTION}\nWho is it?\n")
    log = TraceLog(kb / TRACE_FILE, keep=1)
    log.add("req-1", 0.0, {"question": "mine"})
    log.close()
    flags = ("--questions", asked, "--rate", 50, "--validate", "--json")

    planned = run("plan", "--slo-ttft", "100s", "--kb", kb, *flags, *SMALL).json

    assert planned["preparing"]["mode"] == "prepared" and planned["preparing"]["budgets"][-1]["chunks"] == 4
    found = planned["validation"]
    assert found["measured"]["kept_share"] == pytest.approx(found["predicted"]["kept_share"], abs=0.01)
    assert found["measured"].keys() <= found["predicted"].keys()
    assert 0 < found["measured"]["p50_seconds"] <= found["measured"]["p99_seconds"]
    (kept,) = (tmp_path / "cache" / "profiles").glob("*.plan.json")
    assert found["accuracy"]["num_requests"] == 6 and load_accuracy(kept) is not None  # the next plan prints it
    assert [request_id for request_id, _, _ in log.recent(9)] == ["req-1"], (
        "the request log holds users' questions only"
    )


@pytest.mark.parametrize(
    ("accuracy", "printed"),
    [
        (None, "Good for the order of choices, not for times: no plan was validated here."),
        (Accuracy(1.2, 0.9, 60, 2.0), "60 requests at 2/s: measured p50 was 1.2 times the predicted, p95 0.9 times.\n"),
        (Accuracy(1.2, 3.0, 60, 2.0), "not as times; by that factor, p95 is 300 ms.\n"),
    ],
)
def test_plan_says_what_its_times_are_good_for(
    accuracy: Accuracy | None, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_accuracy(0.1, accuracy)

    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--slo-ttft", "300"), "--slo-ttft 300: not a time; give one with its unit"),
        (("--slo-ttft", "1s", "--ram", "much"), "--ram much: not a size; give one such as"),
        (("--slo-ttft", "1s", "--disk", "-4"), "--disk -4: not a size; give one such as"),
        (("--rate", "1"), "--slo-ttft"),
        (("--slo-ttft", "1s", "--tier-speed", "1GiB"), "give --nodes too"),
        (("--slo-ttft", "1s", "--nodes", "2", "--tier-speed", "0"), "--tier-speed is 0; give more"),
        (("--slo-ttft", "1s", "--device-memory", "1KiB"), "runtime.kv_bytes"),
    ],
)
def test_invalid_calls_exit_2(run: Run, kb: Path, flags: tuple[str, ...], message: str) -> None:
    found = run("plan", "--kb", kb, *MODEL, "--requests", 2, "--different", 2, "--quiet", *flags)
    assert found.code == WRONG_CALL and message in found.err


@pytest.mark.parametrize("flags", [(), ("--questions", "asked.txt")])
def test_plan_needs_a_knowledge_base_with_chunks(run: Run, tmp_path: Path, flags: tuple[str, ...]) -> None:
    Path("asked.txt").write_text(f"{QUESTION}\n")
    assert run("plan", "--slo-ttft", "1s", "--kb", tmp_path / "none", *MODEL).code == WRONG_CALL
    with Stillroom.open(tmp_path / "empty"):
        pass
    found = run("plan", "--slo-ttft", "1s", "--kb", tmp_path / "empty", "--quiet", *MODEL, *flags)
    assert found.code == WRONG_CALL and not found.out
    assert "holds no chunks; add documents first: stillroom add" in found.err


@pytest.mark.parametrize("flags", [(), ("--model", "bundled:reader"), ("--model", "bundled")])
def test_plan_for_the_reader_is_refused_and_names_the_flag(
    run: Run, kb: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled_models, "DEFAULT", "reader")  # as without this module's marker
    monkeypatch.delenv("STILLROOM_RUNTIME__MODEL")
    found = run("plan", "--slo-ttft", "1s", "--kb", kb, "--json", *flags)
    assert found.code == WRONG_CALL and not found.out
    assert "the reader keeps no KV" in found.err and "--model (runtime.model)" in found.err
