"""Crash tests: documents in two versions, a worker to kill, and the checks after each kill."""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import folders
from tests.crash import oracle
from tests.retrieval.test_migration import make_old

HERE = Path(__file__).parent
NUM_FILES = 30
CASES = ("add", "remove", "rebuild", "migrate", "repair", "reembed", "update")

Said = dict[str, Any]

_OF_READERS = (".scratch-", ".list_heat.", ".managed.json", ".tantivy-", ".lock")
"""Hidden files that may stay after a crash."""


def build_faults(folder: Path) -> Path | None:
    """Build the library of `faults.c`; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    target = folder / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, HERE / "faults.c", "-ldl"], check=True)
    return target


class Worker:
    """A process that runs `worker.py`."""

    def __init__(self, faults: Path | None) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        if faults is not None:
            environment["LD_PRELOAD"] = str(faults)
        command = [sys.executable, "-m", "tests.crash.worker"]
        root = HERE.parents[1]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=root, text=True
        )

    def start(self, job: str, **settings: Any) -> None:
        """Start a job without waiting for it."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"job": job, **settings}) + "\n")
        self._process.stdin.flush()

    def finish(self) -> Said:
        """Wait for the job, and return how it ended."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the worker has ended"
        ended: Said = json.loads(line)
        return ended

    def run(self, job: str, **settings: Any) -> Said:
        self.start(job, **settings)
        return self.finish()

    def close(self) -> None:
        self._process.communicate(timeout=60)


def last(ended: Said, name: str, default: Any = None) -> Any:
    """Return the last value that a job reported under a name."""
    return next((one[name] for one in reversed(ended["said"]) if name in one), default)


def check_done(ended: Said) -> None:
    assert last(ended, "error") is None, last(ended, "message")
    assert ended["signal"] == 0 and last(ended, "done")


def word(number: int, version: int) -> str:
    """Return a word that occurs only in this file and version."""
    return f"zq{'abcdefghij'[number // 10]}{'abcdefghij'[number % 10]}{'klmnopqrst'[version]}x"


def write_docs(folder: Path, version: int) -> None:
    """Version 1 has files 0 to 29; version 2 lacks some of them, has others edited, and some new."""
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(NUM_FILES + 4 if version == 2 else NUM_FILES):
        if version == 2 and number % 7 == 3:
            continue
        says = version if number % 3 == 0 or number >= NUM_FILES else 1
        path = folder / ("old" if number % 4 == 0 else "new") / f"file{number:02}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        sections = "".join(
            f"## Part {part}\n\nThe {word(number, says if part == 1 else 1)} of part {part} weighs {number} stones.\n\n"
            for part in range(4)
        )
        path.write_text(f"# File {number}\n\n{sections}", encoding="utf-8")
    lines = [
        {
            "_id": f"r{number}",
            "title": f"Record {number}",
            "text": f"Record {number} says {word(90 + number, version)}.",
        }
        for number in range(6)
    ]
    (folder / "records").mkdir()
    (folder / "records" / "records.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )


@dataclass
class CrashCase:
    """A command on a knowledge base, with the documents before and after it."""

    name: str
    kind: str
    job: str
    settings: dict[str, Any]
    template: Path | None
    """The knowledge base before the command; None if it is created."""
    before: oracle.Documents
    after: oracle.Documents
    files: list[str]
    """In the order in which they are read."""
    num_operations: int = 0
    seconds: float = 0.0


class CrashFixture:
    """Worker, documents and knowledge bases of crash tests, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.docs = folder / "docs"
        self.faults = build_faults(folder)
        self.worker = Worker(self.faults)
        self._count = 0

    def close(self) -> None:
        self.worker.close()

    def copy_of(self, template: Path | None) -> Path:
        """Copy the template for one run."""
        self._count += 1
        kb = self.folder / f"case{self._count}" / "kb"
        kb.parent.mkdir()
        if template is not None:
            shutil.copytree(template, kb)
        return kb

    def _copy(self, template: Path, name: str) -> Path:
        kb = self.folder / name / "kb"
        shutil.rmtree(kb.parent, ignore_errors=True)
        shutil.copytree(template, kb)
        return kb

    def drop(self, kb: Path) -> None:
        folders.remove(kb.parent)

    def cases(self, kind: str, names: tuple[str, ...] = CASES) -> Iterator[CrashCase]:
        """Yield the cases in turn. The documents on disk fit the current case only."""
        write_docs(self.docs, 1)
        first = self.folder / f"template-{kind}" / "kb"
        shutil.rmtree(first.parent, ignore_errors=True)
        first.parent.mkdir()
        check_done(self.worker.run("add", kb=str(first), kind=kind, docs=str(self.docs)))
        one = oracle.documents(first)
        oracle.check_projections(first)
        files = sorted(str(path) for path in self.docs.rglob("*") if path.is_file())
        docs = {"docs": str(self.docs)}
        if "add" in names:
            yield self._measured(CrashCase("add", kind, "add", docs, None, {}, one, files))
        if "remove" in names:
            gone = str(self.docs / "old")
            left = {name: about for name, about in one.items() if not name.startswith(gone + os.sep)}
            yield self._measured(CrashCase("remove", kind, "remove", {"target": gone}, first, one, left, []))
        if "rebuild" in names:
            bare = self._copy(first, f"bare-{kind}")
            clear_indexes(bare)
            yield self._measured(CrashCase("rebuild", kind, "search", {"queries": [word(1, 1)]}, bare, one, one, []))
        if "migrate" in names:
            old = self._copy(first, f"old-{kind}")
            make_old(old)
            yield self._measured(CrashCase("migrate", kind, "search", {"queries": [word(1, 1)]}, old, one, one, []))
        if "repair" in names:
            broken = self._copy(first, f"broken-{kind}")
            damage(broken)
            yield self._measured(CrashCase("repair", kind, "repair", {}, broken, oracle.documents(broken), {}, []))
        if "reembed" in names:
            yield self._measured(CrashCase("reembed", kind, "reembed", {}, first, one, {}, []))
        if "update" in names:
            write_docs(self.docs, 2)
            files = sorted(str(path) for path in self.docs.rglob("*") if path.is_file())
            yield self._measured(CrashCase("update", kind, "add", docs, first, one, {}, files))

    def _measured(self, case: CrashCase) -> CrashCase:
        """Run the case undisturbed; record its result, its number of file operations and its time."""
        kb = self.copy_of(case.template)
        fault = {"fault": ["count", 0]} if self.faults else {}
        ended = self.worker.run(case.job, kb=str(kb), kind=case.kind, **case.settings, **fault)
        check_done(ended)
        oracle.check_projections(kb)
        case.after = case.after or oracle.documents(kb)
        assert oracle.documents(kb) == case.after
        case.num_operations, case.seconds = last(ended, "num_operations", 0), ended["seconds"]
        self.drop(kb)
        return case

    def run_disturbed(self, case: CrashCase, how: dict[str, Any]) -> Said:
        """Run the case with a disturbance, and check the result. Return how the job ended."""
        kb = self.copy_of(case.template)
        ended = self.worker.run(case.job, kb=str(kb), kind=case.kind, **case.settings, **how)
        self.check_after(case, kb, ended)
        self.drop(kb)
        return ended

    def check_after(self, case: CrashCase, kb: Path, ended: Said, mend: Callable[[], object] = lambda: None) -> None:
        """Check the result of a disturbed run.

        Args:
            mend: repairs the disk before the check.
        """
        assert last(ended, "error") != "unexpected", last(ended, "message")
        mend()
        check_whole(case, oracle.documents(kb), ended)
        if case.job == "reembed":
            assert oracle.documents(kb) in (case.before, case.after), "vectors of two models are mixed"
        if (kb / "manifest.json").exists():
            self._check_reopened(case, kb)
        self._check_completed(case, kb)

    def _check_reopened(self, case: CrashCase, kb: Path) -> None:
        """Check that the first search finds exactly the documents, and updates vectors and postings."""
        found = oracle.documents(kb)
        queries = [chunks[0][2] for *_, chunks in list(found.values())[:3]]
        reopened = self.worker.run("search", kb=str(kb), kind=case.kind, queries=queries or ["nothing"])
        check_done(reopened)
        for query, said in zip(queries, (one["found"] for one in reopened["said"] if "found" in one), strict=False):
            for mode, results in said.items():
                assert query in [text for _, text in results], (mode, query, results)
        assert oracle.documents(kb) == found
        oracle.check_projections(kb)

    def _check_completed(self, case: CrashCase, kb: Path) -> None:
        """Check that the same command completes the work."""
        again = self.worker.run(case.job, kb=str(kb), kind=case.kind, **case.settings)
        if case.job != "remove" or last(again, "error") != "UnknownDocumentError":  # all of it was done already
            check_done(again)
        assert oracle.documents(kb) == case.after
        oracle.check_projections(kb)
        hidden = [*kb.glob(".*"), *kb.glob("sparse/.*")]
        left = [path.name for path in hidden if not path.name.startswith(_OF_READERS)]
        assert not left, "half-written files remain"


