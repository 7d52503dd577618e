"""Tests the questions that `python -m training microworld reuse-questions` writes."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from stillroom.answer_quality.questions import load_questions
from training.__main__ import run_command
from training.data.worlds import load_generator
from training.microworld.reuse_questions import KINDS, write_reuse_questions, write_split_questions

pytestmark = pytest.mark.shared


def test_questions_are_reproducible_of_all_kinds_and_about_names_that_training_never_had(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, again, other = (tmp_path / "new" / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    options = ["--shared", str(shared), "--out", str(file), "--num-questions", "60", "--seed", "3"]
    with pytest.raises(SystemExit) as end:
        run_command(["microworld", "reuse-questions", *options])
    assert end.value.code == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts == dict.fromkeys(KINDS, 12)
    assert write_reuse_questions(shared, again, num_questions=60, seed=3) == counts
    write_reuse_questions(shared, other, num_questions=60, seed=4)
    assert again.read_bytes() == file.read_bytes() != other.read_bytes()
    assert list(tmp_path.rglob("*.tmp")) == []

    found = load_questions(file)
    assert Counter(one.kind for one in found) == counts
    generator = load_generator(shared)
    is_held = generator.World(None, "eval")._pair
    for one in found:
        text = " ".join(chunk.text for chunk in one.chunks)
        assert 3 <= len(one.chunks) <= 9 and one.answer is not None
        assert all(word in text.split() for word in one.answer.split())
        for first, last in re.findall(r"([A-Z]\w+) ([A-Z]\w+)", text):
            if first in (*generator.FIRST_F, *generator.FIRST_M) and last in generator.LAST:
                assert is_held(first, last), f"{first} {last} may occur in training"


def test_split_questions_are_those_of_the_first_reports(shared: Path, tmp_path: Path) -> None:
    file = tmp_path / "split.jsonl"

    assert write_split_questions(shared, file, num_questions=300, seed=4242) == {"split": 300}
    sizes = [len(one.chunks) for one in load_questions(file)]
    assert Counter(sizes[:200]) == {5: 88, 8: 112}, "benchmarks/2026-11-21-quality-curve.md"
    assert Counter(sizes) == {5: 147, 8: 153}, "benchmarks/2026-11-21-quality-ablation.md"
