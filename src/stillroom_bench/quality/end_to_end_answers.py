"""`stillroom bench answers`: how often the answers of a model are right, with search, citations and abstention.

Every question is asked as a user asks it. A filter restricts the documents: to all, to the gold passages, or to all
others, where the right answer is that the documents do not say. How to read it: docs/answers-bench.md
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import StillroomConfig
from stillroom.errors import NothingFoundError, UsageError
from stillroom.rag.answer import AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import Interval, bootstrapped
from stillroom_bench.loads.answered_questions import AnsweredQuestion, read_questions
from stillroom_bench.loads.beir_knowledge_base import open_knowledge_base
from stillroom_bench.quality.judged_answers import JudgedAnswer, judged, refused
from stillroom_bench.quality.quality_options import EndToEndOptions

ALL, GOLD, WITHOUT = "all documents", "gold passage only", "without the gold passage"
UNANSWERABLE = "all documents, which do not say"
"""Mode of questions that no document answers."""
ANSWERED_SHARE = 0.9
"""The threshold of the second abstention figure answers this share of the questions whose passage is there."""

_METRICS = {
    "exact_match": "exact match",
    "f1": "F1",
    "quoted": "quoted",
    "is_cited": "cited",
    "is_retrieved": "retrieved",
    "is_answered": "answered",
}
_WARM_UP = "Is everything ready?"
_TIMES = {"answer_seconds": "time to answer", "after_search_seconds": "after the search"}
_NOTE = (
    "Exact match and F1 are those of the span that the reader marks, else of the whole text (SQuAD 1.1); quoted: the "
    "text holds an accepted answer; cited: a cited source is the gold passage or holds an accepted answer, of the "
    "questions that were answered. Intervals of both tables below are bootstrapped, 95 %."
)


@dataclass(frozen=True, slots=True)
class _Set:
    """Questions about one knowledge base."""

    name: str
    kb: Path
    questions: list[AnsweredQuestion]
    """`gold` holds ids of documents of the knowledge base."""


def run_answers(
    options: EndToEndOptions,
    work_dir: Path,
    config: StillroomConfig,
    on_step: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Ask all questions of all sets with every model.

    Raises:
        UsageError: an input has no questions with answers, or a file is given without a knowledge base.
        ModelError, KnowledgeBaseError: a model or the knowledge base cannot be used.
    """
    environment = record_environment()
    sets = [_load(path, options, work_dir, config, on_step) for path in options.questions]
    if len({one.name for one in sets}) < len(sets):
        raise UsageError("two inputs have the same name, which identifies them in the report; rename one")
    samples, rows, abstentions, names = Samples(), [], [], dict[str, None]()
    for one in sets:
        for model in options.models or (config.runtime.model,):
            name, found = _asked(one, model, options, config, on_step)
            names[name] = None
            for mode, answers in found.items():
                samples.values[f"{one.name}, {mode}/{name}"] = _samples(answers)
                rows.append({"set": one.name, "documents": mode, "model": name, **_row(answers, options.seed)})
            if without := [*found.get(WITHOUT, ()), *found.get(UNANSWERABLE, ())]:
                there = found.get(ALL, ())
                abstentions.append({"set": one.name, "model": name, **abstention(there, without, options.seed)})
    parameters = {
        "questions": [one.name for one in sets],
        "num_questions": [len(one.questions) for one in sets],
        "models": list(names),
        "top_k": config.search.top_k,
        "mode": config.search.mode,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
    }
    tables = {"Answers": rows} | ({"Abstention": abstentions} if abstentions else {})
    baseline = next(iter(names)) if len(names) > 1 else None
    return BenchResult(
        "stillroom bench answers",
        environment,
        parameters,
        samples,
        baseline,
        notes=[_NOTE],
        tables=tables,
        sample_of="question",
    )


def _load(
    path: Path, options: EndToEndOptions, work_dir: Path, config: StillroomConfig, on_step: Callable[[str], None]
) -> _Set:
    questions = read_questions(path, options.num_questions, options.seed)
    if path.is_dir():
        on_step(f"{path.name}: indexing (cached in {work_dir})")
        with open_knowledge_base(path, work_dir, config) as kb:
            folder = kb.path
        prefix = f"{os.path.abspath(path / 'corpus.jsonl')}#"
        named = [dataclasses.replace(one, gold=tuple(f"{prefix}{record}" for record in one.gold)) for one in questions]
        return _Set(path.resolve().name, folder, named)
    if options.kb is None:
        raise UsageError(f"{path} is a file of questions; name the knowledge base that answers them with --kb")
    if (options.has_gold or options.has_without_gold) and not any(one.gold for one in questions):
        raise UsageError(f"no question of {path} names its `document`, which --gold and --without-gold need; add them")
    with Stillroom.open(options.kb, config=config, create=False) as stillroom:
        return _Set(path.stem, options.kb, [_with_documents(stillroom, one) for one in questions])


def _with_documents(stillroom: Stillroom, question: AnsweredQuestion) -> AnsweredQuestion:
    """Replace the names of gold documents by ids. Raises UsageError if a name is not that of one document."""
    found: list[str] = []
    for name in question.gold:
        matches = stillroom.documents_like(name)
        if len(matches) != 1:
            raise UsageError(f"document {name!r} of a question names {len(matches)} documents; write more of its path")
        found += matches
    return dataclasses.replace(question, gold=tuple(found))


