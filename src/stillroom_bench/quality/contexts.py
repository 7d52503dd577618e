"""`stillroom bench contexts`: right answers by the context in which the KV of a chunk was computed before the question.

Each question is asked over the same search result in several orders, with KV that was computed alone, behind the chunk
before it, behind similar chunks (FusionRAG's way), behind its whole document, or in windows of it; as it is, or with a
share of its tokens computed again. Compared with a full prefill of the search result, which is what engines do, and
of the whole documents, which is what a reader would read. How to read it: docs/prepared.md
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest

from stillroom.answer_quality.answer_metrics import exact_match
from stillroom.backends.assembly import KVCache
from stillroom.backends.engine_building import build_engine, load_configured
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig, TokenSelector
from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.quality.context_questions import ContextQuestion, Place, read_questions
from stillroom_bench.quality.quality_options import ContextsOptions

FULL, WHOLE = "full prefill of the search result", "full prefill of the documents"
_DISTANCES = ((1, 1), (2, 3), (4, 6), (7, math.inf))
_NUM_SIMILAR = 3
"""Chunks in view of FusionRAG's preparing."""
_NOTES = (
    "Share of right answers (exact match). `recomputed`: this share of the prepared tokens is computed again, chosen "
    "by the question's attention, or by the deviation of values in an early layer (CacheBlend).",
    "`subject not retrieved`: the chunk that names the subject is not in the search result; only questions that need "
    "two chunks are counted there.",
)


Before = Callable[[ContextQuestion, Place], list[Place]]


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
    alone: Before = lambda question, place: []  # noqa: E731
    arms = [
        ContextArm("alone", alone),
        ContextArm("alone, 15% recomputed by question", alone, 0.15, "question"),
        ContextArm("alone, 15% recomputed by deviation", alone, 0.15, "deviation"),
        ContextArm("behind similar chunks", similar.before),
        ContextArm("behind similar chunks, 15% recomputed by question", similar.before, 0.15, "question"),
        ContextArm("behind the chunk before it", lambda question, place: _preceding(place, place[1] - 1)),
    ]
    for window in windows:
        arms.append(ContextArm(f"in windows of {window} chunks", _windowed(window)))
    whole: Before = lambda question, place: _preceding(place, 0)  # noqa: E731
    arms.append(ContextArm("behind its document", whole))
    arms.append(ContextArm("behind its document, 15% recomputed by question", whole, 0.15, "question"))
    return arms


def _preceding(place: Place, first: int) -> list[Place]:
    return [(place[0], chunk) for chunk in range(max(first, 0), place[1])]


def _windowed(length: int) -> Before:
    """The window in which a chunk has most chunks of its document before it."""
    step = max(1, length - length // 4)

    def before(question: ContextQuestion, place: Place) -> list[Place]:
        number = max(0, math.ceil((place[1] - length + 1) / step))
        return _preceding(place, number * step)

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
    asker = _Asker(options)
    arms = context_arms(options.windows, SimilarChunks())
    outcomes: list[Outcome] = []
    for number, question in enumerate(questions, start=1):
        for arm, order, is_right in asker.ask_all(question, arms, options.seed):
            outcomes.append(Outcome(arm, order, question.kind, question.distance, is_right))
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
        tables=tables_of(outcomes),
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


def _table(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, list[bool]]] = {}
    for one in outcomes:
        found.setdefault(one.arm, {}).setdefault(one.order, []).append(one.is_right)
    return [
        {"KV of the chunks": arm, **{order: _share(rights) for order, rights in by_order.items()}}
        for arm, by_order in found.items()
    ]


def _share(values: Sequence[bool]) -> str:
    """The share with its Wilson interval at 95 %."""
    interval = binomtest(sum(values), len(values)).proportion_ci(method="wilson")
    return f"{np.mean(values):.3f} ({interval.low:.3f} to {interval.high:.3f}; n={len(values)})"


class _Asker:
    """An engine whose kept KV is made anew for each question and arm."""

    def __init__(self, options: ContextsOptions) -> None:
        runtime = RuntimeConfig(model=options.model, device="cpu", dtype=options.dtype, max_num_batched_tokens=8192)
        self._model = load_configured(runtime)
        self._prompts = PromptBuilder(self._model.tokenizer, format_for(self._model.tokenizer))
        reuse = ReuseConfig(mode="prepared", load="always", disk_bytes=0)
        self._cache: KVCache
        self._engine: Engine
        self._engine, self._cache = build_engine(
            self._model.decoder,
            runtime,
            SystemClock(),
            reuse=reuse,
            fingerprint=self._model.fingerprint,
            profile=linear_profile(1e-3, 1e-4, 1e-7),
            prepare=PrepareConfig(idle_s=0.0, layer_ms=1e6),
        )
        self._max_tokens = options.max_tokens
        self._num_requests = 0

    def ask_all(
        self, question: ContextQuestion, arms: Sequence[ContextArm], seed: int
    ) -> Iterator[tuple[str, str, bool]]:
        """Yield arm, order, and whether the answer is right."""
        orders = question.orders(seed)
        everything = [
            (number, place)
            for number in sorted({document for document, _ in question.retrieved})
            for place in range(len(question.documents[number]))
        ]
        with self._placing(None):
            is_right = self._ask(question, everything, {})
            for order, places in orders.items():
                yield WHOLE, order, is_right
                yield FULL, order, self._ask(question, places, {})
        for arm in arms:
            with self._placing(AnywhereOptions(arm.ratio, arm.selector, only_prepared=True)):
                before = self._prepare(question, arm)
                for order, places in orders.items():
                    yield arm.name, order, self._ask(question, places, before)

    @contextmanager
    def _placing(self, options: AnywhereOptions | None) -> Iterator[None]:
        self._cache.manager.allow_anywhere(options)
        yield
        assert self._cache.tree is not None
        self._cache.tree.forget_chunks(lambda chunk_id: False)

    def _prepare(self, question: ContextQuestion, arm: ContextArm) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """Prepare every retrieved chunk; return what each has in view."""
        before = {}
        for place in question.retrieved:
            context = [question.chunk(other) for other in arm.before(question, place)]
            chunk = question.chunk(place)
            before[chunk.chunk_id] = tuple(one.chunk_id for one in context)
            self._run([*context, chunk], "", 1, prepares=frozenset({chunk.chunk_id}))
        return before

    def _ask(
        self, question: ContextQuestion, places: Sequence[Place], before: Mapping[ChunkId, tuple[ChunkId, ...]]
    ) -> bool:
        chunks = [question.chunk(place) for place in places]
        token_ids = self._run(chunks, question.question, self._max_tokens, before=before)
        return bool(exact_match(self._model.tokenizer.decode(token_ids), [question.answer]))

    def _run(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int,
        *,
        before: Mapping[ChunkId, tuple[ChunkId, ...]] | None = None,
        prepares: frozenset[ChunkId] = frozenset(),
    ) -> list[int]:
        self._num_requests += 1
        request = Request(
            request_id=RequestId(f"q{self._num_requests}"),
            prompt=self._prompts.build(chunks, question, None),
            sampling=SamplingParams(max_tokens=max_tokens),
            stop_token_ids=self._model.stop_token_ids,
            before=before or {},
            prepares=prepares,
        )
        self._engine.scheduler.add(request)
        events = []
        while self._engine.has_work:
            events += self._engine.step()
        return [event.token_id for event in events if event.token_id is not None]
