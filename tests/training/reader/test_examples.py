"""Tests the rows of the reader's training: answers survive crops, held-out passages are absent."""

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.reader.conftest import NUM_PASSAGES, NUM_TECHNICAL, RECIPE, passage, random_vectors, vocabulary
from training.reader import held_out
from training.reader.examples import (
    MAX_HEADING,
    MAX_QUESTION,
    Coder,
    ExampleSet,
    Question,
    TokenisedPassage,
    groups_of,
    is_held_out,
    is_held_out_passage,
    read_rows,
    read_technical,
    span_of,
    steps,
    technical_files,
)
from training.reader.neighbours import PEOPLE, TECHNICAL, embedder, prepare, read_neighbours, technical_questions


@st.composite
def cropped(draw: st.DrawFn) -> tuple[TokenisedPassage, Question, int]:
    """Draw a passage with random sentences, a question with one to three answers, and a limit of tokens."""
    size = draw(st.integers(1, 300))
    inner = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=20))
    cuts = tuple(sorted({0, size, *(cut for cut in inner if cut < size)}))
    offsets = np.array([(2 * n, 2 * n + 1) for n in range(size)], np.int32).reshape(-1, 2)
    text = "x " * size
    spans = set()
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, size - 1))
        spans.add((first, min(size - 1, first + draw(st.integers(0, 60)))))
    heading = tuple(range(2000, 2000 + draw(st.integers(0, MAX_HEADING))))
    ids = np.arange(1000, 1000 + size, dtype=np.int32)
    question = Question(tuple(range(5, 5 + draw(st.integers(1, MAX_QUESTION)))), 0, tuple(sorted(spans)), (), 1.0)
    return TokenisedPassage(ids, offsets, cuts, heading, text), question, draw(st.integers(64, 200))


@given(cropped(), st.integers(0, 1000))
def test_crops_keep_an_answer(case: tuple[TokenisedPassage, Question, int], seed: int) -> None:
    passage, question, limit = case
    ((row,),) = groups_of(ExampleSet([passage], [question]), seed, 0, limit)
    assert row.spans
    for first, last in row.spans:
        found = row.ids[first : last + 1]
        assert (found[0] - 1000, found[-1] - 1000) in question.spans and found == list(range(found[0], found[-1] + 1))
        assert row.first <= first <= last < len(row.ids) - 1
    longest = max(last - first + 1 for first, last in question.spans)
    assert len(row.ids) <= 3 + MAX_QUESTION + MAX_HEADING + max(limit, longest + 1)


def test_spans_cover_the_characters_of_the_answer(examples: ExampleSet) -> None:
    found = examples.passages[7]
    start = found.text.index("7 and 0")
    span = span_of(found, start, start + len("7 and 0"))
    assert span is not None
    first, last = span
    assert found.text[found.offsets[first, 0] : found.offsets[last, 1]] == "7 and 0"
    assert span_of(found, len(found.text) + 5, len(found.text) + 9) is None


def test_held_out_passages_never_appear_in_training(examples: ExampleSet) -> None:
    held = {f"w{n}" for n in range(NUM_PASSAGES) if is_held_out(f"Mill {n}")}
    held |= {f"t{n}" for n in range(NUM_TECHNICAL) if is_held_out_passage(passage(f"t{n}", n))}
    assert any(word[0] == "w" for word in held) and any(word[0] == "t" for word in held)
    ids = vocabulary()
    seen = {one for epoch in range(3) for rows in groups_of(examples, 1, epoch, 200) for row in rows for one in row.ids}
    assert not seen & {ids[word] for word in held}
    assert ids["w1"] in seen and ids["t1"] in seen


