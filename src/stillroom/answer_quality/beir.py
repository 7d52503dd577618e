"""Read data sets in BEIR layout: corpus.jsonl, queries.jsonl, and judgements in qrels/test.tsv or qrels.tsv."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stillroom.errors import DocumentError, UsageError

_FILES = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv (or qrels.tsv)")
DEFAULT_SPLIT = "test"


def read_judged_queries(dataset: Path, split: str = DEFAULT_SPLIT) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Return the text of every query that has a relevant document, and all judgements: query -> document -> grade.

    Args:
        split: file of the folder `qrels`, such as `dev`; for `test`, the file `qrels.tsv` takes precedence.

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
    """Return the title and text of every document by its id.

    Raises:
        UsageError: corpus.jsonl is missing.
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
            raise DocumentError(f"{path}:{number}: not a JSON object with `_id` and `text`") from error
    return corpus


def read_answers(dataset: Path) -> dict[str, tuple[str, ...]]:
    """Return the accepted answers of every query that has any.

    Raises:
        UsageError: queries.jsonl is missing.
        DocumentError: a line cannot be read, or its `answers` is not a list of texts.
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
            raise DocumentError(f"{path}:{number}: `answers` must be a list of non-empty texts") from error
    return found


def _read_queries(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in _lines(path):
        try:
            record: Mapping[str, Any] = json.loads(line)
            yield str(record["_id"]), str(record["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"{path}:{number}: not a JSON object with `_id` and `text`") from error


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
            raise DocumentError(f"{path}:{number}: not query-id, corpus-id and score separated by tabs") from error
    return qrels


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line.rstrip("\n")
