"""One writer and many readers in separate processes: readers see whole documents and the last commit."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillroom.cli import main
from stillroom.core.clock import SystemClock
from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.store.folder import WriteLock
from tests.crash import oracle
from tests.crash.fixture import CrashFixture, Worker, check_done, last, word, write_docs
from tests.server.harness import serving
from tests.server.knowledge import write_knowledge

PROGRAM = [sys.executable, "-m", "stillroom.cli.main"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def readers() -> Iterator[list[Worker]]:
    found = [Worker(None), Worker(None)]
    yield found
    for one in found:
        one.close()


@pytest.mark.parametrize(
    "kind", ["flat", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("hnsw", "ivf_pq", "tiered"))]
)
def test_readers_see_whole_documents_during_writes(
    crash: CrashFixture, readers: list[Worker], tmp_path: Path, kind: str
) -> None:
    kb, done, docs = tmp_path / "kb", tmp_path / "done", crash.docs
    write_docs(docs, 1)
    write = {"kb": str(kb), "kind": kind}
    check_done(crash.worker.run("add", docs=str(docs), **write))
    states = [oracle.documents(kb)]
    edited, gone, same = (word(6, 1), word(6, 2)), word(4, 1), word(1, 1)
    for reader in readers:
        reader.start("watch", kb=str(kb), kind=kind, queries=[same, *edited, gone], until=str(done))
    try:
        for version, target in ((2, "old"), (1, "records"), (2, "")):
            write_docs(docs, version)
            check_done(crash.worker.run("add", docs=str(docs), **write))
            states.append(oracle.documents(kb))
            if target:
                check_done(crash.worker.run("remove", target=str(docs / target), **write))
                states.append(oracle.documents(kb))
    finally:
        done.touch()  # ends the readers
    texts = {(name, row[2]) for state in states for name, (*_, chunks) in state.items() for row in chunks}
    final = {(name, row[2]) for name, (*_, chunks) in states[-1].items() for row in chunks}
    for reader in readers:
        ended = reader.finish()
        check_done(ended)
        said = [one for one in ended["said"] if "query" in one]
        assert len(said) > 12
        for one in said:
            results = [tuple(result) for result in one["found"]]
            assert set(results) <= texts and len(results) == len(set(results)), one
            if one["query"] == same and one["mode"] == "sparse":
                assert any(same in text for _, text in results), "it never changed"
            if one["is_last"]:
                assert set(results) <= final
        shown = {one["query"]: str(one["found"]) for one in said[-4:]}
        assert edited[1] in shown[edited[1]] and edited[0] in shown[edited[0]], "parts 0, 2 and 3 are unchanged"
        assert gone in shown[gone] and same in shown[same]


def test_second_writer_is_told_which_process_writes(crash: CrashFixture, tmp_path: Path) -> None:
    write_docs(crash.docs, 1)
    job: dict[str, Any] = {"kb": str(tmp_path / "kb"), "kind": "flat", "docs": str(crash.docs)}
    check_done(crash.worker.run("add", **job))
    write_docs(crash.docs, 2)
    with WriteLock(tmp_path / "kb", SystemClock()).held("add"):
        refused = crash.worker.run("add", **job)
        check_done(crash.worker.run("search", **job, queries=[word(1, 1)]))
    assert last(refused, "error") == "KnowledgeBaseBusyError"
    told = rf"^another process is writing to \S+: process {os.getpid()} on \S+ \(add, since [\d:]+\)"
    assert re.search(told, last(refused, "message"))
    check_done(crash.worker.run("add", **job))


def test_two_processes_creating_one_knowledge_base_create_it_once(
    crash: CrashFixture, readers: list[Worker], tmp_path: Path
) -> None:
    write_docs(crash.docs, 1)
    job: dict[str, Any] = {"kb": str(tmp_path / "kb"), "kind": "flat", "docs": str(crash.docs)}
    for one in readers:
        one.start("add", **job)
    ended = [one.finish() for one in readers]
    errors = [last(one, "error") for one in ended]
    assert errors.count(None) >= 1 and set(errors) <= {None, "KnowledgeBaseBusyError"}
    check_done(crash.worker.run("add", **job))
    assert len(oracle.documents(tmp_path / "kb")) == 36
    oracle.check_projections(tmp_path / "kb")


def test_running_server_sees_changes_of_the_command_line(tmp_path: Path) -> None:
    docs, kb = write_knowledge(tmp_path / "docs"), tmp_path / "kb"

    def run(*args: object) -> None:
        assert main.run([*map(str, args), "--kb", str(kb), "--quiet"]) == 0

    run("add", docs)
    with Stillroom.open(kb) as stillroom, serving(stillroom) as url:

        def found() -> str:
            body = {"query": "lighthouse of Perint", "mode": "sparse", "top_k": 1}
            reply = httpx.post(f"{url}/v1/search", json=body, timeout=60)
            return Path(reply.json()["results"][0]["document"]).name

        assert found() == "people.md"
        (docs / "new.md").write_text("# Lights\n\nThe lighthouse of Perint is painted red.\n")
        run("add", docs)
        assert found() == "new.md"
        run("remove", docs / "new.md")
        assert found() == "people.md"


@pytest.mark.slow
def test_server_process_sees_changes_of_command_processes(tmp_path: Path) -> None:
    docs, kb = write_knowledge(tmp_path / "docs"), tmp_path / "kb"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))

    def run(*args: object) -> None:
        command = [*PROGRAM, *map(str, args), "--kb", str(kb), "--quiet"]
        subprocess.run(command, check=True, cwd=ROOT, env=environment)

    run("add", docs)
    serve = [*PROGRAM, "serve", "--kb", str(kb), "--port", "0", "--json"]
    with subprocess.Popen(
        serve, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert server.stdout
            url = json.loads(server.stdout.readline())["url"]

            def found(mode: str) -> list[str]:
                body = {"query": "lighthouse of Perint", "mode": mode, "top_k": 1}
                reply = httpx.post(f"{url}/v1/search", json=body, timeout=60)
                reply.raise_for_status()
                return [Path(one["document"]).name for one in reply.json()["results"]]

            assert "new.md" not in found("hybrid")
            (docs / "new.md").write_text("# Lights\n\nThe lighthouse of Perint is painted red.\n")
            run("add", docs)
            assert [found(mode) for mode in ("hybrid", "dense", "sparse")] == [["new.md"]] * 3
            run("remove", docs / "new.md")
            assert all("new.md" not in found(mode) for mode in ("hybrid", "dense", "sparse"))
            run("add", docs)
            assert found("hybrid") == ["new.md"]
        finally:
            server.terminate()