def test_held_out_questions_are_those_that_are_never_asked(
    examples: ExampleSet, reading_qa: Path, technical: Path, prepared: Path
) -> None:
    people = held_out.people(reading_qa, prepared, RECIPE.skipped)
    own = held_out.technical(technical_files(technical), prepared)
    num_skipped = sum(row["source"] == "covid-qa" for row in read_rows(reading_qa / "passages.jsonl"))
    assert len(people) + len(own) + len(examples.questions) == 2 * (NUM_PASSAGES - num_skipped) + NUM_TECHNICAL
    for one in [*people, *own]:
        assert any(answer in one.gold.text for answer in one.answers)
        assert one.wrong and not any(answer in wrong.text for wrong in one.wrong for answer in one.answers)


def test_neighbours_are_kept_until_the_questions_change(
    reading_qa: Path, technical: Path, prepared: Path, tmp_path: Path
) -> None:
    files = technical_files(technical)
    first, second = prepare(reading_qa, files, tmp_path, random_vectors)
    assert not first["kept"] and not second["kept"]
    assert np.array_equal(np.load(tmp_path / PEOPLE), np.load(prepared / PEOPLE))
    assert all(line["kept"] for line in prepare(reading_qa, files, tmp_path, random_vectors))
    with pytest.raises(ValueError, match="is for 40 questions, but there are 41"):
        read_neighbours(tmp_path / TECHNICAL, 41)
    lines = list(prepare(reading_qa, files[:1], tmp_path, random_vectors))
    assert [line["kept"] for line in lines] == [False, True] and len(np.load(tmp_path / TECHNICAL)) == 20


def test_steps_resume_in_the_middle(examples: ExampleSet) -> None:
    whole = list(islice(steps(examples, 0, 0, 4, 2, 80), 80))
    assert len(whole) == 80 and all(len(part) == 2 for batch in whole for part in batch)
    assert list(islice(steps(examples, 0, 70, 4, 2, 80), 10)) == whole[70:]
    with pytest.raises(ValueError, match="questions are too few"):
        next(steps(ExampleSet(examples.passages, examples.questions[:20]), 0, 0, 4, 2, 80))


def test_groups_leave_the_answer_out_at_times(examples: ExampleSet) -> None:
    kinds = [tuple(bool(row.spans) for row in rows) for rows in groups_of(examples, 0, 0, 80)]
    assert set(kinds) == {(True,), (False,), (True, False)}
    assert 0.1 < kinds.count((False,)) / len(kinds) < 0.3


def test_near_misses_train_no_span(tmp_path: Path, coder: Coder) -> None:
    asked = [{"question": "what opened in the town t1?", "answer": "the bridge"}, {"question": "who?", "answer": None}]
    row = {"source": "town", "title": "Bridge", "text": "the bridge of t1", "questions": asked}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    examples = read_technical([tmp_path / "1.jsonl"], coder, 1.0, 0)
    groups = [rows for epoch in range(10) for rows in groups_of(examples, 0, epoch, 80)]
    assert sorted(len(rows[0].spans) for rows in groups) == [0] * 10 + [1] * 10
    assert [one.text for one in technical_questions([row])] == ["what opened in the town t1?"]


def test_encoder_embeds_like_bert(bert: Path) -> None:
    import torch
    from transformers import BertModel

    from tests.training.reader.conftest import SPEC
    from training.reader.examples import CLS, SEP, read_tokenizer

    texts = ["the mill of w1 stands near the river", "who built it?", passage("w2", 2)]
    vectors = embedder(bert, SPEC, torch.float32)(texts)
    model = BertModel.from_pretrained(bert, attn_implementation="eager").eval()
    for text, vector in zip(texts, vectors, strict=True):
        ids = [CLS, *read_tokenizer(bert).encode(text, add_special_tokens=False).ids, SEP]
        with torch.inference_mode():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
        assert np.allclose(vector, mean / np.linalg.norm(mean), atol=1e-4)
    low = embedder(bert, SPEC, torch.bfloat16)(texts)
    assert np.min(np.sum(low * vectors, axis=1)) > 0.99


def test_random_draws_do_not_depend_on_the_global_generator(examples: ExampleSet) -> None:
    random.seed(1)
    first = list(islice(groups_of(examples, 0, 0, 80), 5))
    random.seed(2)
    assert list(islice(groups_of(examples, 0, 0, 80), 5)) == first
