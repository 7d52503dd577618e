"""`stillroom explain` with a request log as the pipeline writes it."""

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.core.request import LookupCounts
from stillroom.engine.events import Route
from stillroom.rag.answer import (
    Answer,
    Citation,
    ReuseReport,
    SegmentReport,
    Source,
    SpeculationOutcome,
    SpeculationReport,
    Support,
    Timing,
    VariantReport,
)
from stillroom.rag.records import trace_of
from stillroom.telemetry import trace
from stillroom.telemetry.trace import TRACE_FILE, TraceLog
from tests.cli.harness import Run
from tests.retrieval.test_reading_only import read_only

CHUNK = "00000000000000ff"


def answer(request_id: str, text: str) -> Answer:
    return Answer(
        request_id=request_id,  # type: ignore[arg-type]
        text=text,
        token_ids=(5,),
        finish_reason="stop",
        sources=(Source("docs/keys.md", CHUNK, "secret text", 0.9, {"dense": 0.8, "sparse": 5.0}, 1, "Keys", 3, 4),),
        timing=Timing(0.01, 0.02, 0.0, 0.05, 0.003, 0.001, 0.006),
        reuse=ReuseReport(
            30,
            10,
            num_disk_tokens=10,
            load_seconds=0.001,
            saved_seconds=0.25,
            segments=(
                SegmentReport("system", None, 10, "disk", "hit"),
                SegmentReport("chunk", CHUNK, 15, "computed", "order differs"),
                SegmentReport("question", None, 5, "computed", "always computed"),
            ),
        ),
        num_generated_tokens=1,
    )


def remember(*answers: Answer, keep: int = 10) -> None:
    log = TraceLog(Path("kb") / TRACE_FILE, keep)
    for at, one in enumerate(answers):
        log.add(one.request_id, float(at), trace_of(f"about {one.text}?", "small", one))
    log.close()


def test_the_last_question_segment_by_segment(run: Run) -> None:
    Path("kb").mkdir()
    remember(answer("req-1", "first"), answer("req-2", "second"))

    lines = run("explain", "--kb", "kb").out.splitlines()

    assert lines[0].startswith("req-2  1970-01-01") and lines[0].endswith("small")
    assert lines[1:4] == ["Question: about second?", 'Answer: "second" (stop)', ""]
    assert lines[4:8] == [
        "Prompt: 30 tokens, 10 of them from kept KV",
        "      10  disk      hit                   system",
        "      15  computed  order differs         1. docs/keys.md:3-4  score 0.9000 (dense 0.8000, sparse 5.0000)",
        "       5  computed  always computed       question",
    ]
    assert lines[9] == "Saved: about 250 ms according to the cost profile, after deducting 1 ms for loading"
    assert lines[10] == "Phases: search 10 ms, queue 3 ms, load 1 ms, prefill 6 ms, decode 30 ms"


def test_citations_are_shown_without_their_text(run: Run) -> None:
    Path("kb").mkdir()
    given = [(1, Support.SUPPORTED), (1, Support.PARTLY), (0, Support.UNSUPPORTED)]
    citations = tuple(
        Citation(source, "docs/keys.md", CHUNK, "Keys", 3, 3, 0, 0, "secret text", 0, 11, 0, 4, False, support)
        for source, support in given
    )
    remember(replace(answer("req-1", "first"), citations=citations))

    assert "Citations: [1] supported, [1] partly supported, not supported\n" in run("explain", "--kb", "kb").out
    found = run("explain", "--kb", "kb", "--json").json
    assert [(one["source"], one["support"]) for one in found["citations"]] == given
    assert "secret" not in str(found)


def test_an_earlier_question_by_id_as_json(run: Run) -> None:
    Path("kb").mkdir()
    remember(answer("req-1", "first"), answer("req-2", "second"))

    found = run("explain", "req-1", "--kb", "kb", "--json").json

    assert (found["request_id"], found["question"]) == ("req-1", "about first?")
    assert found["reuse"]["segments"][1]["reason"] == "order differs"
    assert "secret" not in str(found), "the text of documents is not copied"


