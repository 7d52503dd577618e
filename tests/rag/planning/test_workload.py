"""Questions of files, of the diary, and made ones; and how requests are drawn from them."""

from collections import Counter
from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom.rag.planning.workload import Questions, read_questions, workload


def test_questions_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"question": "why?"}\n\nplain text?\n{"query": "how?", "id": 4}\n')
    assert read_questions(file) == ["why?", "plain text?", "how?"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no question"), ("{\n", "1 is not JSON"), ('why?\n{"id": 1}\n', "2 has no question")],
)
def test_files_without_questions(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_questions(file)


def test_counts_decide_where_there_are_any() -> None:
    questions = Questions(("often", "never"), (2, 0), "test")
    drawn = workload(questions, 50, 2.0)
    assert set(drawn.warm) == set(drawn.asked) == {0}
    assert len(drawn.dues) == 50 and list(drawn.dues) == sorted(drawn.dues) and drawn.dues[-1] <= 25.0


def test_otherwise_zipf_does() -> None:
    questions = Questions(tuple(map(str, range(20))), (1,) * 20, "test")
    unequal = Counter(workload(questions, 2000, 1.0, zipf=1.2).asked).most_common(1)[0][1]
    equal = Counter(workload(questions, 2000, 1.0, zipf=0.0).asked).most_common(1)[0][1]
    assert unequal > 500 and equal < 150
    assert workload(questions, 9, 1.0) == workload(questions, 9, 1.0) != workload(questions, 9, 1.0, seed=1)
