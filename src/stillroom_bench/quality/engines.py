"""`stillroom bench engines`: what a front with engines of its own costs on one machine, and what a second engine gains.

Real servers run as child processes on loopback addresses, and a client reads streamed answers. Each run starts its
server anew, without KV of earlier runs. How to read it: docs/front-and-engines.md
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.config.environment import as_environment
from stillroom.config.settings import ServerConfig, StillroomConfig
from stillroom.errors import UsageError
from stillroom.models.bundled_models import reader_folder
from stillroom.planner.workload import read_questions
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.instrument.served import ServedStillroom, TimedAnswer, engine_processes, memory_of
from stillroom_bench.loads.zipf_questions import zipf_shares
from stillroom_bench.quality.quality_options import EnginesOptions

ONE_PROCESS, SPLIT = "one process", "front and engine"
ONE_ENGINE, ONE_LARGER = "one engine", "one engine with their memory"
_WARM_UP = "Is everything ready?"
_NOTES = {
    "split": (
        "`start_seconds`: from starting the server until it answers questions. First tokens: medians of a run, of each "
        "question's first time, and of its second time, when its KV is kept. Tokens per second: those after the first, "
        "as the client reads them.",
        "Memory at the end of a run. Resident pages that processes share, such as those of libraries, count in each "
        "of them; `all_proportional_bytes` counts them once, over all processes of the server.",
    ),
    "routing": (
        "Questions are drawn by Zipf's law; the first half of a run fills the caches and is not measured. `hit_rate`: "
        "prompt tokens whose KV was kept, of all prompt tokens.",
        "Every engine keeps KV in its device memory only, and computes with as many threads, so an arm with more "
        "engines has more of the machine's cores.",
    ),
}
_BASELINES = {"split": ONE_PROCESS, "routing": ONE_ENGINE}


@dataclass(slots=True)
class EnginesFixture:
    """Documents in a knowledge base, questions about them, and the answers of each arm and run."""

    options: EnginesOptions
    config: StillroomConfig
    kb: Path
    questions: list[str]
    """Different ones."""
    texts: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    """Answers by arm and number of the run."""

    def serve(self, num_engines: int, kv_bytes: int, *, keeps_on_host: bool) -> ServedStillroom:
        """Start a server.

        Args:
            num_engines: that it starts; 0: it answers in its own process.
            kv_bytes: device memory for KV, of all engines together.
            keeps_on_host: whether KV is also kept in host memory, as the settings say.
        """
        config, num_threads = self.config, self.options.num_threads * max(1, num_engines)
        runtime = replace(config.runtime, model=self.options.model, kv_bytes=kv_bytes, num_threads=num_threads)
        host_bytes = config.reuse.host_bytes if keeps_on_host else 0
        config = replace(
            config,
            runtime=runtime,
            reuse=replace(config.reuse, host_bytes=host_bytes, disk_bytes=0),  # nothing stays for the next run
            server=replace(ServerConfig(), access_log=False),
        )
        engines = ["--replicas", str(num_engines)] if num_engines else []
        arguments = ["--kb", str(self.kb), *engines]
        return ServedStillroom(arguments, as_environment(config, leave_out=("cluster", "engine")))

    def ask_all(self, server: ServedStillroom, questions: Sequence[str]) -> list[TimedAnswer]:
        """Ask in order, `num_clients` at the same time."""
        with ThreadPoolExecutor(self.options.num_clients) as clients:
            return list(clients.map(lambda one: server.ask(one, self.options.num_tokens), questions))

    def note(self, arm: str, repetition: int, answers: Sequence[TimedAnswer]) -> None:
        self.texts.setdefault(arm, {})[repetition] = [one.text for one in answers]

    def equal_answers(self, baseline: str) -> list[dict[str, Any]]:
        """Return how many answers of each arm are those of the baseline."""
        rows = []
        for arm, runs in self.texts.items():
            pairs = [
                (one, other)
                for number, texts in runs.items()
                for one, other in zip(texts, self.texts[baseline][number], strict=True)
            ]
            rows.append({"arm": arm, "answers": len(pairs), "equal": sum(one == other for one, other in pairs)})
        return rows


def run_engines(
    options: EnginesOptions,
    work_dir: Path,
    config: StillroomConfig,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run one experiment.

    Args:
        work_dir: holds the knowledge base while the benchmark runs.

    Raises:
        UsageError: the model generates no text, there are too few questions, or memory for them is too small.
        EngineError: a server does not start, or fails.
    """
    environment = record_environment()
    questions = list(dict.fromkeys(read_questions(options.questions)))
    if reader_folder(options.model) is not None:
        raise UsageError("engines need a model that generates text, and this one quotes documents; name another one")
    if len(questions) < options.num_questions:
        raise UsageError(
            f"{options.questions} has {len(questions)} different questions, fewer than --different "
            f"{options.num_questions}; lower it, or add questions"
        )
    work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        kb = Path(folder) / "kb"
        on_progress("adding the documents")
        with KnowledgeBase.open(kb, config, create=True) as opened:
            opened.add(options.documents)
            if not opened.num_chunks:
                raise UsageError("the documents hold no text; name others with --documents")
            opened.search(_WARM_UP)  # completes the indexes on disk
        chosen = np.random.default_rng([options.seed, 1]).permutation(len(questions))[: options.num_questions]
        fixture = EnginesFixture(options, config, kb, [questions[at] for at in chosen.tolist()])
        experiment = {"split": _split, "routing": _routing}[options.experiment]
        arms, tables = experiment(fixture, on_progress)
        samples = run_arms(
            arms,
            repeat=options.repeat,
            warmup=int(options.experiment == "split"),  # a run of routing fills its caches itself
            on_run=lambda arm, number: on_progress(f"{'warm-up' if number < 0 else f'run {number + 1}'}: {arm}"),
            only_own=True,
        )
    baseline = _BASELINES[options.experiment]
    parameters = asdict(options) | {
        "documents": [path.name for path in options.documents],
        "questions": options.questions.name,
        "model": Path(options.model).name,
    }
    return BenchResult(
        "stillroom bench engines",
        environment,
        parameters,
        samples,
        baseline,
        notes=list(_NOTES[options.experiment]),
        tables=tables | {f"Answers that equal those of {baseline}": fixture.equal_answers(baseline)},
    )


