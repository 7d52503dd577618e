"""`stillroom bench contexts`: right answers by the context in which the KV of a chunk was computed before the question.

Each question is asked over the same search result in several orders, with KV that was computed alone, behind the chunk
before it, behind similar chunks (FusionRAG's way), behind its whole document, or in windows of it; as it is, or with a
share of its tokens computed again. Compared with a full prefill of the search result, which is what engines do, and
of the whole documents, which is what a reader would read. How to read it: docs/prepared.md
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.config.settings import TokenSelector
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import wilson
from stillroom_bench.quality.context_asking import ContextAsker
from stillroom_bench.quality.context_questions import (
    Before,
    ContextQuestion,
    Place,
    alone,
    preceding,
    read_questions,
    whole_document,
)
from stillroom_bench.quality.quality_options import ContextsOptions

FULL, WHOLE = "full prefill of the search result", "full prefill of the documents"
_DISTANCES = ((1, 1), (2, 3), (4, 6), (7, math.inf))
_NUM_SIMILAR = 3
"""Chunks in view of FusionRAG's preparing."""
_NOTES = (
    "Share of right answers (exact match). `recomputed`: this share of the prepared tokens is computed again, chosen "
    "by the question's attention, or by the deviation of values in an early layer (CacheBlend).",
    "`N bits`: behind its document, kept in N bits a number on the host between preparing and the question. Lost: "
    "right with 16 bits and wrong with fewer; gained: the reverse.",
    "`subject not retrieved`: the chunk that names the subject is not in the search result; only questions that need "
    "two chunks are counted there.",
)


@dataclass(frozen=True, slots=True)
class ContextArm:
    """How chunks are prepared, and what of them is computed again."""

    name: str
    before: Before
    """The chunks in view when a chunk is prepared, in order."""
    ratio: float = 0.0
    selector: TokenSelector = "first"


def context_arms(windows: Sequence[int], similar: "SimilarChunks") -> list[ContextArm]:
    """Return the arms; `windows` are lengths in chunks, each with an overlap of a quarter."""
    arms = [
        ContextArm("alone", alone),
        ContextArm("alone, 15% recomputed by question", alone, 0.15, "question"),
        ContextArm("alone, 15% recomputed by deviation", alone, 0.15, "deviation"),
        ContextArm("behind similar chunks", similar.before),
        ContextArm("behind similar chunks, 15% recomputed by question", similar.before, 0.15, "question"),
        ContextArm("behind the chunk before it", lambda question, place: preceding(place, place[1] - 1)),
    ]
    for window in windows:
        arms.append(ContextArm(f"in windows of {window} chunks", _windowed(window)))
    arms.append(ContextArm("behind its document", whole_document))
    arms.append(ContextArm("behind its document, 15% recomputed by question", whole_document, 0.15, "question"))
    return arms


