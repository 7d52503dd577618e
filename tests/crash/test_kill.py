"""Kills and full disks at any moment: documents stay whole, acknowledged ones stay, and a repeat completes the work.

Moments are file operations, counted in SQLite, tantivy and Python (`faults.c`), and random times.
`CrashFixture.run_disturbed` checks the files afterwards.
"""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash import oracle
from tests.crash.fixture import CASES, CrashCase, CrashFixture, last, spread, write_docs

KINDS = ("flat", "hnsw", "ivf_pq", "tiered", "qdrant")
SEED = 20261122


@pytest.fixture
def faulty(crash: CrashFixture) -> CrashFixture:
    if crash.faults is None:
        pytest.skip("needs a C compiler and Linux, to count operations on files")
    return crash


def kill_everywhere(crash: CrashFixture, kind: str, num_kills: int, num_faults: int, rng: random.Random) -> int:
    """Run every case of one kind with kills and full or failing disks; return how many kills hit the job."""
    num_struck = 0
    for case_number, case in enumerate(crash.cases(kind)):
        for at in spread(num_kills, case.num_operations, rng):
            num_struck += crash.run_disturbed(case, {"fault": ["kill", at]})["signal"] == 9
        for number, at in enumerate(spread(num_faults, case.num_operations, rng), case_number):
            ended = crash.run_disturbed(case, {"fault": [("full", "failing")[number % 2], at]})
            assert last(ended, "done") or last(ended, "message")
    return num_struck


def test_kills_and_full_disks_leave_whole_documents(faulty: CrashFixture) -> None:
    assert kill_everywhere(faulty, "flat", 1, 1, random.Random(SEED)) >= 5, "threads vary the number of operations"


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:3]), *KINDS[3:]])
def test_kill_during_an_index_update_of_each_kind(faulty: CrashFixture, kind: str) -> None:
    (case,) = faulty.cases(kind, ("update",))
    middle = case.num_operations // 2
    assert faulty.run_disturbed(case, {"fault": ["kill", middle]})["signal"] == 9


def test_kills_and_full_disks_while_the_embedder_is_changed(faulty: CrashFixture) -> None:
    (case,) = faulty.cases("flat", ("reembed",))
    rng = random.Random(f"{SEED} embedder")
    struck = [faulty.run_disturbed(case, {"fault": ["kill", at]}) for at in spread(4, case.num_operations, rng)]
    assert all(ended["signal"] == 9 for ended in struck)
    for at in spread(2, case.num_operations // 2, rng):
        ended = faulty.run_disturbed(case, {"fault": ["full", at]})
        assert last(ended, "error") == "StorageError" and "the same command again" in last(ended, "message")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kills_and_failing_disks_at_every_part_of_the_work(faulty: CrashFixture, kind: str) -> None:
    """245 kills and 105 disks over all kinds."""
    num_struck = kill_everywhere(faulty, kind, 7, 3, random.Random(f"{SEED} {kind}"))
    assert num_struck >= 7 * len(CASES) - 4, "threads vary the number of operations"


@pytest.mark.parametrize(
    ("kind", "num_kills"), [("flat", 1), *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in KINDS)]
)
def test_kills_at_random_times(crash: CrashFixture, kind: str, num_kills: int) -> None:
    rng = random.Random(f"{SEED} {kind} times")
    for case in crash.cases(kind):
        for _ in range(num_kills):
            crash.run_disturbed(case, {"kill_after_s": rng.random() * 1.2 * case.seconds})


def first_case(crash: CrashFixture, name: str) -> CrashCase:
    return next(crash.cases("flat", (name,)))


@pytest.mark.parametrize("max_file_bytes", [pytest.param(30_000, marks=pytest.mark.slow), 80_000])
def test_file_size_limit_ends_with_a_storage_error(crash: CrashFixture, max_file_bytes: int) -> None:
    case = first_case(crash, "add")
    ended = crash.run_disturbed(case, {"max_file_bytes": max_file_bytes})
    assert last(ended, "error") == "StorageError"
    assert "the same command again" in last(ended, "message")


@pytest.mark.parametrize(
    "kilobytes", [150, *(pytest.param(size, marks=pytest.mark.slow) for size in (40, 300, 450, 700))]
)
def test_full_disk_leaves_whole_documents(crash: CrashFixture, tmp_path: Path, kilobytes: int) -> None:
    case = first_case(crash, "add")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={kilobytes}k"
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk]).returncode:
        pytest.skip("may not mount a small disk")
    try:
        kb = disk / "kb"
        ended = crash.worker.run("add", kb=str(kb), kind="flat", **case.settings)
        assert last(ended, "error") in ("StorageError", "KnowledgeBaseError"), ended["said"]
        crash.check_after(case, kb, ended, lambda: subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True))
    finally:
        # at once from our view; for good when the last process of the worker is gone
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
def test_killed_add_command_with_the_real_embedder_resumes(tmp_path: Path) -> None:
    docs, rng = tmp_path / "docs", random.Random(SEED)
    write_docs(docs, 1)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))

    def start(kb: Path) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "stillroom.cli.main", "add", str(docs), "--kb", str(kb), "--quiet"]
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2])

    began = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    seconds, whole = time.monotonic() - began, oracle.documents(tmp_path / "whole")
    for number in range(4):
        kb = tmp_path / f"kb{number}"
        process = start(kb)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds * (0.5 + 0.5 * rng.random()))
        process.kill()
        process.wait()
        found = oracle.documents(kb)
        assert found.items() <= whole.items()
        assert start(kb).wait() == 0
        assert oracle.documents(kb) == whole
        oracle.check_projections(kb)
