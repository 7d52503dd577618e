"""`stillroom bench quality`: answer quality of KV reuse at any position (Cache-Craft 5.2; Figures 20, 21, 26, 27,
Tables 1 and 3).

Reports what `answer_quality.asking` measures. How to read it: docs/chunk-reuse.md
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from stillroom.answer_quality.arms import (
    FULL,
    NONE,
    OURS,
    alpha_name,
    arm_name,
    quality_arms,
)
from stillroom.answer_quality.asking import QualityOptions, QuestionOutcome, ask_all
from stillroom.rag.answer import Support
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import bootstrapped, paired_tests, rank_correlation, ratio_of_means, wilson
from stillroom_bench.quality.discarding import num_words, shortened_questions

_NOTE = (
    "TTFT is the median over the questions, whose arms ran one after the other; it is meaningful only if a prefill "
    "takes long enough. `stillroom bench anywhere` measures time."
)
_SHORTER_NOTE = (
    "Arms named `of the tokens` and `of the sentences` reuse nothing: their prompt has this share of the documents' "
    "text, which `computed again` counts in words. Tokens: those that the model finds least likely "
    "(Selective-Context). Sentences: those with most words of the question."
)


def run_quality(
    options: QualityOptions,
    *,
    kept: tuple[float, ...] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> BenchResult:
    """Answer every question under every arm.

    Args:
        kept: adds arms that read these shares of the documents' text, and discard the rest.

    Raises:
        UsageError: the file has no questions, or none that fits the model.
        ModelError, ConfigError: the model cannot be used, or does not support reuse at any position.
    """
    arms = quality_arms(
        options.selectors,
        options.ratios,
        options.alphas,
        focus_window=options.focus_window,
        has_unturned=options.has_unturned,
    )
    environment = record_environment()
    questions = options.load()
    shorter = shortened_questions(options.runtime, questions, kept)
    outcomes = ask_all(options, questions, arms, shortened=shorter, on_progress=on_progress)
    for name, others in shorter.items():
        outcomes[name] = [
            replace(outcome, recomputed=num_words(other) / num_words(question))
            for outcome, other, question in zip(outcomes[name], others, questions, strict=True)
        ]
    kinds = [question.kind for question in questions]
    samples = Samples()
    for name, found in outcomes.items():
        judged = [one.is_right for one in found if not math.isnan(one.is_right)]
        samples.values[name] = {"exact_match": judged} if judged else {}
        samples.values[name]["same_answer"] = [one.agrees for one in found]
    parameters = {
        "questions": options.questions.name,
        "num_questions": len(questions),
        "model": options.runtime.model,
        "dtype": options.runtime.dtype,
        "num_chunks": options.num_chunks,
        "max_words": options.max_words,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "selectors": options.selectors,
        "ratios": options.ratios,
        "alphas": options.alphas,
        "focus_window": options.focus_window,
        "kept_text": kept,
        "kept behind": "a document of another question" if options.context == "foreign" else "the same, shuffled",
    }
    tables = {
        "Exact match": _by_kind(outcomes, kinds, "is_right"),
        "F1 of words": _by_kind(outcomes, kinds, "f1"),
        "Against a full prefill": _against_full(outcomes),
        "Likeness to a full prefill's answer, and relative to no recompute": _gains(outcomes, kinds),
        f"What foretells the deviation of {NONE}": _foretelling(outcomes[NONE]),
        "Sentences that the documents support": _support(outcomes),
        f"{OURS} against each other selector, same budget": _tests(outcomes, kinds, options),
    }
    if ended := _terminations(outcomes):
        tables["Layer L* after which recomputation ends out of focus"] = ended
    sizes = [f"{len(question.chunks)} documents" for question in questions]
    if len(set(sizes)) > 1:
        tables["Same answer as a full prefill, by documents in the prompt"] = _by_size(outcomes, sizes)
    return BenchResult(
        "stillroom bench quality",
        environment,
        parameters,
        samples,
        FULL,
        tables=tables,
        notes=[_NOTE, *([_SHORTER_NOTE] if kept else [])],
        sample_of="question",
    )


def _mean(outcomes: Sequence[QuestionOutcome], field: str) -> float:
    return fmean(getattr(outcome, field) for outcome in outcomes)


def _ttft(outcomes: Sequence[QuestionOutcome]) -> float:
    return median(outcome.ttft_seconds for outcome in outcomes)


def _by_kind(outcomes: dict[str, list[QuestionOutcome]], kinds: Sequence[str], field: str) -> list[dict[str, Any]]:
    """Return a table with a row per arm and a column per kind of question."""
    rows = []
    for name, found in outcomes.items():
        row: dict[str, Any] = {"arm": name}
        for kind in sorted(set(kinds)):
            of_kind = [outcome for outcome, one in zip(found, kinds, strict=True) if one == kind]
            row[f"{kind} ({len(of_kind)})"] = f"{_mean(of_kind, field):.3f}"
        rows.append(row | {"all": f"{_mean(found, field):.3f}"})
    return rows


def _by_size(outcomes: dict[str, list[QuestionOutcome]], sizes: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per arm and a column per number of documents, with Wilson's intervals (Cache-Craft Figure 27)."""
    rows = []
    for name, found in outcomes.items():
        row: dict[str, Any] = {"arm": name}
        for size in sorted(set(sizes), key=lambda one: int(one.split()[0])):
            agrees = [outcome.agrees for outcome, one in zip(found, sizes, strict=True) if one == size]
            row[f"{size} ({len(agrees)})"] = str(wilson(int(sum(agrees)), len(agrees)))
        rows.append(row)
    return rows


