"""`stillroom bench looking`: which candidates answer a question, ranked by a model that looks at their prepared KV.

Each candidate's KV is placed behind the system message, apart from the others, and the question is read behind it. Its
scores are compared with the search, and with the bundled reader as a cross-encoder; then the best chunks of each
ranking answer the question. How to read it: docs/prepared.md
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from stillroom.config.settings import StillroomConfig
from stillroom.errors import UsageError
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.models.bundled_models import READER, model_warnings, reader_folder, short_name
from stillroom.models.reader import Passage, Reader, load_reader
from stillroom.ops.bfloat16 import has_bfloat16
from stillroom.retrieval.model_files import PACKAGED_MODEL, locate_model
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.loads.beir_knowledge_base import open_knowledge_base
from stillroom_bench.quality.context_asking import ContextAsker
from stillroom_bench.quality.context_questions import Place, read_questions, whole_document
from stillroom_bench.quality.looking_arms import BEST_HEADS, LIKELIHOOD, SEARCH, View, best, fused, measures, scores_of
from stillroom_bench.quality.looking_candidates import (
    CandidateQuestion,
    draw_candidates,
    search_scores,
    searched,
    with_neighbours,
    write_corpus,
)
from stillroom_bench.quality.looking_scores import CONTENT_FREE, Floats, Looker
from stillroom_bench.quality.looking_tables import Outcome, tables_of
from stillroom_bench.quality.quality_options import LookingOptions

NUM_KEPT = 5
"""Best candidates, which answer the question."""
CHANCE, CROSS_ENCODER, NEEDED = "chance", "cross-encoder", "needed chunks only"
NEIGHBOURS = f"{SEARCH} with neighbours"
ALONE, IN_DOCUMENT = "alone", "in its document"
_MAX_TOKENS = 8
_NOTES = (
    f"The candidates of each question are ranked; its {NUM_KEPT} best answer it, in document order, with KV prepared "
    f"in their documents. `{ALONE}`, `{IN_DOCUMENT}`: how the KV that was looked at was computed. Intervals: 95 %, "
    "bootstrapped.",
    f"`{SEARCH}`: the product's fused score of dense search and BM25 over the candidates of all questions. "
    f"`{NEIGHBOURS}`: plus half of the better score of the chunks directly before and after in the document. "
    f"`{CROSS_ENCODER}`: the bundled reader's log odds that the passage answers the question.",
    f"`{SEARCH} and ...`: reciprocal rank fusion; `both` are `{LIKELIHOOD}` and `{BEST_HEADS}`.",
    f"`{BEST_HEADS}`: chosen on the other half of the questions. `calibrated`: less the attention of the question "
    f"'{CONTENT_FREE}'. The likelihood of a question without any candidate is the same for all of its candidates, so "
    "subtracting it changes no ranking.",
)


@dataclass(slots=True)
class _Case:
    """A question, and what was found out about it."""

    asked: CandidateQuestion
    scores: dict[str, Floats]
    """Of the candidates, by ranking."""
    seconds: dict[str, float]
    looks: dict[str, View] = field(default_factory=dict)
    """By context."""
    right: dict[str, bool] = field(default_factory=dict)
    """Whether the best chunks give the right answer, by ranking; empty if they were not asked."""


def run_looking(
    options: LookingOptions,
    work_dir: Path,
    config: StillroomConfig,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Rank the candidates of every question in every way, and answer from the best.

    Raises:
        UsageError: there is no question, or an input cannot be used.
        DocumentError: a line of a data set cannot be read.
        ModelError: the model cannot be loaded.
    """
    if options.questions is None and not options.datasets:
        raise UsageError("there is nothing to rank; give a file with --questions, or a data set with --dataset")
    environment = record_environment()
    asked = _drawn(options, options.questions) if options.questions is not None else []
    asker = ContextAsker(options.model, options.dtype, _MAX_TOKENS)
    looker, reader = Looker(asker.model), _reader()
    cases: list[_Case] = []
    notes = list(_NOTES)
    if options.questions is not None:
        on_progress(f"{options.questions.name}: indexing (cached in {work_dir}) and searching")
        cases = _searched(asked, work_dir / "looking" / options.questions.stem, work_dir, config)
        _rank(cases, reader, looker, (ALONE, IN_DOCUMENT), on_progress)
        notes.append(_score_looks(cases, options.seed))
        _answer(cases, asker, on_progress)
    for dataset in options.datasets:
        on_progress(f"{dataset.name}: indexing (cached in {work_dir}) and searching")
        found = _searched_dataset(options, dataset, work_dir, config)
        _rank(found, reader, looker, () if model_warnings(options.model) else (ALONE,), on_progress)
        notes.append(f"{dataset.name}: {_score_looks(found, options.seed)}")
        cases += found
    outcomes = [outcome for case in cases for outcome in _outcomes(case)]
    parameters = {
        "questions": options.questions.name if options.questions else "",
        "datasets": [path.name for path in options.datasets],
        "num_questions": len(cases),
        "num_candidates": options.num_candidates,
        "model": short_name(options.model),
        "dtype": options.dtype,
        "seed": options.seed,
    }
    return BenchResult(
        "stillroom bench looking",
        environment,
        parameters,
        _samples(outcomes),
        notes=notes,
        tables=tables_of(outcomes, [case.seconds for case in cases], NUM_KEPT),
        sample_of="question",
    )


