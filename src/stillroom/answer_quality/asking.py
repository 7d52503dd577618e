"""Runs questions with and without KV reuse at any position and scores the answers (Cache-Craft 5.2).

The engine answers each question once without reuse, then once per arm over documents whose KV was computed in another
context. Decoding is greedy, so everything but time is reproducible.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from stillroom.answer_quality.answer_metrics import exact_match, jaccard, rouge_l, word_f1
from stillroom.answer_quality.arms import FULL, PREFIX, RATIOS, SELECTORS, SET, QualityArm
from stillroom.answer_quality.early_termination import TerminatingModel, Termination
from stillroom.answer_quality.questions import ChunkQuestion, load_questions
from stillroom.backends.assembly import KVCache
from stillroom.backends.engine_building import build_engine, load_configured
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.config.settings import ReuseConfig, RuntimeConfig, TokenSelector
from stillroom.core.batch import TokenLogprobs
from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import RequestId
from stillroom.core.request import Request, SamplingParams
from stillroom.core.reuse import PromptReuse, Reason
from stillroom.engine.engine import Engine
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions, Reusability
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.models.bundled_models import MICROWORLD
from stillroom.models.loader import LoadedModel
from stillroom.rag.answer import Source, Support
from stillroom.rag.citations import cite

_NUM_TOP = 20

Context = Literal["foreign", "shuffled"]
"""Context in which a document's KV is computed before it is reused. `foreign`: behind a document of another question.
`shuffled`: among the question's own documents in another order."""