Experiment = tuple[list[Arm], dict[str, list[dict[str, Any]]]]


def _split(fixture: EnginesFixture, _: Callable[[str], None]) -> Experiment:
    """Compare a front and one engine with one process."""

    def arm(name: str, num_engines: int) -> Arm:
        def run(repetition: int) -> Metrics:
            rng = np.random.default_rng([fixture.options.seed, 2, repetition + 100])  # warm-up runs are negative
            asked = [fixture.questions[at] for at in rng.permutation(len(fixture.questions)).tolist()]
            with fixture.serve(num_engines, fixture.config.runtime.kv_bytes, keeps_on_host=True) as server:
                server.ask(_WARM_UP, fixture.options.num_tokens)
                first, again = fixture.ask_all(server, asked), fixture.ask_all(server, asked)
                memory = _memory(server)
            fixture.note(name, repetition, [*first, *again])
            return {
                "start_seconds": server.start_seconds,
                "first_token_seconds": _median([one.first_token_seconds for one in first]),
                "repeated_first_token_seconds": _median([one.first_token_seconds for one in again]),
                "tokens_per_second": tokens_per_second([*first, *again]),
                **memory,
            }

        return Arm(name, run)

    return [arm(ONE_PROCESS, 0), arm(SPLIT, 1)], {}


