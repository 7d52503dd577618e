"""The bundled reader: finds the answer to a question in passages of text.

Weights are those of `models/bundled/reader`; word embeddings and tokenizer come from the installed package of the
default embedder, from which the reader was trained.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from stillroom.core.sentences import Span, sentence_at, sentences
from stillroom.errors import ModelError
from stillroom.models.checkpoint import read_json
from stillroom.models.reader_model import ReaderModel, ReaderSpec, span_scores
from stillroom.ops.side_by_side import side_by_side

_CLS, _SEP = 101, 102
_MAX_QUESTION, _MAX_HEADING, _MAX_ROW = 64, 48, 384
_TOKEN_BLOCK = 32
_MAX_ROWS = 32
"""Rows computed at a time, which bounds the memory of activations."""
MAX_ANSWER_TOKENS = 40
_WORD = re.compile(r"\w+")
_QUESTION_MARK = re.compile(r"\W*(?:Q|Question)\s*\d*(?:\.\d+)*\s*[:.)]")
"""Before a question in lists of questions and answers."""
_MIN_ECHO = 2
"""Fewest blanks between the words of a question that a sentence may not repeat."""
_LEADERS = re.compile(r"(?:\.[ \t]?){5,}[ \t]*\d*$")
"""Dots before a page number."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text in which answers are looked for; its heading is read too but holds no answer."""

    text: str
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """The best answer in a passage."""

    span: Span
    """Its characters in the passage's text."""
    sentence: Span
    """The sentence around it; of all sentences the one whose answers have the highest sum of probabilities."""
    score: float
    """Log odds of the sentence's answers against no answer; comparable between passages."""