def bench_runtime(model: str) -> RuntimeConfig:
    """Return the settings of a comparison of arms: float32 on the CPU, each prompt prefilled in one step."""
    return RuntimeConfig(model=model, device="cpu", dtype="float32", max_num_batched_tokens=8192)


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """Questions, model and arms of a quality measurement."""

    questions: Path
    num_questions: int | None = None
    """Upper limit; None: all questions."""
    runtime: RuntimeConfig = field(default_factory=lambda: bench_runtime(MICROWORLD))
    reuse: ReuseConfig = field(default_factory=lambda: ReuseConfig(token_selector="context"))
    """Its selector decides which tokens' attention is measured: `context` measures all. Arms set the other options."""
    ratios: tuple[float, ...] = RATIOS
    selectors: tuple[TokenSelector, ...] = SELECTORS
    alphas: tuple[float, ...] = ()
    """Adds arms whose budget is alpha times each document's CFO."""
    focus_window: int = 0
    """Adds arms with Cache-Craft's Algorithm 1 over this many layers; 0 adds none."""
    has_unturned: bool = False
    """Adds arms whose keys are not rotated."""
    context: Context = "foreign"
    num_chunks: int | None = None
    max_words: int | None = None
    seed: int = 0
    """`num_chunks`, `max_words` and `seed` are those of `load_questions`."""
    max_tokens: int = 16

    def load(self) -> list[ChunkQuestion]:
        """Read the questions. Raises as `load_questions`."""
        return load_questions(
            self.questions, self.num_questions, num_chunks=self.num_chunks, max_words=self.max_words, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class EngineReply:
    """The tokens and timing of one answer."""

    token_ids: tuple[int, ...]
    first: TokenLogprobs
    """Log probabilities of the first token."""
    reuse: PromptReuse
    ttft_seconds: float
    termination: Termination | None = None
    """Of an arm that ends recomputation early."""


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """The scores of one question under one arm."""

    is_right: float
    """SQuAD exact match, 1 or 0; NaN where no accepted answer is known."""
    f1: float
    """Word F1 against the closest accepted answer; NaN where no accepted answer is known."""
    agrees: float
    """1 if all tokens equal those of a full prefill."""
    token_agreement: float
    """Share of the full prefill's tokens before the first difference."""
    rouge: float
    """ROUGE-L F1 of the answer against the full prefill's."""
    jaccard: float
    """Jaccard similarity of the answer's words and the full prefill's."""
    divergence: float
    """KL divergence of the first token from the full prefill's, over its 20 likeliest tokens, in nats."""
    recomputed: float
    """Share of the placed tokens that was recomputed; a token in some of the layers counts in proportion."""
    ttft_seconds: float
    support: tuple[Support, ...] = ()
    """Of each sentence of the answer by the question's documents, by words only (`rag/citations.py`)."""
    reusability: Reusability | None = None
    """Mean overlap and impact over the tokens of the placed documents; None without any, or if not measured."""
    termination: Termination | None = None


def ask_all(
    options: QualityOptions,
    questions: Sequence[ChunkQuestion],
    arms: Sequence[QualityArm],
    *,
    has_exact: bool = True,
    shortened: Mapping[str, Sequence[ChunkQuestion]] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[QuestionOutcome]]:
    """Answer every question under every arm.

    Args:
        has_exact: adds the arms of a prefix cache and a set cache.
        shortened: adds arms without reuse: by their name the same questions over other, shorter documents.

    Returns:
        Arm name -> one outcome per question, in the order of the questions; the full prefill comes first.
    """
    bench = _Asker(load_configured(options.runtime), options)
    outcomes: dict[str, list[QuestionOutcome]] = {name: [] for name in (FULL, *(arm.name for arm in arms))}
    for number, question in enumerate(questions):
        foreign = questions[number - 1].chunks if len(questions) > 1 else question.chunks[::-1]
        full = bench.ask_without_reuse(question)
        outcomes[FULL].append(bench.judge(question, full, full))
        bench.cache_in_other_context(question, foreign)
        for arm in arms:
            outcomes[arm.name].append(bench.judge(question, full, bench.ask_anywhere(question, arm)))
        if has_exact:  # last, because the other arms could reuse the exact KV that these cache
            for name, chunks in ((PREFIX, question.chunks), (SET, _shuffled(question.chunks))):
                outcomes.setdefault(name, []).append(bench.judge(question, full, bench.ask_again(question, chunks)))
        for name, others in (shortened or {}).items():
            reply = bench.ask_without_reuse(others[number])
            outcomes.setdefault(name, []).append(bench.judge(question, full, reply))
        bench.clear()
        on_progress(number + 1, len(questions))
    return outcomes


def _shuffled(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks in another order, which depends on the chunks alone."""
    order = list(chunks)
    random.Random(",".join(str(chunk.chunk_id) for chunk in chunks)).shuffle(order)
    return order if order != list(chunks) else order[::-1]


def engine_settings(options: QualityOptions) -> tuple[RuntimeConfig, ReuseConfig]:
    """Return the configured settings, with the storage and use of KV overridden.

    Two engines share `kv_bytes`. All cached documents are placed, host memory holds them, the disk tier and audits are
    off.
    """
    runtime = replace(options.runtime, kv_bytes=options.runtime.kv_bytes // 2)
    host_bytes = max(options.reuse.host_bytes, ReuseConfig().host_bytes)
    reuse = replace(options.reuse, mode="anywhere", audit_share=0.0, load="always", host_bytes=host_bytes, disk_bytes=0)
    return runtime, reuse


class _Asker:
    """Two engines of one model: one without reuse, one whose reuse options change per arm."""

    def __init__(self, model: LoadedModel, options: QualityOptions) -> None:
        self._model, self._decoder = model, TerminatingModel(model.decoder)
        self._options = options
        self._prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer))
        clock, (runtime, reuse) = SystemClock(), engine_settings(options)
        self._off, _ = build_engine(model.decoder, runtime, clock)
        self._anywhere: Engine
        self._cache: KVCache
        self._anywhere, self._cache = build_engine(
            self._decoder,
            runtime,
            clock,
            reuse=reuse,
            fingerprint=model.fingerprint,
            profile=linear_profile(1e-3, 1e-4, 1e-7),
        )
        self._num_requests = 0

    def ask_without_reuse(self, question: ChunkQuestion) -> EngineReply:
        return self._ask(self._off, question.chunks, question.question, self._options.max_tokens)

    def cache_in_other_context(self, question: ChunkQuestion, foreign: Sequence[Chunk]) -> None:
        """Compute and cache the exact KV of each chunk in another context."""
        self._set(None)
        if self._options.context == "shuffled":
            self._ask(self._anywhere, _shuffled(question.chunks), question.question, 1)
            return
        for index, chunk in enumerate(question.chunks):
            self._ask(self._anywhere, (foreign[index % len(foreign)], chunk), question.question, 1)

    def ask_anywhere(self, question: ChunkQuestion, arm: QualityArm) -> EngineReply:
        self._set(arm.options)
        if not arm.ends_after:
            return self._ask(self._anywhere, question.chunks, question.question, self._options.max_tokens)
        self._decoder.expect(self._prompts.build(question.chunks, question.question, None), arm.ends_after)
        reply = self._ask(self._anywhere, question.chunks, question.question, self._options.max_tokens)
        found = replace(reply, termination=self._decoder.termination)
        self._decoder.expect(None)
        return found

    def ask_again(self, question: ChunkQuestion, chunks: Sequence[Chunk]) -> EngineReply:
        """Answer a prompt whose exact KV was cached by an identical prompt."""
        self._set(None)
        self._ask(self._anywhere, chunks, question.question, 1)
        return self._ask(self._anywhere, chunks, question.question, self._options.max_tokens)

    def clear(self) -> None:
        assert self._cache.tree is not None
        self._cache.tree.clear()

    def judge(self, question: ChunkQuestion, full: EngineReply, reply: EngineReply) -> QuestionOutcome:
        answer = self._model.tokenizer.decode(reply.token_ids)
        wanted = self._model.tokenizer.decode(full.token_ids)
        same = _num_equal(full.token_ids, reply.token_ids)
        num_placed = sum(one.num_tokens for one in reply.reuse.segments if one.reason is Reason.ANYWHERE)
        num_saved = 0.0 if reply.termination is None else reply.termination.saved_tokens
        return QuestionOutcome(
            is_right=exact_match(answer, question.answers) if question.answers else math.nan,
            f1=word_f1(answer, question.answers) if question.answers else math.nan,
            agrees=float(full.token_ids == reply.token_ids),
            token_agreement=same / max(len(full.token_ids), 1),
            rouge=rouge_l(answer, [wanted]),
            jaccard=jaccard(answer, [wanted]),
            divergence=_divergence(full.first, reply.first),
            recomputed=(reply.reuse.num_recomputed_tokens - num_saved) / max(num_placed, 1),
            ttft_seconds=reply.ttft_seconds,
            support=_support_of(answer, question),
            reusability=_reusability(reply.reuse),
            termination=reply.termination,
        )

    def _set(self, options: AnywhereOptions | None) -> None:
        self._cache.manager.allow_anywhere(options)

    def _ask(self, engine: Engine, chunks: Sequence[Chunk], question: str, max_tokens: int) -> EngineReply:
        self._num_requests += 1
        request = Request(
            request_id=RequestId(f"q{self._num_requests}"),
            prompt=self._prompts.build(chunks, question, None),
            sampling=SamplingParams(max_tokens=max_tokens, logprobs=_NUM_TOP),
            stop_token_ids=self._model.stop_token_ids,
        )
        start, ttft_seconds = time.perf_counter(), math.nan
        engine.submit(request)
        events = []
        while engine.has_work:
            events += engine.step()
            if events and math.isnan(ttft_seconds):
                ttft_seconds = time.perf_counter() - start
        token_ids = tuple(event.token_id for event in events if event.token_id is not None)
        first = next((event.logprobs for event in events if event.logprobs is not None), TokenLogprobs(0.0, ()))
        reuse = next(event.reuse for event in events if event.reuse is not None)
        return EngineReply(token_ids, first, reuse, ttft_seconds)


def _support_of(answer: str, question: ChunkQuestion) -> tuple[Support, ...]:
    """Return the best support of each sentence of an answer that states something."""
    sources = [
        Source(chunk.document_id, str(chunk.chunk_id), chunk.text, 0.0, {}, position, chunk.heading, 0, 0)
        for position, chunk in enumerate(question.chunks, start=1)
    ]
    order = list(Support)
    found: dict[int, Support] = {}
    for one in cite(answer, sources, question=question.question):
        found[one.start] = min(found.get(one.start, one.support), one.support, key=order.index)
    return tuple(found.values())


def _reusability(reuse: PromptReuse) -> Reusability | None:
    """Return the mean over the tokens of all placed documents whose impact was measured."""
    placed = [(one.num_tokens, one.variant) for one in reuse.segments if one.variant is not None]
    known = [(count, one.overlap, one.impact) for count, one in placed if one.impact is not None]
    if not known:
        return None
    total = sum(count for count, _, _ in known)
    return Reusability(
        sum(count * overlap for count, overlap, _ in known) / total,
        sum(count * impact for count, _, impact in known) / total,
    )


def _num_equal(wanted: Sequence[int], found: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    differing = (place for place, pair in enumerate(zip(wanted, found, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(wanted), len(found)))


def _divergence(wanted: TokenLogprobs, found: TokenLogprobs) -> float:
    """Return a lower bound of the KL divergence over the likeliest tokens of `wanted`, in nats.

    A token that `found` does not list counts with the least likely log probability that `found` lists.
    """
    listed = dict(found.top)
    if not listed or not wanted.top:
        return 0.0 if found.top == wanted.top else math.inf
    least = min(listed.values())
    divergence = sum(math.exp(value) * (value - listed.get(token, least)) for token, value in wanted.top)
    return max(divergence, 0.0)