def _drawn(options: LookingOptions, path: Path) -> list[CandidateQuestion]:
    questions = [one for one in read_questions(path, options.num_questions) if one.needed]
    if not questions:
        raise UsageError(f"{path}: no question names the chunks that it needs")
    return draw_candidates(questions, options.num_candidates, options.seed)


def _searched(asked: Sequence[CandidateQuestion], corpus: Path, work_dir: Path, config: StillroomConfig) -> list[_Case]:
    """Search for each question among the candidates of all, and score its own."""
    records = write_corpus(asked, corpus)
    cases = []
    with open_knowledge_base(corpus, work_dir, config) as kb:
        kb.search("warm up", top_k=1)
        for one in asked:
            text = one.question.question
            began = perf_counter()
            kb.search(text, top_k=len(one.chunks))
            seconds = perf_counter() - began
            scores = search_scores(kb, text, [records[chunk.text] for chunk in one.chunks])
            neighbours = with_neighbours(one.question, scores)
            cases.append(_Case(one, {SEARCH: scores, NEIGHBOURS: neighbours}, {SEARCH: seconds}))
    return cases


def _searched_dataset(options: LookingOptions, dataset: Path, work_dir: Path, config: StillroomConfig) -> list[_Case]:
    with open_knowledge_base(dataset, work_dir, config) as kb:
        kb.search("warm up", top_k=1)
        found = searched(dataset, kb, options.num_candidates, options.num_questions)
    return [_Case(asked, {SEARCH: scores}, {SEARCH: seconds}) for asked, scores, seconds in found]


def _reader() -> Reader:
    folder = reader_folder(READER)
    assert folder is not None
    dtype = torch.bfloat16 if has_bfloat16("cpu") else torch.float32
    reader = load_reader(folder, locate_model(PACKAGED_MODEL), dtype)
    reader.read("warm up", [Passage("warm up")])
    return reader


def _rank(
    cases: Sequence[_Case],
    reader: Reader,
    looker: Looker,
    contexts: Sequence[str],
    on_progress: Callable[[str], None],
) -> None:
    """Let the reader read the candidates, and the model look at them with KV of these contexts."""
    for number, case in enumerate(cases, start=1):
        _read(case, reader)
        for context in contexts:
            _look(case, looker, context)
        if number % 25 == 0 or number == len(cases):
            on_progress(f"{number} of {len(cases)} questions ranked")


def _read(case: _Case, reader: Reader) -> None:
    text, chunks = case.asked.question.question, case.asked.chunks
    began = perf_counter()
    readings = reader.read(text, [Passage(chunk.text, chunk.heading) for chunk in chunks])
    case.seconds[CROSS_ENCODER] = perf_counter() - began
    case.scores[CROSS_ENCODER] = np.array([-np.inf if one is None else one.score for one in readings])
    case.scores[CHANCE] = np.random.default_rng(list(text.encode())).random(len(chunks))


