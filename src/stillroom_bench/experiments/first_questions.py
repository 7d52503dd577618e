"""`stillroom bench first-questions`: what preparing gains where a third of the questions ask for a document first.

Questions arrive one after another; documents have Zipf popularity. Compared are no reuse, the default mode `exact` on
device, host and disk, and documents prepared with several budgets. All arms start with empty caches, share the
decoder's weights and answer the same question before the next one comes. Between two questions an engine stores KV on
disk, as a server does while it is idle; it prepares nothing. How to read it: docs/prepared.md
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stillroom.backends.assembly import kv_shape
from stillroom.config.settings import PrepareConfig, ReuseConfig
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.kv import Tier
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvstore.files import size_on_disk
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_own_decoder
from stillroom.rag.document_demand import DocumentDemand
from stillroom_bench.experiments.anywhere_engine import Answers, BenchEngine, build_fixture, chunk, question, system
from stillroom_bench.experiments.experiment_options import SYSTEM_TOKENS, AnywhereBenchOptions, FirstQuestionsOptions
from stillroom_bench.experiments.first_questions_report import PREPARED, TARGETS, TIERS, TIMES, target_rows, time_rows
from stillroom_bench.experiments.prepared import BenchDocuments, prepare_windows
from stillroom_bench.experiments.reuse_options import OFF
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, run_arms
from stillroom_bench.loads.reuse_traffic import DEVICE_SHARE, DISK_SHARE, HOST_SHARE
from stillroom_bench.loads.zipf_questions import (
    DocumentQuestion,
    ZipfQuestions,
    documents_for,
    expected_first_share,
)
from stillroom_bench.quality.runtime import Shape, write_checkpoint

ANYWHERE = "anywhere"
COSTS, WORKLOADS, SAME_ANSWERS = (
    "What preparing costs",
    "Workloads",
    "Answers beside a full prefill (random weights)",
)
"""Names of the report's tables, with `TIMES` and `TARGETS`."""
_FIRST_QUESTION = 1000