def _against_full(outcomes: dict[str, list[QuestionOutcome]]) -> list[dict[str, Any]]:
    full = _mean(outcomes[FULL], "is_right")
    return [
        {
            "arm": name,
            "computed again": f"{_mean(found, 'recomputed'):.1%}",
            "exact match, of full": f"{_mean(found, 'is_right') / full:.3f}" if full > 0 else "",
            "same answer": f"{_mean(found, 'agrees'):.3f}",
            "token agreement": f"{_mean(found, 'token_agreement'):.3f}",
            "ROUGE-L": f"{_mean(found, 'rouge'):.3f}",
            "KL of first token": f"{_mean(found, 'divergence'):.3f}",
            "TTFT, of full": f"{_ttft(found) / _ttft(outcomes[FULL]):.2f}",
        }
        for name, found in outcomes.items()
        if name != FULL
    ]


def _gains(outcomes: dict[str, list[QuestionOutcome]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per kind and arm: ROUGE-L and Jaccard similarity against the full prefill, with 95 % intervals over
    the questions, and their ratios to the arm that recomputes nothing (Cache-Craft Figures 20 and 21)."""
    rows = []
    for kind in [*sorted(set(kinds)), "all"] if len(set(kinds)) > 1 else ["all"]:
        chosen = [index for index, one in enumerate(kinds) if kind in (one, "all")]
        for name in (name for name in outcomes if name != FULL):
            row: dict[str, Any] = {"questions": f"{kind} ({len(chosen)})", "arm": name}
            for title, field in (("ROUGE-L", "rouge"), ("Jaccard", "jaccard")):
                own, none = (
                    np.array([getattr(outcomes[arm][index], field) for index in chosen]) for arm in (name, NONE)
                )
                ratio = ratio_of_means(own.tolist(), none.tolist(), block=1)
                row[title] = str(bootstrapped(own))
                row[f"{title} / {NONE}"] = (
                    "" if name == NONE or not ratio.is_finite or math.isnan(ratio.high) else str(ratio)
                )
            rows.append(row)
    return rows


def _foretelling(found: Sequence[QuestionOutcome]) -> list[dict[str, Any]]:
    """Return the rank correlation over the questions of what is known of the placed copies before they are used, with
    how far the first token and the answer then are from a full prefill's (Cache-Craft Figure 12)."""
    known = [(one, one.reusability) for one in found if one.reusability is not None]
    deviations = {
        "KL of first token": [one.divergence for one, _ in known],
        "1 - ROUGE-L": [1 - one.rouge for one, _ in known],
    }
    scores = {
        "impact (CCI)": [one.impact or 0.0 for _, one in known],
        "1 - overlap (beta')": [1 - one.overlap for _, one in known],
        "CFO": [one.overhead for _, one in known],
    }
    rows = []
    for name, values in scores.items():
        row: dict[str, Any] = {"score": name, "questions": len(known)}
        for title, deviation in deviations.items():
            found_interval = rank_correlation(values, deviation)
            row[f"Spearman, {title}"] = "one value" if found_interval is None else str(found_interval)
        rows.append(row)
    return rows


def _terminations(outcomes: dict[str, list[QuestionOutcome]]) -> list[dict[str, Any]]:
    """Return for each arm that ends early the share of the questions by L* (Cache-Craft Figure 17)."""
    rows = []
    for name, found in outcomes.items():
        ended = [one.termination for one in found if one.termination is not None]
        if not ended:
            continue
        row: dict[str, Any] = {"arm": name, "questions": len(ended)}
        for layer in range(1, ended[0].num_layers + 1):
            row[f"layer {layer}"] = str(wilson(sum(one.layer == layer for one in ended), len(ended)))
        rows.append(row | {"ended tokens, mean": f"{fmean(one.num_ended for one in ended):.1f}"})
    return rows


def _support(outcomes: dict[str, list[QuestionOutcome]]) -> list[dict[str, Any]]:
    rows = []
    for name, found in outcomes.items():
        marks = [mark for outcome in found for mark in outcome.support]
        shares = {mark.value: f"{marks.count(mark) / len(marks):.3f}" if marks else "" for mark in Support}
        rows.append({"arm": name, "sentences": len(marks), **shares})
    return rows


def _tests(
    outcomes: dict[str, list[QuestionOutcome]], kinds: Sequence[str], options: QualityOptions
) -> list[dict[str, Any]]:
    """Return paired t-tests of exact match, Holm-corrected over the table; of agreement with the full prefill if
    answers are not known, or if it answers none right."""
    right = [one.is_right for one in outcomes[FULL]]
    field = "agrees" if any(map(math.isnan, right)) or not any(right) else "is_right"
    pairs = {}
    for kind in [*sorted(set(kinds)), "all"] if len(set(kinds)) > 1 else ["all"]:
        chosen = [index for index, one in enumerate(kinds) if kind in (one, "all")]
        names_of = {
            share_name(ratio): {name: arm_name(name, ratio) for name in options.selectors} for ratio in options.ratios
        }
        names_of |= {
            f"alpha {one:g}": {name: alpha_name(name, one) for name in options.selectors} for one in options.alphas
        }
        for budget, names in names_of.items():
            for other in options.selectors:
                if other == OURS or OURS not in options.selectors:
                    continue
                ours, theirs = (
                    [float(getattr(outcomes[names[name]][index], field)) for index in chosen] for name in (OURS, other)
                )
                pairs[kind, budget, other] = (ours, theirs)
    rows = []
    for (kind, budget, against), test in paired_tests(pairs).items():
        is_sure = "yes" if test.is_significant else "no"
        rows.append(
            {
                "questions": kind,
                "budget": budget,
                "against": against,
                "difference": f"{test.mean_difference:+.3f}",
                "p (Holm)": f"{test.adjusted_p:.2g}",
                "significant": is_sure,
            }
        )
    return rows