def _routing(fixture: EnginesFixture, on_progress: Callable[[str], None]) -> Experiment:
    """Compare several engines with one, each with memory for a share of the KV that the questions need."""
    options = fixture.options
    on_progress("measuring the KV that all questions need")
    engine_bytes, row = memory_of_an_engine(fixture)
    several = f"{options.num_engines} engines"

    def arm(name: str, num_engines: int, kv_bytes: int) -> Arm:
        def run(repetition: int) -> Metrics:
            asked = zipf_stream(fixture.questions, 2 * options.num_requests, options.zipf, options.seed, repetition)
            with fixture.serve(num_engines, kv_bytes, keeps_on_host=False) as server:
                fixture.ask_all(server, asked[: options.num_requests])
                answers = fixture.ask_all(server, asked[options.num_requests :])
            fixture.note(name, repetition, answers)
            seconds = [one.first_token_seconds for one in answers]
            return {
                "hit_rate": sum(one.num_cached_tokens for one in answers)
                / sum(one.num_prompt_tokens for one in answers),
                "first_token_mean_seconds": float(np.mean(seconds)),
                "first_token_p50_seconds": _median(seconds),
                "first_token_p95_seconds": float(np.percentile(seconds, 95)),
            }

        return Arm(name, run)

    together = options.num_engines * engine_bytes
    arms = [
        arm(ONE_ENGINE, 1, engine_bytes),
        arm(several, options.num_engines, together),
        arm(ONE_LARGER, 1, together),
    ]
    return arms, {"Memory": [row]}


def memory_of_an_engine(fixture: EnginesFixture) -> tuple[int, dict[str, Any]]:
    """Return an engine's bytes for KV, a share of what all questions need, and a row of the report.

    Raises:
        UsageError: the questions need more than `runtime.kv_bytes`, or the share cannot hold the prompts of all
            clients.
    """
    options, kv_bytes = fixture.options, fixture.config.runtime.kv_bytes
    with fixture.serve(0, kv_bytes, keeps_on_host=False) as server:
        answers = fixture.ask_all(server, fixture.questions)
        metrics = server.metrics()
    if metrics["stillroom_kv_cache_evictions_total"]:
        raise UsageError(f"the questions need more KV than runtime.kv_bytes={kv_bytes} holds; raise it")
    block_size = fixture.config.runtime.block_size
    block_bytes = kv_bytes // int(metrics["stillroom_kv_blocks"])
    # each piece begins with a block of its own; half of its last block is empty in the mean
    used = metrics["stillroom_kv_cache_bytes"] / block_bytes + metrics["stillroom_kv_cache_nodes"] / 2
    share = math.ceil(options.share * used)
    longest = max(math.ceil((one.num_prompt_tokens + one.num_tokens) / block_size) for one in answers)
    least = (1 + options.num_clients) * (longest + 2 + fixture.config.search.top_k)
    if share < least:
        raise UsageError(
            f"--share {options.share:g} of the KV of {len(fixture.questions)} questions is {share} blocks, and prompts "
            f"need {least}; raise --different or --share"
        )
    row = {
        "questions": len(fixture.questions),
        "KV of all questions, MiB": used * block_bytes / 2**20,
        "memory of an engine, MiB": share * block_bytes / 2**20,
    }
    return share * block_bytes, row


def zipf_stream(questions: Sequence[str], count: int, exponent: float, seed: int, repetition: int) -> list[str]:
    """Draw questions by Zipf's law. Which ones are popular depends on the repetition."""
    rng = np.random.default_rng([seed, 3, repetition + 100])  # warm-up runs are negative
    popular = rng.permutation(len(questions))
    drawn = popular[rng.choice(len(questions), size=count, p=zipf_shares(len(questions), exponent))]
    return [questions[at] for at in drawn.tolist()]


def tokens_per_second(answers: Sequence[TimedAnswer]) -> float:
    """Return the tokens after the first of each answer, divided by the seconds in which they came."""
    seconds = sum(one.stream_seconds for one in answers)
    return sum(one.num_tokens - 1 for one in answers) / seconds if seconds else math.nan


def _memory(server: ServedStillroom) -> Metrics:
    """Return the memory of the server's processes; empty if the system does not tell."""
    own, engines = memory_of(server.pid), [memory_of(pid) for pid in engine_processes(server.pid)]
    known = [one for one in engines if one is not None]
    if own is None or len(known) < len(engines):
        return {}
    found: dict[str, float] = {"server_resident_bytes": own[0]}
    if known:
        found["engine_resident_bytes"] = sum(resident for resident, _ in known) / len(known)
    return found | {"all_proportional_bytes": own[1] + sum(proportional for _, proportional in known)}


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
