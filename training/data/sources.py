"""Sources of training texts and questions with their licences, read from the folder of shared data.

Only Apache-2.0, CC BY-SA, CC BY, MIT and public domain. `EXCLUDED` lists data sets that are never read for training.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.retrieval.loaders.load_file import load

ALLOWED_LICENCES = ("CC BY-SA 4.0", "CC BY-SA 3.0", "CC BY 4.0", "Apache-2.0", "MIT", "public domain")

EXCLUDED = {
    "xquad": "held out for evaluation",
    "nq-gold": "kept for evaluation; do not evaluate a model of QED on it, which is a part of Natural Questions",
    "fiqa-mini": "licence unclear",
    "nfcorpus": "academic use only",
    "cranfield": "licence unclear",
    "product-docs": "web pages with answers that do not quote the page",
    "sift10k": "no text",
    "traces/mooncake_conversation.jsonl": "no text",
    "traces/azure_*.csv": "no text",
}


@dataclass(frozen=True, slots=True)
class RawQuestion:
    """A question by a person; every answer is a span of the paragraph."""

    text: str
    answers: tuple[str, ...]
    paragraph: int
    """Index of the paragraph in its document."""


@dataclass(frozen=True, slots=True)
class RawDocument:
    """Unprocessed text of a data set; a split never divides a document."""

    document: str
    """Unique in its source."""
    title: str
    paragraphs: tuple[str, ...]
    questions: tuple[RawQuestion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    licence: str
    """One of `ALLOWED_LICENCES`."""
    credit: str
    """Credit in the attribution file."""
    read: Callable[[Path], Iterator[RawDocument]]
    """Reads the source from the folder of all data."""
    is_whole: bool = False
    """Whether its paragraphs are passages, which questions refer to."""
    max_passages: int | None = None
    """Number of passages drawn at random from a large source; None: all."""


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def read_beir(folder: Path) -> Iterator[RawDocument]:
    """Yield passages with the questions judged relevant to them; passages of one title are one document."""
    asked: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    queries = {row["_id"]: (row["text"], tuple(row.get("answers", ()))) for row in _lines(folder / "queries.jsonl")}
    for line in (folder / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, passage, grade = line.split("\t")
        if int(grade) > 0:
            asked.setdefault(passage, []).append(queries[query])
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in _lines(folder / "corpus.jsonl"):
        rows.setdefault(row["title"] or row["_id"], []).append(row)
    for title, group in rows.items():
        questions = tuple(
            RawQuestion(text, answers, place)
            for place, row in enumerate(group)
            for text, answers in asked.get(row["_id"], ())
        )
        yield RawDocument(title, title, tuple(row["text"] for row in group), questions)


def read_reading_qa(folder: Path, source: str) -> Iterator[RawDocument]:
    """Yield the passages of one source with their questions; passages of one title are one document."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in _lines(folder / "passages.jsonl"):
        if row["source"] == source:
            rows.setdefault(row["title"], []).append(row)
    asked: dict[str, list[dict[str, Any]]] = {}
    for question in _lines(folder / "questions.jsonl"):
        asked.setdefault(question["passage"], []).append(question)
    for title, group in rows.items():
        questions = tuple(
            RawQuestion(one["question"], tuple(one["answers"]), place)
            for place, row in enumerate(group)
            for one in asked.get(row["_id"], ())
        )
        yield RawDocument(title, title, tuple(row["text"] for row in group), questions)


def read_musique(folder: Path) -> Iterator[RawDocument]:
    """Yield retrieved passages without the questions, whose answers are spread over several passages."""
    seen: set[str] = set()
    for number, row in enumerate(json.loads((folder / "musique_s.json").read_text(encoding="utf-8"))):
        texts = [text for one in row["ctxs"] if (text := one["text"]) not in seen]
        seen.update(texts)
        if texts:
            yield RawDocument(f"question {number}", "", tuple(texts))


