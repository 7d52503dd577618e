"""`stillroom bench attention`: how the chunks of a prompt attend to each other (Cache-Craft Figures 7, 9, 10 and 14).

Every prompt is computed once as a whole. Measured are the attention within and between chunks (Eq. 3, 4, 9 to 11), how
many tokens have most of it, how far the hidden states of a chunk move with each chunk before it, and whether reuse
without repair changes the answer more where the two kinds of attention overlap. How to read it: docs/chunk-reuse.md
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from stillroom.answer_quality.arms import NONE, quality_arms
from stillroom.answer_quality.asking import QualityOptions, QuestionOutcome, ask_all, bench_runtime
from stillroom.answer_quality.questions import ChunkQuestion
from stillroom.backends.engine_building import load_configured
from stillroom.core.prompt import SegmentKind
from stillroom.errors import UsageError
from stillroom.kvcache.tree.chunk_scores import ContextMass, context_impact
from stillroom_bench.experiments.experiment_options import AttentionOptions
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import bootstrapped, rank_correlation, ratio_of_means, wilson
from stillroom_bench.quality.prompt_reader import PromptReader

TOP_SHARES = (0.1, 0.2, 0.3)
"""Shares of a chunk's tokens, those with most attention to earlier chunks."""
_EQUAL_INFLUENCE = context_impact(1.0, 1.0)
"""CCI of a chunk with a = b (Eq. 9), our bound for a highly contextualised one; the paper names none.

a sums the mean weights between the chunk and each earlier one, and b divides the sum of n (n - 1) / 2 weights by the
square of n. So a > b does not say that a token outside has more attention than one inside.
"""
_NOTES = (
    "Attention is the mean over heads and layers, of all chunks of a prompt but its first. Inter: sum over the tokens "
    "of earlier chunks (Eq. 3). Intra: over earlier tokens of the chunk (Eq. 4). CCI: Eq. 11. Intervals: 95 %, over "
    "questions.",
    "Overlap: the probability that a weight between chunks exceeds a weight within the chunk, mean over the chunks of "
    "a prompt; 0.5 if the two distributions are the same.",
    "Deviation: difference of the last layer's hidden states from those behind the system message alone, relative to "
    "their length (L2), mean over the tokens of the prompt's last chunk. The chunks before it are the nearest ones.",
    "Prompts of more chunks have smaller weights between chunks and deviate more, so the last correlation compares "
    "ranks among prompts with as many chunks.",
    f"Same answer: as a full prefill's, where the chunks were kept behind a chunk of another question ({NONE}).",
)


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Attention that the tokens of one chunk pay."""

    inter: float
    """To all earlier chunks (Eq. 3)."""
    intra: float
    """To earlier tokens of the chunk (Eq. 4)."""
    impact: float
    """CCI (Eq. 11)."""
    top_shares: tuple[float, ...]
    """Share of `inter` that the `TOP_SHARES` of the tokens have."""
    overlap: float
    """Probability that a weight between chunks exceeds one within the chunk; 0.5 for equal distributions."""


def chunk_attention(weights_TT: NDArray[np.float32], chunks: Sequence[range], index: int) -> ChunkAttention:
    """Sum the attention of one chunk.

    Args:
        weights_TT: attention weights of a prompt.
        chunks: positions of its chunks, in order.
        index: of the chunk; at least 1.
    """
    assert index > 0
    own, before = chunks[index], chunks[:index]
    rows = weights_TT[own.start : own.stop].astype(np.float64)
    paid = [rows[:, chunk.start : chunk.stop] for chunk in before]
    inside = rows[:, own.start : own.stop][np.tril_indices(len(own), -1)]
    mass = ContextMass(
        num_tokens=len(own),
        prefix=tuple(b"%d" % number for number in range(index)),
        prefix_lengths=tuple(map(len, before)),
        inter=np.array([one.sum() for one in paid], np.float32),
        intra=float(inside.sum()),
    )
    by_token = np.sort(np.concatenate(paid, axis=1).sum(axis=1))[::-1]
    tops = tuple(float(by_token[: math.ceil(share * len(own))].sum() / by_token.sum()) for share in TOP_SHARES)
    outside = np.concatenate([one.ravel() for one in paid])
    return ChunkAttention(float(mass.inter.sum()), mass.intra, mass.impact, tops, _exceeds(outside, inside))


def _exceeds(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the probability that a value of `first` exceeds one of `second`; equal values count half."""
    ordered = np.sort(second)
    places = np.searchsorted(ordered, first, "left") + np.searchsorted(ordered, first, "right")
    return float(places.mean() / (2 * max(len(ordered), 1)))


def deviations(reader: PromptReader, question: ChunkQuestion, num_before: int) -> NDArray[np.float64]:
    """Return how far the hidden states of the last chunk are from those without other chunks.

    Returns:
        [num_before] for 1 to `num_before` chunks before it, the nearest ones.
    """
    chunks = question.chunks[-1 - num_before :]
    states = []
    for count in range(num_before + 1):
        segments = reader.segments(chunks[num_before - count :], question.question)
        read = [(segment, place) for segment, place in segments if segment.kind is not SegmentKind.QUESTION]
        hidden_TM = reader.hidden_states([token for segment, _ in read for token in segment.token_ids])
        last = read[-1][1]
        states.append(hidden_TM[last.start : last.stop].double())
    length_T = states[0].norm(dim=1)
    return np.array([float(((one - states[0]).norm(dim=1) / length_T).mean()) for one in states[1:]])