class Reader:
    """Reads passages. Thread-safe: it keeps no state between calls."""

    def __init__(
        self, model: ReaderModel, tokenizer: Tokenizer, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        """
        Args:
            device: None is the CPU.
        """
        self._device = device or torch.device("cpu")
        self._model = model.to(self._device, dtype).eval().requires_grad_(False)
        self._tokenizer = tokenizer

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text without special tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def read(self, question: str, passages: Sequence[Passage]) -> list[Reading | None]:
        """Return the best answer of each passage; None for a passage without words.

        A passage has the same reading whichever others are read with it.
        """
        return self.read_several([(question, passages)])[0]

    def read_several(self, questions: Sequence[tuple[str, Sequence[Passage]]]) -> list[list[Reading | None]]:
        """`read` for several questions at once, each with its own passages."""
        passages = [passage for _, own in questions for passage in own]
        asked = [question for question, own in questions for _ in own]
        rows = [row for question, own in questions for row in self._rows(question, own)]
        readings: list[Reading | None] = [None] * len(rows)
        batches = list(_batches([len(row.ids) if len(row.offsets) else 0 for row in rows], self._num_parts()))

        def compute(batch: tuple[int, list[int]]) -> list[NDArray[np.float32]]:
            length, indexes = batch
            return self._logits([rows[index] for index in indexes], length)

        parts = side_by_side(compute, batches) if len(batches) > 1 and self._num_parts() > 1 else None
        for position, found in parts or enumerate(map(compute, batches)):
            for index, logits in zip(batches[position][1], found, strict=True):
                readings[index] = best_reading(passages[index].text, rows[index].offsets, logits, asked[index])
        in_order = iter(readings)
        return [[next(in_order) for _ in own] for _, own in questions]

    def _num_parts(self) -> int:
        """Batches to compute at a time, each on one thread."""
        return torch.get_num_threads() if self._device.type == "cpu" else 1

    def _rows(self, question: str, passages: Sequence[Passage]) -> "list[_Row]":
        asked = self._tokenizer.encode(question, add_special_tokens=False).ids[:_MAX_QUESTION]
        return [self._row(asked, passage) for passage in passages]

    def _row(self, asked: list[int], passage: Passage) -> "_Row":
        heading = self._tokenizer.encode(passage.heading, add_special_tokens=False).ids[:_MAX_HEADING]
        encoding = self._tokenizer.encode(passage.text, add_special_tokens=False)
        head = [_CLS, *asked, _SEP, *heading]
        room = _MAX_ROW - len(head) - 1
        offsets = np.array(encoding.offsets[:room], np.int64).reshape(-1, 2)
        return _Row([*head, *encoding.ids[:room], _SEP], len(asked) + 2, len(head), offsets)

    def _logits(self, rows: "Sequence[_Row]", length: int) -> list[NDArray[np.float32]]:
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        parts, is_token = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.tensor(row.ids)
            parts[number, row.num_question : len(row.ids)] = 1
            is_token[number, : len(row.ids)] = True
        with torch.inference_mode():
            inputs = (ids.to(self._device), parts.to(self._device), is_token.to(self._device))
            logits = self._model(*inputs).cpu().numpy()
        return [logits[n, row.first : row.first + len(row.offsets)] for n, row in enumerate(rows)]


def load_reader(folder: Path, embedder: Path, dtype: torch.dtype, device: torch.device | None = None) -> Reader:
    """Load a reader.

    Args:
        folder: `config.json` with the sizes, and `model.safetensors` without word embeddings.
        embedder: the folder of the encoder that the reader was trained from: word embeddings and tokenizer.
        dtype: of weights and products: float32, or bfloat16 where the processor multiplies it in hardware.
        device: None is the CPU.

    Raises:
        ModelError: a file is missing or damaged, or the embedder is not the one that the reader was trained from.
    """
    sizes = read_json(folder, "config.json")
    try:
        weights = load_file(folder / "model.safetensors")
        with safe_open(embedder / "model.safetensors", framework="pt") as tensors:
            words = tensors.get_tensor("embeddings.word_embeddings.weight")
        model = ReaderModel(ReaderSpec(**sizes["spec"]))
        model.load_state_dict({**weights, "words.weight": words})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(f"the reader in {folder} cannot be loaded ({error}); install the package again") from error
    wanted = sizes.get("word_embeddings_sha256")
    if wanted is not None and sha256(words.contiguous().numpy().reshape(-1).view(np.uint8)).hexdigest() != wanted:
        raise ModelError(
            f"the reader in {folder} was trained from another embedder than {embedder}; install both again"
        )
    tokenizer = Tokenizer.from_file(str(embedder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Reader(model, tokenizer, dtype, device)


def _batches(lengths: Sequence[int], num_parts: int = 1) -> Iterator[tuple[int, list[int]]]:
    """Yield the length to pad to and the indexes of rows that need it, longest first; rows of length 0 are left out.

    Args:
        num_parts: Batches hold at most this part of all rows, and `_MAX_ROWS`.
    """
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length:
            by_length.setdefault(-(-length // _TOKEN_BLOCK) * _TOKEN_BLOCK, []).append(index)
    most = min(_MAX_ROWS, -(-len(lengths) // num_parts)) or 1
    for length, indexes in sorted(by_length.items(), reverse=True):
        for start in range(0, len(indexes), most):
            yield length, indexes[start : start + most]


@dataclass(frozen=True, slots=True)
class _Row:
    ids: list[int]
    num_question: int
    first: int
    offsets: NDArray[np.int64]


def _states_nothing(sentence: str, asked: str) -> bool:
    """Whether a sentence is a question, holds the words of the one asked, or is a line of a table of contents."""
    is_question = sentence.rstrip("\"')]*_").endswith("?") or _QUESTION_MARK.match(sentence) is not None
    is_echo = asked.count(" ") >= _MIN_ECHO and f" {asked} " in f" {_words(sentence)} "
    return is_question or is_echo or _LEADERS.search(sentence) is not None


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))


def best_reading(text: str, offsets: NDArray[np.int64], outputs: NDArray[np.float32], question: str = "") -> Reading:
    """Choose the sentence with the highest sum of its answers' probabilities, and its best answer.

    A question, a sentence that holds the one asked (an example of a call), or a line of a table of contents is chosen
    only if there is nothing else: they repeat what is asked.

    Args:
        offsets: [tokens, 2], characters of each token in the text.
        outputs: of the model, [tokens, 2 + 2 * pair_size].
    """
    spans, asked = sentences(text), _words(question)
    owner = np.searchsorted([start for start, _ in spans], offsets[:, 0], side="right") - 1
    best_span, best_sum = (0, 0), -np.inf
    owners = np.unique(owner)
    for sentence in [one for one in owners if not _states_nothing(text[slice(*spans[one])], asked)] or owners:
        first, last = np.flatnonzero(owner == sentence)[[0, -1]]
        scores = span_scores(outputs[first : last + 1])
        length = np.arange(len(scores))[None, :] - np.arange(len(scores))[:, None]
        scores = np.where((length >= 0) & (length < MAX_ANSWER_TOKENS), scores, -np.inf)
        total = float(np.logaddexp.reduce(scores, axis=None))
        if total > best_sum:
            start, end = np.unravel_index(scores.argmax(), scores.shape)
            best_span, best_sum = (int(first + start), int(first + end)), total
    span = int(offsets[best_span[0], 0]), int(offsets[best_span[1], 1])
    return Reading(span, sentence_at(spans, *span), best_sum)
