"""Tests that the commands of a paper's reports run again, with real commands in a small checkout."""

import subprocess
from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.papers.page import Claim, report_command
from stillroom_bench.papers.repeat import Ended, Places, ReportRun, chosen_runs, in_order, run_all, run_report, runs_of
from tests.cli.harness import Run

POLICIES = "bench policies --requests 20 --top-k 1 --capacity 0.2 --repeat 2"
PAGE = """# Claims

## Cache-Craft

| claim | paper | ours | command | report | verdict |
|---|---|---|---|---|---|
| Hits | 2 times | {quoted} of PGDSF's | `stillroom bench policies` | [p](../benchmarks/p.md) | **reproduced** |
| Peers | 3 times | 0.5 | `stillroom bench reuse` | [q](../benchmarks/q.md) | **not comparable** |
| Nothing | | | | | **not done** |
"""
EMPTY = '{"arms": {}, "tables": {}, "environment": {"processor": "x", "num_threads": 1}%s}'


def made_checkout(folder: Path, quoted: str = "") -> Path:
    """Return a checkout whose page has a report that can be made again, and one that needs data and a peer."""
    (folder / "docs").mkdir(parents=True)
    (folder / "benchmarks").mkdir()
    (folder / "docs" / "papers.md").write_text(PAGE.format(quoted=quoted))
    (folder / "benchmarks" / "p.md").write_text(f"# t\n\n`stillroom {POLICIES} --quiet -o b/p.json` at commit `1`; x\n")
    line = "`stillroom bench reuse --dataset ../shared/data/nq --arm anywhere 30% --peer vllm=VLLM/python` at commit"
    (folder / "benchmarks" / "q.md").write_text(f"# t\n\n{line} `1`; x\n")
    (folder / "benchmarks" / "q.json").write_text(EMPTY % "")
    (folder / "benchmarks" / "p.json").write_text(EMPTY % ', "seconds": 120')
    return folder


def places(checkout: Path, **peers: str) -> Places:
    return Places(checkout, None, checkout / "work", checkout / "results", peers)


def claim(report: str) -> Claim:
    return Claim("", "", "", "", f"[x](../benchmarks/{report}.md)", "")


def endless(checkout: Path, number: str = "1") -> ReportRun:
    arguments = ("bench", "policies", "--repeat", "1000", "--output", str(checkout / "results" / f"{number}.json"))
    return ReportRun(number, arguments, (), (), None, checkout / "results" / f"{number}.json")


def test_words_after_a_flag_are_one_value(tmp_path: Path) -> None:
    words = report_command(made_checkout(tmp_path / "c") / "benchmarks" / "q.md")

    assert words == [
        *("bench", "reuse", "--dataset", "../shared/data/nq", "--arm", "anywhere 30%", "--peer", "vllm=VLLM/python"),
    ]


def test_what_is_missing_is_named_and_a_peer_is_left_out(tmp_path: Path) -> None:
    checkout = made_checkout(tmp_path / "c")

    (run,) = runs_of([claim("q"), claim("q")], places(checkout))
    assert run.missing == ("data (--data DIR)",) and run.without == ("vllm",) and "--peer" not in run.arguments

    (run,) = runs_of([claim("q")], places(checkout, vllm="here/python"))
    assert not run.without and "vllm=here/python" in run.arguments
    with pytest.raises(UsageError, match="links to a report z; it has q"):
        chosen_runs([run], ["z"])


def test_a_missing_file_of_questions_is_named_with_its_command(tmp_path: Path) -> None:
    checkout = made_checkout(tmp_path / "c")
    report = checkout / "benchmarks" / "q.md"
    work = places(checkout).work_dir
    made = f"{work}/split.jsonl (python -m training microworld split-questions --out {work}/split.jsonl)"
    lost = f"{work}/microworld.jsonl, which was not kept and cannot be made again"
    for name, expected in {"split": (made,), "microworld": (lost,), "other": (f"{work}/other.jsonl",)}.items():
        report.write_text(f"# t\n\n`stillroom bench quality --questions WORK/{name}.jsonl` at commit `1`; x\n")
        (run,) = runs_of([claim("q")], places(checkout))
        assert run.missing == expected

    work.mkdir()
    (work / "other.jsonl").touch()
    (run,) = runs_of([claim("q")], places(checkout))
    assert not run.missing and str(work / "other.jsonl") in run.arguments