def check_whole(case: CrashCase, found: oracle.Documents, ended: Said) -> None:
    """Check that every document is as before or as after, and that acknowledged ones are as after."""
    for name in {*found, *case.before, *case.after}:
        assert found.get(name) in (case.before.get(name), case.after.get(name)), f"{name} is half there"
    acknowledged = set(case.files[: last(ended, "num_files", 0)]) if case.job == "add" else set()
    for name in {*found, *case.before, *case.after}:
        path = name.partition("#")[0]
        if last(ended, "done") or path in acknowledged:
            assert found.get(name) == case.after.get(name), f"{name} was acknowledged"


def damage(kb: Path) -> None:
    """Change one text, and remove vectors and postings."""
    with sqlite3.connect(kb / "corpus.sqlite3") as database:
        last_one = "(SELECT chunk_id FROM chunks ORDER BY document_id DESC LIMIT 1)"
        database.execute(f"UPDATE chunks SET text = 'something else' WHERE chunk_id = {last_one}")
    database.close()
    clear_indexes(kb)


def clear_indexes(kb: Path) -> None:
    for path in (kb / "sparse", kb / "qdrant", *kb.glob("dense.*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def spread(count: int, total: int, rng: random.Random) -> list[int]:
    """Return `count` numbers from 1 to `total`, one in each of `count` equal parts."""
    return [1 + int((number + rng.random()) * total / count) for number in range(count)]