def run_first_questions(
    options: FirstQuestionsOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    profile: CostProfile | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps the checkpoint between runs, and KV during a run.
        shape: shape of the model with random weights; None: 135 million parameters.
        profile: costs of computing and loading, the same for all arms; None: measure them once per workload.

    Raises:
        UsageError: no number of documents gives the share of first questions.
    """
    shape, environment = shape or Shape(), record_environment()
    num_documents = documents_for(options.num_questions, options.first_share, options.zipf)
    decoder = load_own_decoder(
        write_checkpoint(work_dir, shape, options.dtype, options.seed), device="cpu", dtype=options.dtype
    )
    findings = _Findings()
    for seed in range(options.seed, options.seed + options.repeat):
        corpus = _Corpus(options, num_documents, seed)
        on_progress(f"workload {seed}: {num_documents} documents of {options.document_chunks} chunks")
        _run_workload(decoder, corpus, work_dir, profile, findings, on_progress)
    others = [arm for arm in findings.samples.values if arm != OFF]
    return BenchResult(
        "stillroom bench first-questions",
        environment,
        {
            "num_questions": options.num_questions,
            "first_share": options.first_share,
            "zipf": options.zipf,
            "num_documents": num_documents,
            "document_chunks": options.document_chunks,
            "num_chunks": options.num_chunks,
            "chunk_tokens": options.chunk_tokens,
            "question_tokens": options.question_tokens,
            "companions": options.companions,
            "budgets": list(options.budgets),
            "repeat": options.repeat,
            "seed": options.seed,
            "dtype": options.dtype,
            "num_parameters": shape.layer_parameters + shape.vocab_size * shape.hidden_size,
        },
        findings.samples,
        TIERS,
        tables={
            TIMES: time_rows(findings.samples, findings.is_first),
            TARGETS: target_rows(findings.samples),
            COSTS: findings.costs,
            WORKLOADS: findings.workloads,
            SAME_ANSWERS: findings.answers.rows(dict.fromkeys(others, OFF)),
        },
        notes=_notes(options),
        sample_of="question",
    )


def _notes(options: FirstQuestionsOptions) -> list[str]:
    return [
        f"Questions about the same document find {'the same' if options.companions == 'fixed' else 'different'} "
        "chunks; a first question is about a document that no earlier question of its workload is about.",
        "All caches begin empty. The most demanded documents are prepared first, then the newest; demand is counted "
        f"in {options.num_questions} searches of the same law that are drawn apart from the measured ones.",
        f"Of the corpus's KV, {DEVICE_SHARE:.0%} fits on the device beside a running prompt, {HOST_SHARE:.0%} on the "
        f"host, and {DISK_SHARE:.0%} on disk. Files on disk may be in the page cache.",
        "Nothing is prepared while questions arrive.",
    ]


@dataclass(slots=True)
class _Findings:
    """Results of all workloads."""

    samples: Samples = field(default_factory=Samples)
    answers: Answers = field(default_factory=Answers)
    is_first: list[bool] = field(default_factory=list)
    """Of each sample."""
    costs: list[dict[str, Any]] = field(default_factory=list)
    workloads: list[dict[str, Any]] = field(default_factory=list)


class _Corpus:
    """The documents of one workload, their questions, and the prompts."""

    def __init__(self, options: FirstQuestionsOptions, num_documents: int, seed: int) -> None:
        self.options, self.seed = options, seed
        self.documents = BenchDocuments(num_documents, options.document_chunks)
        self.num_chunks = num_documents * options.document_chunks
        self.prompts = AnywhereBenchOptions(
            num_chunks=options.num_chunks,
            chunk_tokens=options.chunk_tokens,
            question_tokens=options.question_tokens,
            seed=seed,
        )
        self._load = ZipfQuestions(
            num_documents, options.zipf, options.document_chunks, options.num_chunks, options.companions, seed
        )
        self.questions = self._load.draw(options.num_questions, options.first_share)

    def by_demand(self) -> list[range]:
        """Return the documents in the product's order of preparing: most demanded first, then newest."""
        length, demand = self.options.document_chunks, DocumentDemand()
        for one in self._load.draw_earlier(self.options.num_questions):
            demand.add(DocumentId(str(found // length)) for found in one.chunks)
        numbers = range(len(self.documents.documents))
        return [
            self.documents.documents[at]
            for at in sorted(numbers, key=lambda at: (-demand.of(DocumentId(str(at))), -at))
        ]

    def describe(self) -> dict[str, Any]:
        options, count = self.options, len(self.questions)
        num_documents = len(self.documents.documents)
        return {
            "seed": self.seed,
            "documents": num_documents,
            "chunks": self.num_chunks,
            "Zipf exponent": options.zipf,
            "questions": count,
            "first questions": sum(one.is_first for one in self.questions),
            "share reached": f"{sum(one.is_first for one in self.questions) / count:.1%}",
            "share expected": f"{expected_first_share(num_documents, count, options.zipf):.1%}",
        }


def _run_workload(
    decoder: CausalModel,
    corpus: _Corpus,
    work_dir: Path,
    profile: CostProfile | None,
    findings: _Findings,
    on_progress: Callable[[str], None],
) -> None:
    """Ask all questions of one workload in every arm; add the results to the findings."""
    count, first = len(corpus.questions), len(findings.is_first)

    def say(arm: str, repetition: int) -> None:
        if arm == OFF:
            on_progress(f"question {repetition + 1} of {count}")

    with _engines(decoder, corpus, work_dir, profile, findings.costs, on_progress) as engines:
        arms = [Arm(name, _ask(engine, name, corpus, findings.answers, first)) for name, engine in engines.items()]
        samples = run_arms(arms, repeat=count, on_run=say, only_own=True)
        for row in findings.costs[-len(engines) + 1 :]:
            row["on disk at the end, MiB"] = _mebibytes_on_disk(engines[row["arm"]])
    for arm, metrics in samples.values.items():
        for metric, values in metrics.items():
            findings.samples.values.setdefault(arm, {}).setdefault(metric, []).extend(values)
    findings.is_first += [one.is_first for one in corpus.questions]
    findings.workloads.append(corpus.describe())


@contextmanager
def _engines(
    decoder: CausalModel,
    corpus: _Corpus,
    work_dir: Path,
    profile: CostProfile | None,
    costs: list[dict[str, Any]],
    on_progress: Callable[[str], None],
) -> Iterator[dict[str, BenchEngine]]:
    """Yield an engine per arm, with its documents prepared; add a row of costs for each but `off`."""
    options = corpus.options
    shape = kv_shape(decoder)
    chunk_bytes = shape.num_bytes(options.chunk_tokens)
    prepared_bytes = shape.num_bytes(options.chunk_tokens, PrepareConfig().bits)
    exact = ReuseConfig(
        host_bytes=round(HOST_SHARE * corpus.num_chunks * chunk_bytes),
        disk_bytes=round(DISK_SHARE * corpus.num_chunks * chunk_bytes),
    )
    engines: dict[str, BenchEngine] = {}
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch, ExitStack() as stack:
        for name, (reuse, prepare) in _settings(options, exact, _bytes_of_all(corpus, prepared_bytes)).items():
            engine = engines[name] = _engine(decoder, corpus, reuse, prepare, Path(scratch) / name, profile)
            stack.callback(engine.cache.close)
            if engine.cache.tree is None:
                continue
            profile = engine.cache.tree.profile
            on_progress(f"preparing for: {name}")
            costs.append({"seed": corpus.seed, "arm": name, **_prepare(engine, corpus)})
        yield engines


def _settings(
    options: FirstQuestionsOptions, exact: ReuseConfig, num_bytes: int
) -> dict[str, tuple[ReuseConfig, PrepareConfig]]:
    """Return the settings of each arm, in which all tiers have the same size.

    Args:
        num_bytes: of all chunks on disk.
    """
    nothing = PrepareConfig(host_bytes=0, disk_bytes=0)
    settings = {OFF: (ReuseConfig(mode="off"), nothing), TIERS: (exact, nothing)}
    if options.anywhere:
        settings[ANYWHERE] = (replace(exact, mode="anywhere", audit_share=0.0), nothing)
    for share in options.budgets:
        prepare = PrepareConfig(host_bytes=exact.host_bytes // 2, disk_bytes=round(share * num_bytes))
        settings[f"{PREPARED} {share_name(share)}"] = (replace(exact, mode="prepared"), prepare)
    return settings


def _bytes_of_all(corpus: _Corpus, chunk_bytes: int) -> int:
    """Return the bytes of all chunks on disk, each prepared behind those before it in its document."""
    lengths = range(1, corpus.options.document_chunks + 1)
    return len(corpus.documents.documents) * sum(size_on_disk(chunk_bytes, num_seen) for num_seen in lengths)


def _engine(
    decoder: CausalModel,
    corpus: _Corpus,
    reuse: ReuseConfig,
    prepare: PrepareConfig,
    folder: Path,
    profile: CostProfile | None,
) -> BenchEngine:
    options, prompts = corpus.options, corpus.prompts
    longest = SYSTEM_TOKENS + max(options.num_chunks, options.document_chunks) * (options.chunk_tokens + 16)
    room = 2 * (longest + options.question_tokens + 32) + round(DEVICE_SHARE * corpus.num_chunks * options.chunk_tokens)
    engine = build_fixture(
        decoder, prompts, reuse, folder if reuse.keeps_kv else None, room, profile=profile, prepare=prepare
    )
    engine.engine.follow("", corpus.documents)
    return engine


def _prepare(engine: BenchEngine, corpus: _Corpus) -> dict[str, Any]:
    """Prepare documents until the budget is full; return the costs."""
    documents = corpus.by_demand() if engine.cache.manager.uses_prepared else []
    start = time.perf_counter()
    num_prepared = prepare_windows(engine, corpus.prompts, documents)
    seconds = time.perf_counter() - start
    share = num_prepared * corpus.options.document_chunks / corpus.num_chunks
    return {
        "documents": f"{num_prepared} of {len(corpus.documents.documents)}",
        "chunks": f"{share:.1%}",
        "seconds": f"{seconds:.1f}",
        "on disk before the questions, MiB": _mebibytes_on_disk(engine),
    }


def _mebibytes_on_disk(engine: BenchEngine) -> str:
    assert engine.cache.tree is not None
    return f"{engine.cache.tree.num_bytes(Tier.DISK) / 2**20:.0f}"


def _ask(
    engine: BenchEngine, name: str, corpus: _Corpus, answers: Answers, first_sample: int
) -> Callable[[int], Metrics]:
    prompts = corpus.prompts
    warm_up = DocumentQuestion(-1, tuple(range(corpus.num_chunks, corpus.num_chunks + prompts.num_chunks)), True)

    def exists(chunk_ids: set[ChunkId]) -> set[ChunkId]:
        return {one for one in chunk_ids if one < corpus.num_chunks}

    def run(repetition: int) -> Metrics:
        asked = warm_up if repetition < 0 else corpus.questions[repetition]
        chunks = [chunk(prompts, one) for one in asked.chunks]
        reply = engine.ask([system(prompts), *chunks, question(prompts, _FIRST_QUESTION + repetition)])
        if repetition < 0:
            engine.engine.scheduler.forget_chunks(exists)
        engine.finish_idle_work()
        if repetition >= 0:
            answers.add(name, first_sample + repetition, reply)
        return {"ttft_seconds": reply.seconds, "cached_share": reply.num_cached / prompts.prompt_tokens}

    return run
