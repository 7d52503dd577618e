"""Packs examples as tokens into rows of fixed length, rendered by Stillroom's prompt builder.

R rows, T tokens. Each token has a position, a sample and a branch. Branch 0 is the context (system prompt and chunks),
which every branch of its sample attends to. Another branch (question and answer) attends to the context and itself, at
the positions it has in a prompt with one question. Batch n is a function of the seed and n, so training resumes from
any step.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.models.tokenizer import Tokenizer
from training.data.collection import Library
from training.data.tasks import Branch, Example, Mixture, compose
from training.data.tokens import END, STOP

NO_TARGET = -100
_MAX_MISSES = 3
"""Examples that fit in no row after which a batch counts as full."""
_MAX_TOO_LONG = 1000
"""Consecutive examples longer than a row after which batching fails."""
_MIN_FILLER = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """One example as tokens."""

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    """Token that each token predicts; `NO_TARGET` for none."""
    is_answer: NDArray[np.bool_]
    """Whether the target belongs to an answer instead of text."""
    positions: NDArray[np.int32]
    branches: NDArray[np.int32]
    kinds: tuple[str, ...] = ()
    """Kinds of its questions."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of arrays of shape (R, T)."""

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    is_answer: NDArray[np.bool_]
    positions: NDArray[np.int32]
    samples: NDArray[np.int32]
    """Number of the sample within its row from 1; 0 is padding, which attends to itself."""
    branches: NDArray[np.int32]
    kinds: dict[str, int]
    """Number of questions by kind."""


class Renderer:
    """Renders examples as samples for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompts = PromptBuilder(tokenizer, format_for(tokenizer))
        (self._stop,), (self._end,) = tokenizer.encode_template(STOP), tokenizer.encode_template(END)

    def render(self, example: Example, max_tokens: int) -> Sample | None:
        """Return the context with as many branches as fit; None if none fits."""
        context = self._prompts.build(example.chunks, "?", None).segments[:-1]
        ids = [token for segment in context for token in segment.token_ids]
        num_system = len(context[0].token_ids)
        parts, kinds = [_Part(ids, num_system, len(ids))], []
        room = max_tokens - len(ids)
        for branch in example.branches:
            part = self._branch(branch)
            if len(part.ids) <= room:
                parts.append(part)
                kinds.append(branch.kind)
                room -= len(part.ids)
        return _joined(parts, kinds) if kinds else None

    def text(self, text: str, max_tokens: int) -> Sample:
        """Return plain text after an end token, cut to `max_tokens`."""
        ids = [self._end, *self._tokenizer.encode_text(text), self._end][:max_tokens]
        return _joined([_Part(ids, 1, len(ids))], [])

    def _branch(self, branch: Branch) -> "_Part":
        question = self._prompts.build((), branch.question, None).segments[-1].token_ids
        return _Part([*question, *self._tokenizer.encode_text(branch.answer), self._stop], 1, len(question))


@dataclass(frozen=True, slots=True)
class _Part:
    """Token ids whose targets are [first, answer_at) as text and [answer_at, end) as an answer."""

    ids: list[int]
    first: int
    answer_at: int


def _joined(parts: list[_Part], kinds: list[str]) -> Sample:
    start = len(parts[0].ids)
    tokens: list[int] = []
    targets: list[int] = []
    is_answer: list[bool] = []
    positions: list[int] = []
    branches: list[int] = []
    for number, part in enumerate(parts):
        size = len(part.ids)
        tokens += part.ids
        # token i predicts token i + 1 of its own part
        targets += [part.ids[at] if at >= part.first else NO_TARGET for at in range(1, size)] + [NO_TARGET]
        is_answer += [number > 0 and at >= part.answer_at for at in range(1, size)] + [False]
        positions += range(start if number else 0, (start if number else 0) + size)
        branches += [number] * size
    return Sample(
        np.asarray(tokens, np.int32),
        np.asarray(targets, np.int32),
        np.asarray(is_answer, np.bool_),
        np.asarray(positions, np.int32),
        np.asarray(branches, np.int32),
        tuple(kinds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Makes the batches of a run."""

    library: Library
    renderer: Renderer
    mixture: Mixture
    num_rows: int
    row_tokens: int
    num_steps: int
    """Steps of the whole run; difficulty increases with progress."""
    seed: int

    def batch(self, number: int) -> Batch:
        """Fill rows first-fit with examples, and the rest of each row with text.

        Raises:
            ValueError: rows are too short for any example.
        """
        rows: list[list[Sample]] = [[] for _ in range(self.num_rows)]
        room = [self.row_tokens] * self.num_rows
        kinds: dict[str, int] = {}
        misses = 0
        for sample in self._samples(number):
            place = next((row for row, left in enumerate(room) if left >= len(sample)), None)
            if place is None:
                misses += 1
                if misses == _MAX_MISSES:
                    break
                continue
            rows[place].append(sample)
            room[place] -= len(sample)
            for kind in sample.kinds:
                kinds[kind] = kinds.get(kind, 0) + 1
        rng = random.Random(f"{self.seed}:{number}:text")
        for place, left in enumerate(room):
            while left >= _MIN_FILLER:
                filler = self.renderer.text(self.library.any_passage(rng).text, left)
                rows[place].append(filler)
                left -= len(filler)
        return _batch(rows, self.row_tokens, kinds)

    def _samples(self, number: int) -> Iterator[Sample]:
        progress = number / max(1, self.num_steps)
        too_long = 0
        for place in count():
            rng = random.Random(f"{self.seed}:{number}:{place}")
            example = compose(self.library, self.mixture, rng, progress)
            sample = self.renderer.render(example, self.row_tokens)
            if sample is not None:
                too_long = 0
                yield sample
            elif (too_long := too_long + 1) == _MAX_TOO_LONG:
                raise ValueError(f"no example fits into a row of {self.row_tokens} tokens; raise row_tokens")


def _batch(rows: list[list[Sample]], row_tokens: int, kinds: dict[str, int]) -> Batch:
    shape = (len(rows), row_tokens)
    batch = Batch(
        tokens=np.zeros(shape, np.int32),
        targets=np.full(shape, NO_TARGET, np.int32),
        is_answer=np.zeros(shape, np.bool_),
        positions=np.zeros(shape, np.int32),
        samples=np.zeros(shape, np.int32),
        branches=np.zeros(shape, np.int32),
        kinds=kinds,
    )
    for place, samples in enumerate(rows):
        at = 0
        for number, sample in enumerate(samples, start=1):
            part = slice(at, at + len(sample))
            for name in ("tokens", "targets", "is_answer", "positions", "branches"):
                getattr(batch, name)[place, part] = getattr(sample, name)
            batch.samples[place, part] = number
            at += len(sample)
    return batch