def test_only_what_fits_the_time_is_started(tmp_path: Path) -> None:
    checkout = made_checkout(tmp_path / "c")
    said, ended = list[str](), dict[str, Ended]()

    runs = runs_of([claim("q"), claim("p")], places(checkout))
    run_all(runs, places(checkout), 1.5, said.append, ended, lambda: 0.0)

    assert said == ["p: not started; about 2 minutes, and 1.5 are left"] and not ended


def test_known_durations_come_first_and_short_ones_before_long_ones(tmp_path: Path) -> None:
    def made(name: str, minutes: float | None, sampled: float) -> ReportRun:
        return ReportRun(name, (), (), (), minutes, tmp_path / f"{name}.json", sampled)

    (tmp_path / "done.json").write_text(EMPTY % "")
    runs = [made("d", None, 9), made("c", None, 2), made("b", 7, 0), made("a", 2, 50), made("done", 1, 1)]

    assert [run.name for run in in_order(runs)] == ["a", "b", "c", "d"]


def test_a_command_of_unknown_duration_is_stopped_with_its_workers_and_leaves_no_result(tmp_path: Path) -> None:
    checkout = made_checkout(tmp_path / "c")

    ended = run_report(endless(checkout), places(checkout), 0.2)

    assert ended.status == "stopped" and not list((checkout / "results").glob("*.json"))


def test_ctrl_c_keeps_what_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = made_checkout(tmp_path / "c")
    started = list[subprocess.Popen[bytes]]()

    class Interrupted(subprocess.Popen[bytes]):
        """A real process; Ctrl-C comes while the caller waits for it the first time."""

        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    finished = checkout / "results" / "0.json"
    finished.parent.mkdir()
    finished.write_text(EMPTY % "")
    ended: dict[str, Ended] = {}
    with pytest.raises(KeyboardInterrupt):
        run_all([endless(checkout, "0"), endless(checkout)], places(checkout), None, lambda _: None, ended)

    assert started[0].poll() is not None and finished.exists() and not ended


def test_rows_are_measured_again_once_and_compared(run: Run, tmp_path: Path) -> None:
    checkout = tmp_path / "c"
    first = run(*POLICIES.split(), "--output", tmp_path / "p.json", "--json", "--quiet").json
    quoted = next(
        f"{one['value']:.3g} [{one['low']:.3g}, {one['high']:.3g}]"
        for arm in first["arms"].values()
        if (one := arm["token_hit_rate"]["ratio_to_baseline"]) is not None
    )
    made_checkout(checkout, quoted)
    (checkout / "benchmarks" / "p.json").write_text((tmp_path / "p.json").read_text())
    flags = ("bench", "papers", "--paper", "cache-craft", "--checkout", checkout, "--results", tmp_path / "r")

    listed = run(*flags, "--list")
    assert listed.code == 0 and "p: not run yet, about " in listed.out and "q: needs data (--data DIR)" in listed.out

    done = run(*flags, "--json")
    assert done.code == 0 and "p: running" in "".join(done.err)
    row = done.json["rows"][0]
    assert [number["verdict"] for number in row["numbers"]] == ["agrees"]
    assert row["numbers"][0]["committed"] == row["numbers"][0]["now"] == quoted

    again = run(*flags)
    assert again.err == ""  # nothing runs twice
    assert f"committed {quoted}, now {quoted}: agrees" in again.out and "q: needs data" in again.out


@pytest.mark.slow
def test_a_failed_command_is_said_with_its_log(run: Run, tmp_path: Path) -> None:
    checkout = made_checkout(tmp_path / "c")
    line = f"`stillroom {POLICIES} --data ../shared/data` at commit `1`"
    (checkout / "benchmarks" / "p.md").write_text(f"# t\n\n{line}\n")
    (tmp_path / "data").mkdir()

    result = run(
        *("bench", "papers", "--paper", "cache-craft", "--checkout", checkout, "--data", tmp_path / "data"),
        *("--results", tmp_path / "r", "--report", "p"),
    )

    assert result.code == 1 and f"failed exit code 2; see {tmp_path / 'r' / 'p.log'}" in result.out
    assert "traces" in (tmp_path / "r" / "p.log").read_text()


def test_outside_of_a_checkout_the_error_says_what_to_do(run: Run, tmp_path: Path) -> None:
    result = run("bench", "papers", "--paper", "llmds", "--checkout", tmp_path)

    assert result.code == 2 and "has no docs/papers.md; run this in a checkout" in result.err
