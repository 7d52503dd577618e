"""Reads questions and the chunks of their prompts from three kinds of input.

- JSON lines: an object with `chunks` (texts, in order) and `question`; optional are `answer` (a text or a list of
  accepted texts) and `kind`, which groups the results. Markers of a prompt format around the texts
  (`<chunk> ... </chunk>`, `<q> ... <a>`) are removed, because the prompt builder adds its own.
- JSON (`.json`), as MuSiQue with retrieved passages is published: a list of objects with `ctxs` (each with `title` and
  `text`), `question` and `answers`.
- A folder in BEIR layout, whose queries may have `answers`: each question gets the passages judged relevant and those
  that BM25 ranks next, in an order drawn with a seed.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.answer_quality.beir import read_answers, read_corpus, read_judged_queries
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import UsageError
from stillroom.retrieval.index.bm25 import Bm25Index

NUM_CHUNKS = 5
"""Default number of chunks of a question over a data set; Cache-Craft's k."""


@dataclass(frozen=True, slots=True)
class ChunkQuestion:
    chunks: tuple[Chunk, ...]
    question: str
    answers: tuple[str, ...] = ()
    """Accepted answers; empty if unknown."""
    kind: str = "all"

    @property
    def answer(self) -> str | None:
        """The first accepted answer."""
        return self.answers[0] if self.answers else None


def load_questions(
    path: Path,
    limit: int | None = None,
    *,
    num_chunks: int | None = None,
    max_words: int | None = None,
    seed: int = 0,
) -> list[ChunkQuestion]:
    """Read questions from a file or a data set.

    Args:
        limit: maximum number of questions: the first of a file, or a random sample of a data set.
        num_chunks: maximum number of chunks of a question. None: all chunks of a file, 5 over a data set. If a file has
            more, chunks that contain an answer are kept first, then the others in order.
        max_words: longer chunks are cut around the first answer they contain, and duplicates that result are dropped;
            None: chunks are not cut.
        seed: draws the sample of a data set and the order of its chunks.

    Raises:
        UsageError: the input has no questions, or an entry has another form; the message names the line.
        DocumentError: a line of a data set cannot be read.
    """
    if path.is_dir():
        questions = _of_dataset(path, num_chunks or NUM_CHUNKS, seed)
    else:
        questions = _whole(path) if path.suffix == ".json" else _lines(path)
    cut = (_with_fewer(_with_shorter(question, max_words), num_chunks) for question in questions)
    found = list(islice(cut, limit))
    if not found:
        raise UsageError(f"{path} has no questions")
    return found


def new_chunk(text: str, place: int = 0) -> Chunk:
    """Make a chunk whose id is a hash of its text."""
    name = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
    return Chunk(ChunkId(name), DocumentId("question"), place, text)


def shortened(text: str, max_words: int, answers: Sequence[str]) -> str:
    """Return at most `max_words` consecutive words of a text.

    Without an answer in the text these are its first words; else they cover the sentence of the first answer, or as
    much of it as fits, starting at the answer if necessary.
    """
    words = [match.span() for match in _WORD.finditer(text)]
    if len(words) <= max_words:
        return text
    first, span = 0, _place_of(text, answers)
    if span is not None:
        end = next((match.end() for match in _SENTENCE_END.finditer(text, span[1])), len(text))
        last_word = sum(start < end for start, _ in words)
        answer_word = sum(stop <= span[0] for _, stop in words)
        first = max(0, min(last_word - max_words, answer_word))
    chosen = words[first : first + max_words]
    return text[chosen[0][0] : chosen[-1][1]]


_WORD = re.compile(r"\S+")
_SENTENCE_END = re.compile(r"[.!?](?=\s)")


def _place_of(text: str, answers: Sequence[str]) -> tuple[int, int] | None:
    """Return the span of the first answer that occurs as whole words."""
    places = [
        match.span()
        for answer in answers
        if (match := re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text, re.IGNORECASE))
    ]
    return min(places, default=None)


