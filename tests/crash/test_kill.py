"""Killed at any moment, or out of disk: documents are there or not, what was acknowledged stays, a repeat completes it.

The moments are operations on files, counted in SQLite, tantivy and Python alike (`faults.c`); and random times. What
holds afterwards is checked by `House.strike`, against the files themselves.
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
from tests.crash.house import SCENES, House, Scene, last, spread, write_docs

KINDS = ("flat", "hnsw", "ivf_pq", "tiered", "qdrant")
SEED = 20261122


@pytest.fixture
def faulty(house: House) -> House:
    if house.faults is None:
        pytest.skip("needs a C compiler and Linux, to count operations on files")
    return house


def kill_everywhere(house: House, kind: str, num_kills: int, num_faults: int, rng: random.Random) -> int:
    """In every scene of one kind: so many kills, and so many full or failing disks. Returns how many kills struck."""
    num_struck = 0
    for number_of_scene, scene in enumerate(house.scenes(kind)):
        for at in spread(num_kills, scene.num_operations, rng):
            num_struck += house.strike(scene, {"fault": ["kill", at]})["signal"] == 9
        for number, at in enumerate(spread(num_faults, scene.num_operations, rng), number_of_scene):
            ended = house.strike(scene, {"fault": [("full", "failing")[number % 2], at]})
            assert last(ended, "done") or last(ended, "message")
    return num_struck


def test_a_dozen_kills_and_some_full_disks(faulty: House) -> None:
    assert kill_everywhere(faulty, "flat", 2, 1, random.Random(SEED)) >= 11, "threads may do some operations less"


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_kill_while_an_index_of_each_kind_is_brought_up_to_date(faulty: House, kind: str) -> None:
    (scene,) = faulty.scenes(kind, ("update",))
    middle = scene.num_operations // 2
    assert faulty.strike(scene, {"fault": ["kill", middle]})["signal"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kills_at_every_part_of_the_work_and_disks_that_fail(faulty: House, kind: str) -> None:
    """In all 210 kills and 90 disks."""
    num_struck = kill_everywhere(faulty, kind, 7, 3, random.Random(f"{SEED} {kind}"))
    assert num_struck >= 7 * len(SCENES) - 4, "threads may do some operations more, or less"


@pytest.mark.parametrize(
    ("kind", "num_kills"), [("flat", 1), *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in KINDS)]
)
def test_kills_at_random_times(house: House, kind: str, num_kills: int) -> None:
    rng = random.Random(f"{SEED} {kind} times")
    for scene in house.scenes(kind):
        for _ in range(num_kills):
            house.strike(scene, {"kill_after_s": rng.random() * 1.2 * scene.seconds})


def first_scene(house: House, name: str) -> Scene:
    return next(house.scenes("flat", (name,)))


@pytest.mark.parametrize("max_file_bytes", [30_000, 80_000])
def test_files_that_cannot_grow_further(house: House, max_file_bytes: int) -> None:
    scene = first_scene(house, "add")
    ended = house.strike(scene, {"max_file_bytes": max_file_bytes})
    assert last(ended, "error") == "StorageError"
    assert "the same command again" in last(ended, "message")


@pytest.mark.parametrize(
    "kilobytes", [150, *(pytest.param(size, marks=pytest.mark.slow) for size in (40, 300, 450, 700))]
)
def test_a_disk_that_is_really_full(house: House, tmp_path: Path, kilobytes: int) -> None:
    scene = first_scene(house, "add")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={kilobytes}k"
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk]).returncode:
        pytest.skip("may not mount a small disk")
    try:
        kb = disk / "kb"
        ended = house.worker.run("add", kb=str(kb), kind="flat", **scene.settings)
        assert last(ended, "error") in ("StorageError", "KnowledgeBaseError"), ended["said"]
        house.check_after(
            scene, kb, ended, lambda: subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True)
        )
    finally:
        # at once from our view; for good when the last process of the worker is gone
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
def test_the_command_itself_killed_with_the_real_embedder(tmp_path: Path) -> None:
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
