"""Data sets in BEIR layout: corpus.jsonl, queries.jsonl, and judgements in qrels/test.tsv or qrels.tsv.

Also a knowledge base of a data set, kept between runs.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stillroom.config.settings import StillroomConfig
from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.knowledge_base import KnowledgeBase

_FILES = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv (or qrels.tsv)")
DEFAULT_SPLIT = "test"


def read_judged_queries(dataset: Path, split: str = DEFAULT_SPLIT) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """The text of every query that has a relevant document, and all judgements: query -> document -> grade.

    Args:
        split: which judgements of the folder `qrels`, such as `dev`; `test` may also be the file `qrels.tsv`.

    Raises:
        UsageError: a file is missing, or no query has a relevant document.
        DocumentError: a line cannot be read.
    """
    judgements = dataset / "qrels" / f"{split}.tsv"
    if split == DEFAULT_SPLIT and (dataset / "qrels.tsv").is_file():
        judgements = dataset / "qrels.tsv"
    for path in (dataset / "corpus.jsonl", dataset / "queries.jsonl", judgements):
        if not path.is_file():
            raise UsageError(f"{path} is missing; a data set has {', '.join(_FILES)}")
    qrels = _read_qrels(judgements)
    queries = {
        query: text
        for query, text in _read_queries(dataset / "queries.jsonl")
        if any(grade > 0 for grade in qrels.get(query, {}).values())
    }
    if not queries:
        raise UsageError(f"no query of {dataset} has a relevant document in {judgements.name}; do the ids agree?")
    return queries, qrels


def read_corpus(dataset: Path) -> dict[str, str]:
    """Title and text of every document by its id.

    Raises:
        UsageError: there is no corpus.
        DocumentError: a line cannot be read.
    """
    path, corpus = dataset / "corpus.jsonl", {}
    if not path.is_file():
        raise UsageError(f"{path} is missing; a data set has {', '.join(_FILES)}")
    for number, line in _lines(path):
        try:
            record: Mapping[str, Any] = json.loads(line)
            corpus[str(record["_id"])] = f"{record.get('title') or ''}\n{record['text']}".strip()
        except (ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"{path}:{number}: a record is a JSON object with `_id` and `text`") from error
    return corpus


def read_answers(dataset: Path) -> dict[str, tuple[str, ...]]:
    """The accepted answers of every query that has some.

    Raises:
        UsageError: there are no queries.
        DocumentError: a line cannot be read, or its `answers` are no list of texts.
    """
    path, found = dataset / "queries.jsonl", {}
    if not path.is_file():
        raise UsageError(f"{path} is missing; a data set has {', '.join(_FILES)}")
    for number, line in _lines(path):
        try:
            record: Mapping[str, Any] = json.loads(line)
            answers = record.get("answers") or []
            if not isinstance(answers, list) or not all(isinstance(one, str) and one.strip() for one in answers):
                raise TypeError("not texts")
            if answers:
                found[str(record["_id"])] = tuple(answers)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DocumentError(f"{path}:{number}: `answers` of a query is a list of texts") from error
    return found


def open_knowledge_base(dataset: Path, work_dir: Path, config: StillroomConfig) -> KnowledgeBase:
    """A knowledge base of the set's corpus. Its folder depends on content and settings: the second time nothing is
    embedded.

    Raises:
        DocumentError: a line of the corpus cannot be read.
    """
    corpus = dataset / "corpus.jsonl"
    kb = KnowledgeBase.open(work_dir / f"{dataset.name}-{_key(corpus, config)}", config, create=True)
    try:
        report = kb.add([corpus])
        if report.failures:
            raise DocumentError(report.failures[0][1])
    except BaseException:
        kb.close()
        raise
    return kb


def _key(corpus: Path, config: StillroomConfig) -> str:
    """What a knowledge base depends on: the corpus' place and content, and the settings that are fixed in it."""
    fixed = (config.chunker, config.embedder.model, config.index)
    with corpus.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{corpus.absolute()}\0{content}\0{fixed!r}".encode()).hexdigest()[:12]


def _read_queries(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in _lines(path):
        try:
            record: Mapping[str, Any] = json.loads(line)
            yield str(record["_id"]), str(record["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"{path}:{number}: a query is a JSON object with `_id` and `text`") from error


def _read_qrels(path: Path) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    for number, line in _lines(path):
        fields = line.split("\t")
        if number == 1 and fields[-1] == "score":
            continue
        try:
            query_id, record_id, grade = fields
            qrels.setdefault(query_id, {})[record_id] = int(float(grade))
        except ValueError as error:
            raise DocumentError(f"{path}:{number}: a judgement is query-id, corpus-id and score, with tabs") from error
    return qrels


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line.rstrip("\n")
