"""`stillroom bench questions`: latency saved by the query cache.

A single client sends questions at Poisson arrival times with Zipf popularity to a knowledge base. At intervals a
document is replaced, which invalidates every cached result. Latency is measured from the time a question is due, so it
includes waiting for the question before it.
"""

import contextlib
import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stillroom.answer_quality.beir import read_judged_queries
from stillroom.config.settings import QueryCacheConfig, StillroomConfig
from stillroom.rag.query_cache import QueryCache
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.loads.beir_knowledge_base import open_knowledge_base
from stillroom_bench.quality.quality_options import QuestionOptions

OURS = "cache"

HOT_AFTER = 5
"""Earlier occurrences from which on a question counts as hot."""

CONFIGS = {
    "no cache": QueryCacheConfig(max_tokens=0),
    OURS: QueryCacheConfig(),
}


def asked(questions: Sequence[str], options: QuestionOptions, seed: int) -> tuple[list[str], list[float]]:
    """Draw the questions of one run in order, and the seconds between consecutive questions."""
    rng = np.random.default_rng(seed)
    popularity = np.arange(1, len(questions) + 1, dtype=float) ** -options.zipf
    popular = rng.permutation(len(questions))
    drawn = popular[rng.choice(len(questions), size=options.num_questions, p=popularity / popularity.sum())]
    gaps = rng.exponential(1.0 / options.rate, size=options.num_questions)
    return [questions[at] for at in drawn], gaps.tolist()


def asked_before(questions: Sequence[str], times: int) -> list[bool]:
    """Return for each question of a stream whether it occurred at least `times` times before."""
    counts: Counter[str] = Counter()
    found = []
    for question in questions:
        found.append(counts[question] >= times)
        counts[question] += 1
    return found


def ask_all(
    search: Callable[[str], object], change: Callable[[], None], stream: tuple[list[str], list[float]], every: int
) -> list[float]:
    """Send each question when it is due.

    Returns:
        Seconds from due time to answer, per question. Changes of documents are excluded from the time.
    """
    seconds = []
    due = time.perf_counter()
    for number, (question, gap) in enumerate(zip(*stream, strict=True)):
        if number and number % every == 0:
            began = time.perf_counter()
            change()
            due += time.perf_counter() - began
        due += gap
        time.sleep(max(0.0, due - time.perf_counter()))
        search(question)
        seconds.append(time.perf_counter() - due)
    return seconds


def run_questions(
    options: QuestionOptions,
    work_dir: Path,
    config: StillroomConfig,
    on_run: Callable[[str, int], None] | None = None,
) -> BenchResult:
    """Measure both arms on a copy of the data set's knowledge base.

    The copy is reopened for each run, so that the first occurrence of a question computes its embedding in every arm.

    Raises:
        UsageError: the folder is not a data set.
        DocumentError: a line of it cannot be read.
    """
    dataset, repeat, seed = options.dataset, options.repeat, options.seed
    environment = record_environment()
    questions = list(read_judged_queries(dataset)[0].values())
    with open_knowledge_base(dataset, work_dir, config) as original:
        original.search(questions[0])  # completes the indexes on disk
        source = original.path
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        shutil.copytree(source, Path(folder) / "kb")
        with KnowledgeBase.open(Path(folder) / "kb", config) as kb:
            fixture = _QuestionsFixture(kb, config, Path(folder) / "news.txt", itertools.count())
            arms = [
                Arm(name, _runner(fixture, cache_config, questions, options, seed))
                for name, cache_config in CONFIGS.items()
            ]
            samples = run_arms(arms, repeat=repeat, on_run=on_run, only_own=True)
    parameters = {
        "dataset": dataset.name,
        "num_questions": options.num_questions,
        "per_second": options.rate,
        "change_every": options.change_every,
        "zipf_exponent": options.zipf,
        "repeat": repeat,
        "seed": seed,
    }
    return BenchResult("stillroom bench questions", environment, parameters, samples, "no cache")


@dataclass(frozen=True, slots=True)
class _QuestionsFixture:
    """The knowledge base that every run reopens, and the document that changes."""

    loaded: KnowledgeBase
    """An open knowledge base, whose embedder weights every run shares."""
    config: StillroomConfig
    news: Path
    numbers: Iterator[int]

    @contextlib.contextmanager
    def opened(self) -> Iterator[KnowledgeBase]:
        """Open the knowledge base with its indexes loaded and no cached embedding of a benchmark question."""
        with KnowledgeBase.open(self.loaded.path, self.config, weights_of=self.loaded) as kb:
            kb.search("Is everybody ready?")
            yield kb

    def change(self, kb: KnowledgeBase) -> None:
        """Replace one document."""
        self.news.write_text(f"Bulletin number {next(self.numbers)} of the harbour office.\n", encoding="utf-8")
        kb.add([self.news])


def _runner(
    fixture: _QuestionsFixture,
    cache_config: QueryCacheConfig,
    questions: Sequence[str],
    options: QuestionOptions,
    seed: int,
) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        stream = asked(questions, options, 1000 * seed + repetition + 100)  # warm-up repetitions are negative
        with fixture.opened() as kb:
            cache = QueryCache(kb, cache_config)
            top_k = fixture.config.search.top_k
            seconds = ask_all(
                lambda query: cache.search(query, "hybrid", top_k),
                lambda: fixture.change(kb),
                stream,
                options.change_every,
            )
        return _figures(seconds, stream[0], cache.num_hits)

    return run


def _figures(seconds: Sequence[float], stream: Sequence[str], num_hits: int) -> Metrics:
    hot = [took for took, is_hot in zip(seconds, asked_before(stream, HOT_AFTER), strict=True) if is_hot]
    return {
        **{f"p{q}_seconds": float(np.percentile(seconds, q)) for q in (50, 95, 99)},
        **{f"hot_p{q}_seconds": float(np.percentile(hot, q)) for q in (50, 95) if hot},
        "mean_seconds": float(np.mean(seconds)),
        "share_hot": len(hot) / len(seconds),
        "hit_rate": num_hits / len(seconds),
    }