def _with_fewer(question: ChunkQuestion, num_chunks: int | None) -> ChunkQuestion:
    chunks = question.chunks
    if num_chunks is None or len(chunks) <= num_chunks:
        return question
    best = sorted(range(len(chunks)), key=lambda at: (_place_of(chunks[at].text, question.answers) is None, at))
    return replace(question, chunks=tuple(chunks[at] for at in sorted(best[:num_chunks])))


def _with_shorter(question: ChunkQuestion, max_words: int | None) -> ChunkQuestion:
    if max_words is None:
        return question
    texts = [shortened(chunk.text, max_words, question.answers) for chunk in question.chunks]
    return replace(question, chunks=_chunks(list(dict.fromkeys(texts))))


def _chunks(texts: Sequence[str]) -> tuple[Chunk, ...]:
    return tuple(new_chunk(text, place) for place, text in enumerate(texts))


def _lines(path: Path) -> Iterator[ChunkQuestion]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                with _located_errors(f"{path}, line {number}", "`chunks` and `question`"):
                    question = _from_line(json.loads(line))
                yield question


def _whole(path: Path) -> Iterator[ChunkQuestion]:
    fields = "`ctxs`, `question` and `answers`"
    with _located_errors(str(path), f"in a list, with {fields}"):
        rows = list(json.loads(path.read_text(encoding="utf-8")))
    for number, row in enumerate(rows, 1):
        with _located_errors(f"{path}, question {number}", fields):
            texts = [f"{one.get('title') or ''}\n{one['text']}".strip() for one in row["ctxs"]]
            question = _checked(texts, row["question"], row["answers"], "all")
        yield question


@contextmanager
def _located_errors(where: str, fields: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: not an object with {fields} ({error})") from error


def _from_line(row: Any) -> ChunkQuestion:
    answers = row.get("answer")
    answers = [] if answers is None else [answers] if isinstance(answers, str) else answers
    found = _checked(row["chunks"], row["question"], answers, row.get("kind", "all"))
    texts = [chunk.text.removeprefix("<chunk> ").removesuffix(" </chunk>") for chunk in found.chunks]
    return replace(found, chunks=_chunks(texts), question=found.question.removeprefix("<q> ").removesuffix(" <a>"))


def _checked(texts: Any, question: Any, answers: Any, kind: Any) -> ChunkQuestion:
    is_text = all(isinstance(text, str) and text.strip() for text in [question, kind, *texts, *answers])
    if not is_text or not texts or isinstance(answers, str):
        raise ValueError("`chunks` must be a list of texts, `question` and `kind` texts, `answer` a text or a list")
    return ChunkQuestion(_chunks(texts), question, tuple(answers), kind)


def _of_dataset(folder: Path, num_chunks: int, seed: int) -> Iterator[ChunkQuestion]:
    """Yield questions in an order drawn with the seed, so that the first few are a random sample."""
    corpus, answers = read_corpus(folder), read_answers(folder)
    queries, qrels = read_judged_queries(folder)
    by_id = {(chunk := new_chunk(text)).chunk_id: chunk for text in corpus.values() if text}
    names = list(queries)
    with tempfile.TemporaryDirectory() as scratch:
        index = Bm25Index(Path(scratch) / "bm25", "questions")
        index.apply((), by_id.values(), 1)
        for number in np.random.default_rng([seed, 1]).permutation(len(names)).tolist():
            name, rng = names[number], np.random.default_rng([seed, 2, number])
            grades = sorted(qrels[name].items(), key=lambda pair: -pair[1])
            gold = [
                new_chunk(corpus[document]).chunk_id for document, grade in grades if grade > 0 and corpus.get(document)
            ]
            if not gold:
                continue
            ranked = [chunk_id for chunk_id, _ in index.search(queries[name], num_chunks + len(gold))]
            others = [list(by_id)[at] for at in rng.permutation(len(by_id)).tolist()]  # used if BM25 finds too few
            chosen = list(dict.fromkeys([*gold, *ranked, *others]))[:num_chunks]
            texts = [by_id[chosen[at]].text for at in rng.permutation(len(chosen)).tolist()]
            yield ChunkQuestion(_chunks(texts), queries[name], answers.get(name, ()))