def test_origin_of_a_reused_copy_is_shown(run: Run) -> None:
    Path("kb").mkdir()
    before = answer("req-1", "first")
    other = replace(before.sources[0], chunk_id="0000000000000001", document="docs/other.md", start_line=7, end_line=7)
    variant = VariantReport((other.chunk_id, None, CHUNK, "00000000000000aa"), 40, 0.25, 0.6, 0.45, False, 0.012, 16)
    placed = SegmentReport("chunk", CHUNK, 15, "host", "placed", 3, variant)
    after = answer("req-2", "second")
    after = replace(after, reuse=replace(after.reuse, recompute_ratio=0.2, segments=(placed,)))
    remember(replace(before, sources=(other,)), after)

    lines = run("explain", "--kb", "kb").out.splitlines()

    assert lines[5].startswith("      15  host      placed                1. docs/keys.md:3-4")
    assert lines[5].endswith("(3 tokens recomputed)")
    assert lines[6].strip() == (
        "computed at position 40 after docs/other.md:7, a removed document, docs/keys.md:3-4, 00000000000000aa, "
        "overlap 0.25, impact 0.60, recompute 45%, not in focus, saves 12 ms"
    )


def test_unknown_request_id_exits_2(run: Run) -> None:
    Path("kb").mkdir()
    assert "the request log of kb is empty" in run("explain", "--kb", "kb").err
    remember(answer("req-1", "first"))
    result = run("explain", "req-9", "--kb", "kb")
    assert result.code == 2 and "req-9 is not in the request log of kb" in result.err


def test_damaged_request_log_is_an_error_with_a_remedy(run: Run) -> None:
    Path("kb").mkdir()
    (Path("kb") / TRACE_FILE).write_bytes(b"no database" * 100)
    result = run("explain", "--kb", "kb")
    assert result.code == 1 and "remove it" in result.err


def test_read_only_request_log_is_readable(run: Run, tmp_path: Path) -> None:
    Path("kb").mkdir()
    remember(answer("req-1", "first"))
    with read_only(tmp_path / "kb") as view:
        assert "about first?" in run("explain", "--kb", view).out
        assert [path.name for path in view.iterdir()] == [TRACE_FILE]


def test_locked_request_log_is_not_reported_as_damaged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_BUSY_TIMEOUT_S", 0.01)
    Path("kb").mkdir()
    remember(answer("req-1", "first"))
    with contextlib.closing(sqlite3.connect(Path("kb") / TRACE_FILE, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        held = run("explain", "--kb", "kb")
    assert held.code == 1 and "locked by another process" in held.err and "remove" not in held.err
    assert run("explain", "--kb", "kb").code == 0


def test_explain_creates_no_files(run: Run) -> None:
    Path("kb").mkdir()
    assert run("explain", "--kb", "kb").code == 2 and not list(Path("kb").iterdir())
    (Path("kb") / TRACE_FILE).touch()  # the process that created it was stopped
    assert "the request log of kb is empty" in run("explain", "--kb", "kb").err
    remember(answer("req-1", "first"))
    run("explain", "--kb", "kb")
    assert [path.name for path in Path("kb").iterdir()] == [TRACE_FILE], "SQLite's journal is removed"


def test_request_log_keeps_the_last_requests_only(run: Run) -> None:
    Path("kb").mkdir()
    remember(*(answer(f"req-{i}", str(i)) for i in range(7)), keep=3)
    assert run("explain", "req-4", "--kb", "kb").code == 0
    assert run("explain", "req-3", "--kb", "kb").code == 2
    assert b"about 3?" not in (Path("kb") / TRACE_FILE).read_bytes()


@pytest.mark.parametrize(("keep", "known"), [(0, set()), (1, {"req-3"})])
def test_smaller_keep_erases_older_requests_from_the_file(run: Run, keep: int, known: set[str]) -> None:
    Path("kb").mkdir()
    remember(*(answer(f"req-{i}", str(i) * 5000) for i in range(4)))
    with contextlib.closing(TraceLog(Path("kb") / TRACE_FILE, keep)) as log:
        log.trim()
        assert {request_id for request_id, _, _ in log.recent(9)} == known
        written = b"".join(path.read_bytes() for path in Path("kb").iterdir())
        assert b"1111" not in written and b"2222" not in written and (b"3333" in written) == bool(known)
    assert ("the request log of kb is empty" in run("explain", "--kb", "kb").err) == (not known)


def test_keep_0_writes_no_file(run: Run) -> None:
    Path("kb").mkdir()
    remember(answer("req-1", "first"), keep=0)
    TraceLog(Path("kb") / TRACE_FILE, keep=0).trim()
    assert not (Path("kb") / TRACE_FILE).exists()


def test_unwritable_request_log_raises_nothing(run: Run) -> None:
    log = TraceLog(Path("missing") / TRACE_FILE, 10)
    log.add("req-1", 0.0, {})
    log.add("req-2", 0.0, {})
    log.close()
    assert not Path("missing").exists() and log.recent(9) == []


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (
            SpeculationReport(SpeculationOutcome.RIGHT, 4, 2, 0.004, 0.012),
            "the model began 4 ms before the search ended (2 prompts started early); "
            "it pays off for searches of 12 ms or more",
        ),
        (
            SpeculationReport(SpeculationOutcome.WRONG, 4, 1),
            "1 prompt started early in vain: the search ended with other documents",
        ),
        (SpeculationReport(SpeculationOutcome.NONE, 4), "no prompt started early"),
        (SpeculationReport(SpeculationOutcome.PLAIN), "not tried for this question"),
    ],
)
def test_outcome_of_speculative_prefill_is_shown(run: Run, report: SpeculationReport, told: str) -> None:
    Path("kb").mkdir()
    remember(replace(answer("req-1", "first"), speculation=report))
    lines = run("explain", "--kb", "kb").out.splitlines()
    assert f"Overlap: {told}" in lines
    assert run("explain", "--kb", "kb", "--json").json["speculation"]["outcome"] == report.outcome