def _asked(
    asked: _Set, model: str, options: EndToEndOptions, config: StillroomConfig, on_step: Callable[[str], None]
) -> tuple[str, dict[str, list[JudgedAnswer]]]:
    """Return the model's name, and the judged answers by mode in the order of the questions."""
    chosen = [ALL, *([GOLD] if options.has_gold else []), *([WITHOUT] if options.has_without_gold else [])]
    runtime = dataclasses.replace(config.runtime, model=model)
    generation = dataclasses.replace(config.generation, citations=True)
    config = dataclasses.replace(config, runtime=runtime, generation=generation)
    found: dict[str, list[JudgedAnswer]] = {mode: [] for mode in (*chosen, UNANSWERABLE)}
    with Stillroom.open(asked.kb, config=config, create=False) as stillroom:
        stillroom.warm_up()
        name = stillroom.model_name.rstrip("/").rpartition("/")[2]
        with contextlib.suppress(NothingFoundError):
            stillroom.ask(_WARM_UP, AskOptions(max_tokens=options.max_tokens))
        for number, question in enumerate(asked.questions, start=1):
            for mode in chosen if question.answers else [UNANSWERABLE]:
                if mode in (ALL, UNANSWERABLE) or question.gold:
                    found[mode].append(_ask(stillroom, question, mode, options.max_tokens))
            if number % 25 == 0 or number == len(asked.questions):
                on_step(f"{asked.name}, {name}: {number} of {len(asked.questions)} questions")
    return name, {mode: answers for mode, answers in found.items() if answers}


def _ask(stillroom: Stillroom, question: AnsweredQuestion, mode: str, max_tokens: int) -> JudgedAnswer:
    options = AskOptions(max_tokens=max_tokens, where=_filter(question.gold, mode))
    accepted = question.answers if mode in (ALL, GOLD) else ()
    began = time.perf_counter()
    try:
        answer = stillroom.ask(question.question, options)
    except NothingFoundError:
        return refused(accepted, time.perf_counter() - began)
    return judged(answer, accepted, question.gold, time.perf_counter() - began)


def _filter(gold: Sequence[str], mode: str) -> str:
    """Return the filter that allows the documents of a mode."""
    if mode in (ALL, UNANSWERABLE):
        return ""
    names = ", ".join('"' + _escaped(document) + '"' for document in gold)
    return f"{'not ' if mode == WITHOUT else ''}path in ({names})"


def _escaped(text: str) -> str:
    """Escape a text for quotation marks of a filter."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


# Tables


def _samples(answers: Sequence[JudgedAnswer]) -> dict[str, list[float]]:
    """Return the values of each measure, without NaN."""
    names = [field.name for field in dataclasses.fields(JudgedAnswer)]
    found = {name: [float(getattr(one, name)) for one in answers] for name in names}
    known = {name: [value for value in values if not math.isnan(value)] for name, values in found.items()}
    return {name: values for name, values in known.items() if values}


def _row(answers: Sequence[JudgedAnswer], seed: int) -> dict[str, Any]:
    samples = _samples(answers)
    shown = {
        title: str(bootstrapped(np.array(samples[name]), seed=seed)) if name in samples else "-"
        for name, title in _METRICS.items()
    }
    times = {}
    for name, title in _TIMES.items():
        values = [f"{float(np.percentile(samples[name], q)) * 1e3:.0f}" for q in (50, 95)] if name in samples else "-"
        times[f"{title}, p50 / p95 ms"] = " / ".join(values)
    return {"questions": len(answers), **shown, **times}


def abstention(there: Sequence[JudgedAnswer], without: Sequence[JudgedAnswer], seed: int) -> dict[str, Any]:
    """Return how often questions are refused whose passage was taken out.

    The figure at a fixed share of answered questions compares models whatever their thresholds: the threshold on the
    confidence is chosen so that `ANSWERED_SHARE` of the questions whose passage is there are answered.

    Args:
        there: answers with the passage, from all documents.
        without: answers where no document holds the answer.
    """
    shipped = bootstrapped(np.array([1.0 - one.is_answered for one in without]), seed=seed)
    answered = bootstrapped(np.array([one.is_answered for one in there]), seed=seed) if there else "-"
    row = {"questions": len(without), "answered with the passage": str(answered), "refused without": str(shipped)}
    title = f"refused where {ANSWERED_SHARE:.0%} are answered"
    own, other = (np.array([one.confidence for one in answers]) for answers in (there, without))
    if not own.size or np.isnan(own).any() or np.isnan(other).any():
        return row | {title: "-"}
    return row | {title: str(refused_share(own, other, ANSWERED_SHARE, seed))}


def refused_share(
    there: NDArray[np.float64], without: NDArray[np.float64], answered: float, seed: int, num_resamples: int = 2000
) -> Interval:
    """Return the share of `without` below the threshold that a share `answered` of `there` reaches.

    Args:
        there: confidences of questions that have an answer.
        without: confidences of questions that have none.
    """

    def share(own: NDArray[np.float64], other: NDArray[np.float64]) -> float:
        threshold = np.quantile(own, 1.0 - answered, method="lower")
        return float((other < threshold).mean())

    rng = np.random.default_rng(seed)
    found = [share(rng.choice(there, there.size), rng.choice(without, without.size)) for _ in range(num_resamples)]
    low, high = np.percentile(found, [2.5, 97.5])
    return Interval(share(there, without), float(low), float(high))
