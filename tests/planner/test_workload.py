"""Questions from files, the request log and chunks, and the requests drawn from them."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import UsageError
from stillroom.planner.workload import QuestionCounts, questions_of, read_questions, workload
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.trace import TRACE_FILE, TraceLog


def test_questions_are_read_from_text_and_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"question": "why?"}\n\nplain text?\n{"query": "how?", "id": 4}\n')
    assert read_questions(file) == ["why?", "plain text?", "how?"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no question"), ("{\n", "1 is not JSON"), ('why?\n{"id": 1}\n', "2 has no question")],
)
def test_file_without_questions_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_questions(file)


def test_request_log_gives_questions_counts_and_answer_length(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / TRACE_FILE, 10)
    for number, (question, tokens) in enumerate([("why?", 10), ("how?", 20), ("why?", 60), ("", 7)]):
        log.add(f"r{number}", float(number), {"question": question, "num_generated_tokens": tokens})
    log.close()

    found = questions_of(cast(KnowledgeBase, SimpleNamespace(path=tmp_path, num_chunks=1)), None, 10, 0)

    assert dict(zip(found.texts, found.counts, strict=True)) == {"why?": 2, "how?": 1}
    assert found.answer_tokens == 30 and found.has_popularity


def test_unreadable_request_log_warns_and_questions_are_made_from_chunks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = [Chunk(ChunkId(1), DocumentId("a.md"), 0, "about keys")]
    documents = [SimpleNamespace(document_id="a.md")]
    kb = SimpleNamespace(path=tmp_path, num_chunks=1, documents=lambda: documents, chunks_of=lambda _: chunks)
    (tmp_path / TRACE_FILE).write_text("no database" * 100)

    assert questions_of(cast(KnowledgeBase, kb), None, 10, 0).texts == ("about keys",)

    assert "the plan does not use past questions" in caplog.text and "is damaged" in caplog.text


def test_requests_are_drawn_by_the_counts_of_questions() -> None:
    questions = QuestionCounts(("often", "never"), (2, 0), "test")
    drawn = workload(questions, 50, 2.0)
    assert set(drawn.warm) == set(drawn.asked) == {0}
    assert len(drawn.dues) == 50 and list(drawn.dues) == sorted(drawn.dues) and drawn.dues[-1] <= 25.0


def test_requests_are_drawn_by_zipf_without_repeated_questions() -> None:
    questions = QuestionCounts(tuple(map(str, range(20))), (1,) * 20, "test")
    unequal = Counter(workload(questions, 2000, 1.0, zipf=1.2).asked).most_common(1)[0][1]
    equal = Counter(workload(questions, 2000, 1.0, zipf=0.0).asked).most_common(1)[0][1]
    assert unequal > 500 and equal < 150
    assert workload(questions, 9, 1.0) == workload(questions, 9, 1.0) != workload(questions, 9, 1.0, seed=1)