def _windowed(length: int) -> Before:
    """The window in which a chunk has most chunks of its document before it."""
    step = max(1, length - length // 4)

    def before(question: ContextQuestion, place: Place) -> list[Place]:
        number = max(0, math.ceil((place[1] - length + 1) / step))
        return preceding(place, number * step)

    return before


class SimilarChunks:
    """The chunks that share most rare words with a chunk; FusionRAG prepares behind similar chunks."""

    def __init__(self) -> None:
        self._question: ContextQuestion | None = None
        self._words: dict[Place, frozenset[str]] = {}
        self._weights: dict[str, float] = {}

    def before(self, question: ContextQuestion, place: Place) -> list[Place]:
        if question is not self._question:
            self._read(question)
        others = (other for other in self._words if other != place)
        return sorted(others, key=lambda other: -self._similarity(place, other))[:_NUM_SIMILAR]

    def _read(self, question: ContextQuestion) -> None:
        self._question = question
        self._words = {
            (number, at): frozenset(chunk.text.lower().split())
            for number, document in enumerate(question.documents)
            for at, chunk in enumerate(document)
        }
        counts = Counter(word for words in self._words.values() for word in words)
        self._weights = {word: math.log(len(self._words) / count) for word, count in counts.items()}

    def _similarity(self, one: Place, other: Place) -> float:
        return sum(self._weights[word] for word in self._words[one] & self._words[other])


def run_contexts(options: ContextsOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Ask every question in every order under every arm.

    Raises:
        UsageError: the file of questions cannot be used.
        ModelError: the model cannot be loaded.
    """
    questions = read_questions(options.questions, options.num_questions)
    environment = record_environment()
    asker = ContextAsker(options.model, options.dtype, options.max_tokens)
    widths = {
        bits: ContextAsker(options.model, options.dtype, options.max_tokens, bits)
        for bits in sorted({16, *options.bits}, reverse=True)
        if options.bits
    }
    arms = context_arms(options.windows, SimilarChunks())
    outcomes: list[Outcome] = []
    for number, question in enumerate(questions, start=1):
        for arm, order, is_right in _ask_all(asker, question, arms, options.seed):
            outcomes.append(Outcome(arm, order, question.kind, question.distance, is_right))
        for bits, narrow in widths.items():
            for order, is_right in _ask_by_width(narrow, question, options.seed):
                outcomes.append(Outcome(_width(bits), order, question.kind, question.distance, is_right))
        if number % 25 == 0 or number == len(questions):
            on_progress(f"{number} of {len(questions)} questions")
    parameters = {
        "questions": options.questions.name,
        "num_questions": len(questions),
        "model": options.model,
        "dtype": options.dtype,
        "seed": options.seed,
    }
    return BenchResult(
        "stillroom bench contexts",
        environment,
        parameters,
        _samples(outcomes),
        tables=tables_of(outcomes) | widths_table(outcomes, list(widths)),
        notes=list(_NOTES),
        sample_of="question",
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question in one order under one arm."""

    arm: str
    order: str
    kind: str
    distance: int
    is_right: bool


def _samples(outcomes: Sequence[Outcome]) -> Samples:
    samples = Samples()
    for one in outcomes:
        samples.values.setdefault(f"{one.order}/{one.arm}", {}).setdefault("right", []).append(float(one.is_right))
    return samples


def tables_of(outcomes: Sequence[Outcome]) -> dict[str, list[dict[str, Any]]]:
    """Return a table per kind of question, and for `split` one by distance."""
    kinds = dict.fromkeys(one.kind for one in outcomes)
    tables = {f"Right answers, {kind} questions": _table(one for one in outcomes if one.kind == kind) for kind in kinds}
    for first, last in _DISTANCES:
        chosen = [one for one in outcomes if one.kind == "split" and first <= one.distance <= last]
        if chosen:
            where = f"{first} or more" if last == math.inf else f"{first} to {last:.0f}" if last > first else f"{first}"
            tables[f"Right answers, fact {where} behind the chunk that names its subject"] = _table(chosen)
    return tables


def widths_table(outcomes: Sequence[Outcome], widths: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Return a table that compares the answers of each width with those of the first, over all orders; none without."""
    if not widths:
        return {}
    first, *others = ([one.is_right for one in outcomes if one.arm == _width(bits)] for bits in widths)
    rows: list[dict[str, Any]] = [{"bits": widths[0], "right": share_of_right(first), "lost": "", "gained": ""}]
    for bits, rights in zip(widths[1:], others, strict=True):
        pairs = list(zip(first, rights, strict=True))
        lost, gained = [one and not other for one, other in pairs], [other and not one for one, other in pairs]
        shares = {"lost": share_of_right(lost), "gained": share_of_right(gained)}
        rows.append({"bits": bits, "right": share_of_right(rights), **shares})
    return {"Answers by bits of a number": rows}


def _width(bits: int) -> str:
    return f"behind its document, {bits} bits"


def _table(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, list[bool]]] = {}
    for one in outcomes:
        found.setdefault(one.arm, {}).setdefault(one.order, []).append(one.is_right)
    return [
        {"KV of the chunks": arm, **{order: share_of_right(rights) for order, rights in by_order.items()}}
        for arm, by_order in found.items()
    ]


def share_of_right(values: Sequence[bool]) -> str:
    """Return the share with its Wilson interval at 95 %."""
    share = wilson(sum(values), len(values))
    return f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f}; n={len(values)})"


def _ask_all(
    asker: ContextAsker, question: ContextQuestion, arms: Sequence[ContextArm], seed: int
) -> Iterator[tuple[str, str, bool]]:
    """Yield arm, order, and whether the answer is right."""
    orders = question.orders(seed)
    everything = [
        (number, place)
        for number in sorted({document for document, _ in question.retrieved})
        for place in range(len(question.documents[number]))
    ]
    with asker.placing(None):
        is_right = asker.ask(question, everything, {})
        for order, places in orders.items():
            yield WHOLE, order, is_right
            yield FULL, order, asker.ask(question, places, {})
    for arm in arms:
        with asker.placing(AnywhereOptions(arm.ratio, arm.selector, only_prepared=True)):
            before = asker.prepare(question, question.retrieved, arm.before)
            for order, places in orders.items():
                yield arm.name, order, asker.ask(question, places, before)


def _ask_by_width(asker: ContextAsker, question: ContextQuestion, seed: int) -> Iterator[tuple[str, bool]]:
    """Yield order, and whether the answer from KV that was on the host is right."""
    with asker.placing(AnywhereOptions(0.0, "first", only_prepared=True)):
        before = asker.prepare(question, question.retrieved, whole_document)
        for order, places in question.orders(seed).items():
            asker.leave_device()
            yield order, asker.ask(question, places, before)
