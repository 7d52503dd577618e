"""Traffic of `stillroom bench reuse`: documents of unequal popularity, prompts made of them, and the memory they need.

Prompts are token ids drawn with a seed, so every runtime receives the same ones. The documents of a prompt are drawn
from a popularity curve instead of a search.
"""

import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from stillroom.answer_quality.beir import read_corpus, read_judged_queries
from stillroom.errors import UsageError
from stillroom.planner.simulation.stepped_engine import Prompt, Tokens
from stillroom_bench.loads.popularity import CURVES, Companions

TOP = 0.03
"""Share of documents that `CURVES` refer to."""

MAX_DOCUMENT = 512
"""Maximum tokens of a document; longer ones are cut, as in RAGCache 7.2 for k = 5."""

_SYSTEM = (
    "You are a helpful assistant. Answer the question from the documents that follow, in as few words as possible. "
    "If the documents do not hold the answer, say that you do not know. Name the document you took the answer from."
)


@dataclass(frozen=True, slots=True)
class Pool:
    """Parts of prompts."""

    system: Tokens
    documents: tuple[Tokens, ...]
    questions: tuple[tuple[Tokens, ...], ...]
    """For each document, the questions that it answers; at least one."""


def word_tokens(vocab_size: int) -> Callable[[str], Tokens]:
    """Return a tokenizer for a model without one: word pieces of usual length, hashed to ids."""
    return lambda text: tuple(1 + zlib.crc32(piece.encode()) % (vocab_size - 1) for piece in _PIECES.findall(text))


_PIECES = re.compile(r"\w{1,5}|[^\w\s]")


def pool_for(folder: Path, has_tokenizer: bool, dataset: Path | None, size: int, seed: int) -> Pool:
    """Make a checkpoint's pool from a data set, or from random tokens without one. Raises as `read_pool`."""
    vocab_size = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    if dataset is None:
        return made_pool(size, vocab_size, seed)
    encode: Callable[[str], Sequence[int]] = word_tokens(vocab_size)
    if has_tokenizer:
        from stillroom.models.tokenizer import Tokenizer

        encode = Tokenizer.load(folder).encode_text
    return read_pool(dataset, size, encode, seed)


def read_pool(dataset: Path, size: int, encode: Callable[[str], Sequence[int]], seed: int) -> Pool:
    """Read at most `size` documents of a data set in BEIR layout that have questions judged relevant.

    Raises:
        UsageError: a file is missing, or no question has a document.
        DocumentError: a line cannot be read.
    """
    corpus = read_corpus(dataset)
    queries, qrels = read_judged_queries(dataset)
    asked: dict[str, list[str]] = {}
    for query, text in queries.items():
        for document, grade in qrels[query].items():
            if grade > 0 and corpus.get(document):
                asked.setdefault(document, []).append(text)
    if not asked:
        raise UsageError(f"no question of {dataset} has a document in corpus.jsonl; do the ids agree?")
    names = sorted(asked)
    chosen = [names[at] for at in np.random.default_rng([seed, 1]).permutation(len(names))[:size]]
    documents = tuple(tuple(encode(corpus[name]))[:MAX_DOCUMENT] for name in chosen)
    questions = tuple(tuple(tuple(encode(text)) for text in asked[name]) for name in chosen)
    return Pool(tuple(encode(_SYSTEM)), documents, questions)


def made_pool(size: int, vocab_size: int, seed: int) -> Pool:
    """Make documents of random tokens, log-normal around 200 tokens, with four questions each."""
    rng = np.random.default_rng([seed, 1])

    def text(length: int) -> Tokens:
        return tuple(rng.integers(1, vocab_size, size=length).tolist())

    lengths = np.clip(200 * np.exp(0.4 * rng.standard_normal(size)), 32, MAX_DOCUMENT).astype(int)
    documents = tuple(text(int(length)) for length in lengths)
    questions = tuple(tuple(text(int(rng.integers(8, 25))) for _ in range(4)) for _ in documents)
    return Pool(text(48), documents, questions)