def test_proposed_tokens_are_shown(run: Run) -> None:
    Path("kb").mkdir()
    remember(answer("req-1", "first"))
    assert "Lookup" not in run("explain", "--kb", "kb").out
    remember(replace(answer("req-2", "second"), lookup=LookupCounts(1_200, 900)))
    assert "Lookup: 900 of 1,200 proposed tokens accepted" in run("explain", "--kb", "kb").out.splitlines()
    assert run("explain", "--kb", "kb", "--json").json["lookup"] == {"num_proposed": 1_200, "num_accepted": 900}


def test_engine_of_a_cluster_is_shown_with_the_prediction_and_its_predecessors(run: Run) -> None:
    Path("kb").mkdir()
    route = Route("engine-5a0c1f2e", 0.25, 310)
    remember(replace(answer("req-1", "first"), route=route))
    chosen = "Engine: engine-5a0c1f2e; chosen for a first token in 250 ms, with 310 tokens from kept KV"
    assert chosen in run("explain", "--kb", "kb").out.splitlines()
    moved = replace(route, num_migrations=2, is_resumed=True)
    remember(replace(answer("req-2", "second"), route=moved))
    told = f"{chosen}; after 2 engines that did not complete it, the last of which had begun the answer"
    assert told in run("explain", "req-2", "--kb", "kb").out.splitlines()


@pytest.mark.parametrize(
    ("num_failed", "told"), [(0, ""), (1, "; after 1 failed attempt"), (3, "; after 3 failed attempts")]
)
def test_server_of_a_remote_engine_is_shown_with_estimate_and_attempts(run: Run, num_failed: int, told: str) -> None:
    Path("kb").mkdir()
    remember(replace(answer("req-1", "first"), route=Route("engine-5a0c1f2e", None, 1310, num_migrations=num_failed)))
    line = f"Engine: engine-5a0c1f2e; believed to have about 1,310 tokens of the prompt cached{told}"
    assert line in run("explain", "--kb", "kb").out.splitlines()


def test_no_overlap_line_without_speculation(run: Run) -> None:
    Path("kb").mkdir()
    remember(answer("req-1", "first"))
    assert "Overlap" not in run("explain", "--kb", "kb").out