def run_attention(options: AttentionOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Measure every question.

    Raises:
        UsageError: the file has no questions, none with two chunks, or a prompt is too long for the model.
        ModelError, ConfigError: the model cannot be used.
    """
    environment = record_environment()
    asked = QualityOptions(
        options.questions,
        options.num_questions,
        bench_runtime(options.model),
        num_chunks=options.num_chunks,
        max_words=options.max_words,
        seed=options.seed,
    )
    questions = [question for question in asked.load() if len(question.chunks) > 1]
    if not questions:
        raise UsageError(f"{options.questions} has no question with two chunks or more")
    reader = PromptReader(load_configured(asked.runtime))
    found: list[list[ChunkAttention]] = []
    for question in questions:
        chunks, weights_TT = reader.attention(question.chunks, question.question)
        found.append([chunk_attention(weights_TT, chunks, index) for index in range(1, len(chunks))])
    on_progress("attention is measured; the answers follow")
    moved = [
        deviations(reader, question, options.num_before)
        for question in questions
        if len(question.chunks) > options.num_before
    ]
    arms = [arm for arm in quality_arms((), ()) if arm.name == NONE]
    outcomes = ask_all(asked, questions, arms, has_exact=False)[NONE]
    return BenchResult(
        "stillroom bench attention",
        environment,
        {
            "questions": options.questions.name,
            "num_questions": len(questions),
            "model": options.model,
            "num_chunks": options.num_chunks,
            "max_words": options.max_words,
            "seed": options.seed,
        },
        Samples(),
        notes=list(_NOTES),
        tables={
            "Attention within and between chunks": _sums(found),
            "Share of the attention to earlier chunks": _tops(found),
            "Deviation of the last chunk, by chunks before it": _moves(moved),
            "Overlap of both kinds of attention, and answers of reuse without repair": _answers(found, outcomes),
        },
    )


def _of_questions(
    found: Sequence[Sequence[ChunkAttention]], value: Callable[[ChunkAttention], float]
) -> NDArray[np.float64]:
    """Return the mean over the chunks of each question."""
    return np.array([np.mean([value(one) for one in chunks]) for chunks in found])


def _sums(found: Sequence[Sequence[ChunkAttention]]) -> list[dict[str, Any]]:
    chunks = [one for of_question in found for one in of_question]
    low, middle, high = np.percentile([one.impact for one in chunks], [10, 50, 90])
    intra, inter = (_of_questions(found, value).tolist() for value in (lambda one: one.intra, lambda one: one.inter))
    return [
        {
            "questions": len(found),
            "chunks": len(chunks),
            "intra / inter": str(ratio_of_means(intra, inter, block=1)),
            "CCI, p10": f"{low:.3f}",
            "p50": f"{middle:.3f}",
            "p90": f"{high:.3f}",
            "CCI, mean": str(bootstrapped(_of_questions(found, lambda one: one.impact))),
            "outside counts more (a > b)": str(
                bootstrapped(_of_questions(found, lambda one: float(one.impact > _EQUAL_INFLUENCE)))
            ),
            "overlap": str(bootstrapped(_of_questions(found, lambda one: one.overlap))),
        }
    ]


def _tops(found: Sequence[Sequence[ChunkAttention]]) -> list[dict[str, Any]]:
    rows = []
    for place, share in enumerate(TOP_SHARES):
        values = _of_questions(found, lambda one, place=place: one.top_shares[place])  # type: ignore[misc]
        rows.append({"tokens with most": share_name(share), "their share": str(bootstrapped(values))})
    return rows


def _moves(moved: Sequence[NDArray[np.float64]]) -> list[dict[str, Any]]:
    rows = []
    for count in range(1, len(moved[0]) + 1) if moved else ():
        own, first = ([float(one[place]) for one in moved] for place in (count - 1, 0))
        row = {"chunks before": count, "questions": len(moved), "deviation": str(bootstrapped(np.array(own)))}
        rows.append(row | {"of that of one chunk": "" if count == 1 else str(ratio_of_means(own, first, block=1))})
    return rows


def _answers(found: Sequence[Sequence[ChunkAttention]], outcomes: Sequence[QuestionOutcome]) -> list[dict[str, Any]]:
    overlaps = _of_questions(found, lambda one: one.overlap)
    is_high = overlaps > np.median(overlaps)
    rows: list[dict[str, Any]] = []
    for name, chosen in (("lower half", ~is_high), ("higher half", is_high)):
        agrees = [one.agrees for one, is_chosen in zip(outcomes, chosen, strict=True) if is_chosen]
        row: dict[str, Any] = {"overlap": name, "questions": len(agrees)}
        row["mean overlap"] = f"{overlaps[chosen].mean():.3f}" if len(agrees) else ""
        row["same answer"] = str(wilson(int(sum(agrees)), len(agrees))) if agrees else ""
        rows.append(row | {"Spearman, KL of first token": "", "the same, among prompts of as many chunks": ""})
    deviations_Q = np.array([one.divergence for one in outcomes])
    sizes = np.array([len(chunks) for chunks in found])
    correlations = {
        "Spearman, KL of first token": rank_correlation(overlaps.tolist(), deviations_Q.tolist()),
        "the same, among prompts of as many chunks": rank_correlation(
            among_equals(overlaps, sizes).tolist(), among_equals(deviations_Q, sizes).tolist()
        ),
    }
    rows.append(
        {
            "overlap": "all",
            "questions": len(outcomes),
            "mean overlap": f"{overlaps.mean():.3f}",
            "same answer": str(wilson(int(sum(one.agrees for one in outcomes)), len(outcomes))),
            **{name: "one value" if one is None else str(one) for name, one in correlations.items()},
        }
    )
    return rows


def among_equals(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the rank of each value among those of its size, as a share of them in (0, 1); equal values share one."""
    ranks = np.empty(len(values))
    for size in np.unique(sizes):
        own = sizes == size
        ranks[own] = (stats.rankdata(values[own]) - 0.5) / own.sum()
    return ranks