def read_traces(folder: Path) -> Iterator[RawDocument]:
    """Yield Wikipedia passages that were retrieved in three published runs; the first line is the title."""
    rows: dict[str, dict[str, None]] = {}
    for path in sorted(folder.glob("rag_*.json")):
        for group in json.loads(path.read_text(encoding="utf-8"))["retrieved_docs"]:
            for passage in group:
                title, _, text = passage.partition("\n")
                rows.setdefault(title.strip(), {})[text] = None
    for title, texts in rows.items():
        yield RawDocument(title, title, tuple(texts))


_COPYRIGHT = re.compile(r"\n\s*Copyright\s*\n[^\n]*\n(?P<notice>.{0,400})", re.DOTALL)


def read_peps(folder: Path) -> Iterator[RawDocument]:
    """Yield the proposals whose copyright notice names the public domain."""
    for path in sorted(folder.rglob("*.rst")):
        notices = [match["notice"] for match in _COPYRIGHT.finditer(path.read_text(encoding="utf-8"))]
        if notices and re.search(r"public\s+domain", notices[-1]):
            yield from _read_with_loader(path)


def read_markdown(folder: Path) -> Iterator[RawDocument]:
    for path in sorted(folder.rglob("*.md")):
        yield from _read_with_loader(path)


def _read_with_loader(path: Path) -> Iterator[RawDocument]:
    """Read a file with Stillroom's loader."""
    for document in load(path.absolute()):
        yield RawDocument(path.stem, document.title, tuple(paragraph.text for paragraph in document.paragraphs))


def _in(folder: str, read: Callable[[Path], Iterator[RawDocument]]) -> Callable[[Path], Iterator[RawDocument]]:
    return lambda data: read(data / folder)


XQUAD = "xquad"
"""The data set that is held out completely."""


def _people(name: str, licence: str, credit: str) -> Source:
    """Return a part of reading-qa: passages with questions by people."""
    return Source(
        name=name,
        licence=licence,
        credit=credit,
        read=lambda data: read_reading_qa(data / READING_QA, name),
        is_whole=True,
    )


READING_QA = "reading-qa"
PEOPLE = (
    _people(
        "squad",
        "CC BY-SA 4.0",
        "SQuAD 1.1, training part (Rajpurkar et al., 2016); paragraphs from Wikipedia, by its authors",
    ),
    _people(
        "squadshifts-new-wiki",
        "CC BY 4.0",
        "SQuADShifts, new Wikipedia (Miller et al., 2020); paragraphs from Wikipedia (CC BY-SA), by its authors",
    ),
    _people(
        "tydiqa",
        "Apache-2.0",
        "TyDi QA, English gold passages (Clark et al., 2020, Google); paragraphs from Wikipedia (CC BY-SA), by its "
        "authors",
    ),
    _people(
        "qed",
        "CC BY-SA 3.0",
        "QED (Lamm et al., 2021, Google), part of Natural Questions; paragraphs from Wikipedia, by its authors",
    ),
    _people("fairytaleqa", "Apache-2.0", "FairytaleQA (Xu et al., 2022); fairy tales in the public domain"),
    _people("covid-qa", "Apache-2.0", "COVID-QA (Moeller et al., 2020, deepset); scientific articles of CORD-19"),
)
"""The parts of reading-qa, from which the reader learns too."""

SOURCES = (
    *PEOPLE,
    Source(
        name="musique",
        licence="CC BY 4.0",
        credit="MuSiQue (Trivedi et al., 2022), with retrieved passages",
        read=_in("musique-chunks", read_musique),
    ),
    Source(
        name="wikipedia-passages",
        licence="CC BY-SA 3.0",
        credit="Wikipedia, by its authors: passages retrieved for 2WikiMultihopQA, MuSiQue and Natural Questions",
        read=_in("traces", read_traces),
    ),
    Source(
        name="peps",
        licence="public domain",
        credit="Python Enhancement Proposals, by their authors; only those that name the public domain",
        read=_in("docs-peps", read_peps),
        max_passages=9000,
    ),
    Source(
        name="rust-book",
        licence="MIT",
        credit="The Rust Programming Language, by Steve Klabnik, Carol Nichols and contributors (MIT or Apache-2.0)",
        read=_in("docs-rustbook/src", read_markdown),
    ),
)