def _look(case: _Case, looker: Looker, context: str) -> None:
    """Add what the model sees in the candidates, and what that costs once their KV is there."""
    text, chunks = case.asked.question.question, case.asked.chunks
    prepared = looker.prepare(case.asked.question, in_document=context == IN_DOCUMENT)
    candidates = [prepared[chunk.chunk_id] for chunk in chunks]
    case.looks[context] = View.of(
        looker.look(candidates, text, observes=True), looker.look(candidates, CONTENT_FREE, observes=True)
    )
    timed: dict[str, Callable[[], object]] = {
        "looking, for likelihood": lambda: looker.look(candidates, text, observes=False),
        "looking, for attention": lambda: looker.look(candidates, text, observes=True),
        f"full prefill of {NUM_KEPT} chunks": lambda: looker.prefill(chunks[:NUM_KEPT], text),
    }
    for name, measured in timed.items():
        began = perf_counter()
        measured()
        case.seconds[name] = perf_counter() - began


def _score_looks(cases: Sequence[_Case], seed: int) -> str:
    """Add the scores of all ways of looking; return the heads that were chosen, as text."""
    if not cases[0].looks:
        return "the model cannot read this text, so it looks at nothing"
    heads = []
    for context in cases[0].looks:
        views = [case.looks[context] for case in cases]
        scores, chosen = scores_of(views, [case.asked.is_needed for case in cases], seed)
        heads.append(f"{context}: {' / '.join(chosen)}")
        for way, of_cases in scores.items():
            for case, scores_C in zip(cases, of_cases, strict=True):
                case.scores[f"{way}, {context}"] = scores_C
        for case, likelihood_C, heads_C in zip(cases, scores[LIKELIHOOD], scores[BEST_HEADS], strict=True):
            search_C = case.scores[SEARCH]
            case.scores[f"{SEARCH} and {LIKELIHOOD}, {context}"] = fused(search_C, likelihood_C)
            case.scores[f"{SEARCH} and {BEST_HEADS}, {context}"] = fused(search_C, heads_C)
            case.scores[f"{SEARCH} and both, {context}"] = fused(search_C, likelihood_C, heads_C)
    return f"best heads of either half (layer.head; `last`: of the prompt's last token), {'; '.join(heads)}"


def _answer(cases: Sequence[_Case], asker: ContextAsker, on_progress: Callable[[str], None]) -> None:
    """Add by ranking whether its best chunks give the right answer."""
    for number, case in enumerate(cases, start=1):
        question = case.asked.question
        chosen: dict[str, tuple[Place, ...]] = {NEEDED: tuple(sorted(question.needed))}
        for name, scores_C in case.scores.items():
            chosen[name] = tuple(sorted(question.retrieved[at] for at in best(scores_C, NUM_KEPT)))
        together = sorted({place for places in chosen.values() for place in places})
        with asker.placing(AnywhereOptions(0.0, "first", only_prepared=True)):
            before = asker.prepare(question, together, whole_document)
            right = {places: asker.ask(question, places, before) for places in dict.fromkeys(chosen.values())}
        case.right = {name: right[places] for name, places in chosen.items()}
        if number % 25 == 0 or number == len(cases):
            on_progress(f"{number} of {len(cases)} questions answered")


def _outcomes(case: _Case) -> list[Outcome]:
    kind, found = case.asked.question.kind, []
    shown = ("all_needed", "recall") if case.right else ("recall", "ndcg_at_10")
    for name, scores_C in case.scores.items():
        measured = measures(scores_C, case.asked.is_needed, case.asked.num_missing, NUM_KEPT)
        found.append(Outcome(name, kind, {measure: measured[measure] for measure in shown}))
    return found + [Outcome(name, kind, {"right": float(is_right)}) for name, is_right in case.right.items()]


def _samples(outcomes: Sequence[Outcome]) -> Samples:
    samples = Samples()
    for one in outcomes:
        samples.add(one.arm, {name: value for name, value in one.values.items() if name != "recall"})
    return samples