def popularity(num_documents: int, top_share: float) -> NDArray[np.float64]:
    """Return the probability of each rank under Zipf's law; the exponent gives the first 3 % the share `top_share`.

    Raises:
        UsageError: there are too few documents for the share.
    """
    ranks = np.arange(1, num_documents + 1, dtype=np.float64)
    num_top = max(1, round(TOP * num_documents))
    if num_top / num_documents > top_share:
        raise UsageError(f"{num_documents} documents are too few for this curve; raise --documents")
    low, high = 0.0, 16.0
    for _ in range(60):
        exponent = (low + high) / 2
        weights = ranks**-exponent
        if weights[:num_top].sum() / weights.sum() < top_share:
            low = exponent
        else:
            high = exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


@dataclass(frozen=True, slots=True)
class ReuseTraffic:
    """Requests for documents of a pool by a popularity curve."""

    pool: Pool
    curve: str
    k: int
    companions: Companions
    seed: int

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise UsageError(f"unknown curve {self.curve!r}; known are {', '.join(CURVES)}")
        if self.companions not in get_args(Companions):
            raise UsageError(f"unknown companions {self.companions!r}; known are {', '.join(get_args(Companions))}")
        if not 1 <= self.k <= len(self.pool.documents):
            raise UsageError(f"k={self.k} documents cannot be drawn from {len(self.pool.documents)}")

    def retrieved(self, count: int, repetition: int) -> list[list[int]]:
        """Return for each of `count` requests its documents, in the order of the prompt."""
        size = len(self.pool.documents)
        shares = np.empty(size)
        by_rank = np.random.default_rng([self.seed, 2]).permutation(size)  # so length is independent of popularity
        shares[by_rank] = popularity(size, CURVES[self.curve])
        rng = np.random.default_rng([self.seed, 3, repetition])
        return [self._documents(int(first), shares, rng) for first in rng.choice(size, size=count, p=shares)]

    def _documents(self, first: int, shares: NDArray[np.float64], rng: np.random.Generator) -> list[int]:
        if self.k == 1:
            return [first]
        others = shares.copy()
        others[first] = 0.0
        drawer = rng if self.companions == "drawn" else np.random.default_rng([self.seed, 4, first])
        drawn = drawer.choice(len(others), size=self.k - 1, replace=False, p=others / others.sum())
        return [first, *drawn.tolist()]

    def prompts(self, count: int, repetition: int) -> list[Prompt]:
        """Return `count` prompts; each repetition has different ones."""
        rng = np.random.default_rng([self.seed, 5, repetition])
        pool, made = self.pool, []
        for documents in self.retrieved(count, repetition):
            questions = pool.questions[documents[0]]
            question = questions[int(rng.integers(len(questions)))]
            made.append((pool.system, *(pool.documents[at] for at in documents), question))
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """KV capacity in tokens, the same for all arms that have the tier."""

    device: int
    host: int
    disk: int
    plenty: int
    """Capacity that no runtime exhausts."""
    longest: int
    """Tokens of prompt and answer of the longest request."""


DEVICE_SHARE = 0.10
"""Share of the KV of all distinct documents that fits on the device in addition to running requests."""
HOST_SHARE = 0.40
DISK_SHARE = 4.0
"""Above 1, because the tree keeps a document once for each path that leads to it."""
MAX_SEQS = 4
"""Requests that run concurrently (RAGCache 7.1)."""
_BLOCK = 32
"""Tokens; a multiple of every runtime's block size."""


def budget_for(
    pool: Pool,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    device_share: float = DEVICE_SHARE,
    host_share: float = HOST_SHARE,
) -> Budget:
    """Return the capacity for concurrently running prompts and a share of the documents."""
    documents = sum(map(_rounded, map(len, pool.documents)))
    needs = [sum(_rounded(len(part)) for part in prompt) + _rounded(max_tokens) for prompt in prompts]
    running = max(max(needs), round(MAX_SEQS * sum(needs) / len(needs)))
    return Budget(
        device=_rounded(running + round(device_share * documents), _BLOCK),
        host=round(host_share * documents),
        disk=round(DISK_SHARE * documents),
        plenty=_rounded(running + 2 * documents, _BLOCK),
        longest=max(sum(map(len, prompt)) for prompt in prompts) + max_tokens,
    )


def _rounded(num_tokens: int, block: int = 16) -> int:
    return -(-num_tokens // block) * block
