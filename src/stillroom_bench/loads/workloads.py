"""Corpora of any size for index benchmarks: real vectors of data sets in BEIR layout, then generated ones.

Embedding is slow (about 40 chunks per second on two cores), so real texts are embedded once and cached. Each generated
vector lies between a real document and one of its nearest neighbours, plus noise, so that the corpus stays clustered
like real documents. Generated texts draw words from the real ones, so word frequencies are real. Queries are real.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import EmbedderConfig
from stillroom.errors import DocumentError, UsageError
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.retrieval.atomic_files import load_arrays, save_arrays
from stillroom.retrieval.embedder import Embedder

Vectors = NDArray[np.float32]

_NUM_NEIGHBOURS = 10
_NOISE = 0.3
"""Length of the random part of a generated vector, whose real part has a length of about 1."""

_MAX_WORDS = 200
"""Maximum words of a text; about the size of a chunk."""


@dataclass(frozen=True, slots=True)
class RealData:
    """Texts, questions and embeddings of the data sets."""

    texts: tuple[str, ...]
    """Title and text of each document."""
    questions: tuple[str, ...]
    documents: Vectors
    """[len(texts), d], each of length 1."""
    queries: Vectors
    """[len(questions), d], each of length 1."""


def load_real_data(
    datasets: Sequence[Path], work_dir: Path, on_progress: Callable[[str], None] = lambda _: None
) -> RealData:
    """Read and embed data sets; embeddings are cached in `work_dir` by model and content.

    Args:
        datasets: folders with corpus.jsonl and queries.jsonl.

    Raises:
        UsageError: a folder lacks one of the files, or there is no document or no query.
        DocumentError: a line cannot be read.
    """
    texts = [text for folder in datasets for text in _texts(folder / "corpus.jsonl")]
    questions = [text for folder in datasets for text in _texts(folder / "queries.jsonl")]
    if not texts or not questions:
        raise UsageError("the data sets have no documents or no queries; name folders in BEIR layout with --dataset")
    embedder = Embedder(EmbedderConfig())
    key = hashlib.sha256("\0".join([embedder.fingerprint, *texts, "", *questions]).encode()).hexdigest()[:16]
    path = work_dir / f"embeddings-{key}.npz"
    if path.exists():
        found = load_arrays(path)
        return RealData(tuple(texts), tuple(questions), found["documents"], found["queries"])
    documents = _embed(embedder.embed_documents, texts, "documents", on_progress)
    queries = _embed(lambda some, _: embedder.embed_queries(some), questions, "queries", on_progress)
    work_dir.mkdir(parents=True, exist_ok=True)
    save_arrays(path, {"documents": documents, "queries": queries})
    return RealData(tuple(texts), tuple(questions), documents, queries)


def clustered_vectors(real: Vectors, size: int, seed: int) -> Vectors:
    """Return unit vectors [size, d]: the real ones [n, d] in random order, then generated ones near them.

    The result of a smaller size with the same seed is a prefix.
    """
    order = np.random.default_rng(seed).permutation(len(real))
    if size <= len(real):
        return np.ascontiguousarray(real[order[:size]])
    index = faiss.IndexFlatIP(real.shape[1])
    index.add(np.ascontiguousarray(real))
    neighbours = run_in_short_lived_thread(lambda: index.search(real, min(_NUM_NEIGHBOURS + 1, len(real))))[1]
    rng = np.random.default_rng([seed, 1])
    made = [_made_vector(real, neighbours, rng) for _ in range(size - len(real))]
    return np.concatenate([real[order], np.stack(made)])


def _made_vector(real: Vectors, neighbours: NDArray[np.int64], rng: np.random.Generator) -> Vectors:
    """Return a unit vector between a random real vector and one of its nearest neighbours, plus noise."""
    one = int(rng.integers(len(real)))
    other = neighbours[one, rng.integers(neighbours.shape[1])]
    share = rng.uniform(0.0, 0.5)
    noise = rng.standard_normal(real.shape[1])
    vector = (1 - share) * real[one] + share * real[other] + _NOISE * noise / np.linalg.norm(noise)
    unit: Vectors = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit


def random_texts(real: Sequence[str], size: int, seed: int) -> Iterator[str]:
    """Yield texts with the lengths and the word frequencies of real ones, in random word order."""
    split = [text.split()[:_MAX_WORDS] for text in real]
    words = np.array([word for text in split for word in text], dtype=object)
    lengths = np.array([max(1, len(text)) for text in split])
    rng = np.random.default_rng(seed)
    for _ in range(size):
        yield " ".join(words[rng.integers(len(words), size=rng.choice(lengths))])


def choose_queries(real: RealData, count: int, seed: int) -> tuple[list[str], Vectors]:
    """Draw up to `count` distinct real questions and their vectors."""
    chosen = np.random.default_rng(seed).permutation(len(real.questions))[:count]
    return [real.questions[at] for at in chosen], np.ascontiguousarray(real.queries[chosen])


def _texts(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise UsageError(f"{path} is missing; a data set has corpus.jsonl and queries.jsonl")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                text = f"{record.get('title') or ''}\n{record['text']}".strip()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DocumentError(f"{path}:{number}: not a JSON object with `_id` and `text`") from error
            if text:
                yield text


def _embed(
    embed: Callable[[Sequence[str], Callable[[int], None]], Vectors],
    texts: Sequence[str],
    noun: str,
    on_progress: Callable[[str], None],
) -> Vectors:
    num_done = num_told = 0

    def on_batch(count: int) -> None:
        nonlocal num_done, num_told
        num_done += count
        if num_done - num_told >= len(texts) / 20 or num_done == len(texts):
            num_told = num_done
            on_progress(f"embedding {noun}: {num_done:,} of {len(texts):,}")

    on_progress(f"embedding {noun}: {len(texts):,}")
    return embed(texts, on_batch)
