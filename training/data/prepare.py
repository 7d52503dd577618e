"""`python -m training data`: writes all data of training and evaluation to one self-contained folder.

    manifest.json, ATTRIBUTION.md, tokenizer/
    train-passages-*.jsonl.gz, train-worlds-*.jsonl.gz      training data
    eval-passages-*.jsonl.gz, eval-worlds-*.jsonl.gz        held-out data, for the loss during training
    eval/xquad.jsonl, unanswerable.jsonl, microworld.jsonl  evaluation sets; `stillroom bench quality` reads them

The output is reproducible byte by byte from the data, the seed and the sizes.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from training.data.attribution import attribution
from training.data.cleaning import clean, passages, sentences
from training.data.neighbours import neighbours
from training.data.shards import MANIFEST, digest, write_shards
from training.data.sources import EXCLUDED, SOURCES, XQUAD, RawDocument, read_beir
from training.data.spans import occurs
from training.data.split import Filter, Split, same_name, shingles
from training.data.tokens import save_tokenizer, train_tokenizer
from training.data.wording import worded
from training.data.worlds import World, make_worlds
from training.evaluation.sets import write_sets
from training.folders import replaced

CONTEXT_TOKENS = 2048
_NUM_NEAR = 8
_MAX_ANSWER_CHARS = 160
"""Of a question by a person; the model answers in at most 48 tokens."""
_MIN_USES = 3
"""Minimum number of occurrences of a word of the language."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecipe:
    seed: int = 0
    vocab_size: int = 8192
    num_worlds: int = 60_000
    num_eval_worlds: int = 2000
    num_eval_questions: int = 400
    """Evaluation questions of each kind over generated worlds."""


@dataclass(slots=True)
class Row:
    """A passage before it is written to a library."""

    source: str
    document: str
    title: str
    text: str
    asked: list[tuple[str, str]] = field(default_factory=list)


def prepare(shared: Path, out: Path, recipe: DataRecipe, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the folder, replacing earlier data; returns its manifest.

    Raises:
        FileNotFoundError: the shared folder has no data or no generator of worlds.
        ValueError: the folder contains files without a manifest.
    """
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise ValueError(f"{out} contains files but no {MANIFEST}; remove it, or name another folder with --out")
    with replaced(out) as new:
        return _write(shared, new, recipe, say)


def _write(shared: Path, out: Path, recipe: DataRecipe, say: Callable[[str], None]) -> dict[str, Any]:
    sizes: dict[Split, int] = {"train": recipe.num_worlds, "eval": recipe.num_eval_worlds}
    worlds = {split: make_worlds(shared, split, recipe.seed) for split in sizes}
    rows, held, dropped = _read(shared / "data", recipe, say)
    language = _language(row.text for row in rows["train"])
    counts: dict[str, Any] = {}
    for split in rows:
        say(f"{split}: {len(rows[split])} passages; neighbours and questions")
        write_shards(out, f"{split}-passages", _with_questions(rows[split], language))
        counts[split] = _counts(rows[split])
    for split, size in sizes.items():
        counts[split]["worlds"] = write_shards(out, f"{split}-worlds", map(asdict, islice(worlds[split], size)))
    say("tokenizer")
    few = islice(make_worlds(shared, "train", recipe.seed), 4000)
    texts = [row.text for row in rows["train"]] + [" ".join(_texts(world)) for world in few]
    save_tokenizer(train_tokenizer(iter(texts), recipe.vocab_size), out / "tokenizer", CONTEXT_TOKENS)
    say("questions for evaluation")
    counts["questions for evaluation"] = write_sets(shared, out / "eval", recipe.num_eval_questions, recipe.seed)
    (out / "ATTRIBUTION.md").write_text(attribution(), encoding="utf-8")
    manifest = {
        "recipe": asdict(recipe),
        "digest": digest(out),
        "held out": sorted(held),
        "passages that did not pass": dropped,
        "sources left out": EXCLUDED,
        "counts": counts,
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def _texts(world: World) -> list[str]:
    return [*world.chunks, *(question.text for question in world.questions[:4])]


def _read(
    data: Path, recipe: DataRecipe, say: Callable[[str], None]
) -> tuple[dict[Split, list[Row]], frozenset[str], dict[str, int]]:
    """Return the passages of both splits, the names of held-out documents, and counts of dropped passages by reason."""
    documents = list(read_beir(data / XQUAD))
    kept = [row for document in documents for row in _rows(XQUAD, document, is_whole=True)]
    held = frozenset(document.document for document in documents)
    gate = Filter(
        titles=frozenset(same_name(name) for name in held),
        held=frozenset(shingle for row in kept for shingle in shingles(row.text)),
    )
    rows: dict[Split, list[Row]] = {"train": [], "eval": kept}
    for source in SOURCES:
        documents = list(source.read(data))
        read = (row for one in documents for row in _rows(source.name, one, is_whole=source.is_whole))
        found = [row for row in read if gate.admits(row.title, row.text)]
        if source.max_passages is not None and len(found) > source.max_passages:
            rng = random.Random(f"{recipe.seed}:{source.name}")
            found = [found[at] for at in sorted(rng.sample(range(len(found)), source.max_passages))]
        say(f"{source.name}: {len(documents)} documents, {len(found)} passages")
        rows["train"] += found
    return rows, held, gate.dropped


def _rows(source: str, document: RawDocument, *, is_whole: bool) -> Iterator[Row]:
    title = clean(document.title.replace("_", " "))
    texts = list(map(clean, document.paragraphs)) if is_whole else list(passages(document.paragraphs))
    for place, text in enumerate(texts):
        row = Row(source, document.document, title, text)
        for question in document.questions:
            answers = [clean(answer) for answer in question.answers]
            answer = next((one for one in answers if _can_be_asked(one, text)), None)
            if question.paragraph == place and is_whole and answer is not None:
                row.asked.append((clean(question.text), answer))
        yield row


def _can_be_asked(answer: str, text: str) -> bool:
    return 0 < len(answer) <= _MAX_ANSWER_CHARS and answer in text and occurs(answer, text)


def _language(texts: Iterator[str]) -> frozenset[str]:
    counts = Counter(word for text in texts for word in re.findall(r"\b[a-z]+\b", text))
    return frozenset(word for word, uses in counts.items() if uses >= _MIN_USES)


def _with_questions(rows: Sequence[Row], language: frozenset[str]) -> Iterator[dict[str, Any]]:
    near = neighbours([row.text for row in rows], _NUM_NEAR)
    for row, others in zip(rows, near, strict=True):
        made = [
            (one.question, one.answer, one.kind)
            for sentence in sentences(row.text)
            for one in worded(sentence, row.title, language)
        ]
        yield {**asdict(row), "near": others, "worded": made}


def _counts(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "passages": dict(Counter(row.source for row in rows)),
        "documents": len({(row.source, row.document) for row in rows}),
        "characters": sum(len(row.text) for row in rows),
        "questions by people": sum(len(row.asked) for row in rows),
    }
