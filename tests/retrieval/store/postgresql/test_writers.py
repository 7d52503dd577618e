"""Several processes write to one knowledge base in PostgreSQL; one is killed."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stillroom.core.ids import DocumentId
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from tests.retrieval.store.corpus_model import stored
from tests.retrieval.store.postgresql.shared_machines import Open, corpus_of, rows_of
from tests.retrieval.store.test_any_corpus import open_postgres

pytestmark = pytest.mark.postgres


def test_commits_of_two_machines_follow_each_other(database: str, tmp_path: Path) -> None:
    """Each commit has a document of its own, whose generation tells the order; the last one decides each other one."""
    machines = [open_postgres(tmp_path / name, database, "kb") for name in "ab"]
    names = [f"/d{number}.md" for number in range(6)]
    commits: list[tuple[str, dict[str, str | None]]] = []

    def write(number: int) -> None:
        chance = random.Random(number)
        for step in range(12):
            mark = f"/mark-{number}-{step}.md"
            chosen = {name: chance.choice((None, "one", "two", "three")) for name in chance.sample(names, 3)}
            put = [stored(name, (text, mark), mark, "legal", 1) for name, text in chosen.items() if text]
            gone = [DocumentId(name) for name, text in chosen.items() if not text]
            machines[number].commit([*put, stored(mark, ("one",), mark, "legal", 1)], gone)
            commits.append((mark, {name: text and mark for name, text in chosen.items()}))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for machine in machines:
        machine.refresh()
        with machine.reading() as connection:
            order = dict(connection.execute("SELECT title, generation FROM documents WHERE document_id LIKE '/mark%'"))
        assert sorted(order.values()) == list(range(1, 25)), "each commit has a generation of its own"
        expected: dict[str, str] = {mark: mark for mark, _ in commits}
        for _, changes in sorted(commits, key=lambda commit: order[commit[0]]):
            for name, mark in changes.items():
                if mark:
                    expected[name] = mark
                else:
                    expected.pop(name, None)
        assert {info.document_id: info.title for info in machine.documents()} == expected
        assert machine.num_chunks == sum(2 if name in names else 1 for name in expected)
    assert rows_of(machines[0]) == rows_of(machines[1])
    for machine in machines:
        machine.close()


def test_file_is_whole_though_another_machine_removed_a_record_of_it_meanwhile(
    open_on: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal comes between the reading of the file's records and their commit: as if it had come before."""
    path = docs / "records.jsonl"
    records = [{"_id": str(number), "text": f"Record of number {number}."} for number in range(3)]
    path.write_text("\n".join(map(json.dumps, records)))
    a, b = open_on("a", create=True), open_on("b")
    a.add([path])
    corpus_of(b).refresh()
    path.write_text("\n".join(map(json.dumps, [*records, {"_id": "3", "text": "A new one."}])))
    commit, turns = PostgresCorpus.commit, itertools.count()

    def after_a_removal(self: PostgresCorpus, *args: Any, **options: Any) -> Any:
        if self is a.corpus and next(turns) == 0:
            b.remove([f"{path}#1"])
        return commit(self, *args, **options)

    monkeypatch.setattr(PostgresCorpus, "commit", after_a_removal)
    report = a.add([path])
    assert (report.num_added, report.failures) == (1, ())
    assert a.num_documents == 4
    assert a.corpus.sources()[str(path)].size == path.stat().st_size
    assert a.add([path]).num_unchanged == 4


_KILLED = """
import sys, time
from pathlib import Path
from stillroom.retrieval.store.postgresql.committer import Committer
from tests.crash.worker import SmallEmbedder
from tests.retrieval.store.corpus_model import stored
from tests.retrieval.store.test_any_corpus import open_postgres

finish = Committer.finish
def hang(self):
    finish(self)
    print("all but committed", flush=True)
    time.sleep(600)
Committer.finish = hang
open_postgres(Path(sys.argv[1]), sys.argv[2], "kb").commit([stored("/a.md", ("new", "text"), "T", "legal", 1)])
"""


def test_killed_commit_leaves_nothing_and_holds_up_no_other(database: str, tmp_path: Path) -> None:
    a = open_postgres(tmp_path / "a", database, "kb")
    a.commit([stored("/a.md", ("old",), "T", "legal", 1)])
    before = rows_of(a)
    (tmp_path / "b").mkdir()
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "b"), database]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"all but committed\n"
        process.send_signal(signal.SIGKILL)
    a.refresh()
    assert rows_of(a) == before
    a.commit([stored("/b.md", ("one",), "T", "legal", 1)])
    b = open_postgres(tmp_path / "b", database, "kb")
    assert rows_of(a) == rows_of(b)
    a.close()
    b.close()
