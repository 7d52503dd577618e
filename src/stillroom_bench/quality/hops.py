"""`stillroom bench hops`: answers to questions over several documents, searched once and in several hops.

The documents of all questions are one knowledge base. Every arm answers every question, in an order that changes from
question to question. How to read it: docs/hops.md
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.answer_quality.questions import ChunkQuestion, load_questions
from stillroom.config.settings import ReuseMode, StillroomConfig
from stillroom.errors import NothingFoundError, UsageError
from stillroom.models.bundled_models import reader_folder
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import bootstrapped, paired_tests
from stillroom_bench.quality.judged_answers import judged, refused
from stillroom_bench.quality.quality_options import HopsOptions

_QUALITY = {"exact_match": "exact match", "f1": "F1", "quoted": "quoted", "is_retrieved": "answer found"}
_TESTED = ("quoted", "f1", "is_retrieved")
_NOTES = [
    "Exact match and F1 are those of the span that the reader marks, else of the whole text (SQuAD 1.1); quoted: the "
    "text holds an accepted answer; answer found: a chunk that was read does. The data does not name the passages that "
    "an answer needs, so the share of these is not known. Intervals are bootstrapped over questions, 95 %.",
    "An arm with one hop and more chunks reads as many chunks as one with several hops can find.",
    "Times are those of this run, on a machine that may have run other programs; compare them within the run only.",
]


@dataclass(frozen=True, slots=True)
class HopArm:
    """Settings that are compared."""

    hops: int
    top_k: int
    """Chunks of a search."""
    reuse: ReuseMode | None
    """None: the model keeps no KV."""

    @property
    def name(self) -> str:
        """`group/arm`: arms are compared within a mode of reuse."""
        own = f"{self.hops} hop{'s' if self.hops > 1 else ''}, {self.top_k} chunks each"
        return own if self.reuse is None else f"{self.reuse}/{own}"


def hop_arms(hops: Sequence[int], top_k: int, reuse: Sequence[ReuseMode | None]) -> list[HopArm]:
    """Return one arm for each number of hops, and one with a single hop and as many chunks for the highest."""
    counts = sorted({1, *hops})
    wide = [HopArm(1, top_k * counts[-1], mode) for mode in reuse] if counts[-1] > 1 else []
    return [*(HopArm(count, top_k, mode) for mode in reuse for count in counts), *wide]


def is_for_test(question: str) -> bool:
    """Whether a question is in the part that is reported: two thirds of them, by a hash. The rules of hops were chosen
    on the others."""
    return int(hashlib.sha256(question.encode()).hexdigest(), 16) % 3 != 0


def run_hops(
    options: HopsOptions, work_dir: Path, config: StillroomConfig, on_step: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Answer the questions of a part under every arm.

    Raises:
        UsageError: the file has no questions with answers in this part, or `--reuse` is given for a reader.
        ModelError: the model cannot be used.
    """
    environment = record_environment()
    questions = load_questions(options.questions)
    chosen = [one for one in questions if one.answers and is_for_test(one.question) is (options.part == "test")]
    chosen = chosen[: options.num_questions]
    if not chosen:
        raise UsageError(f"{options.questions} has no questions with answers in the part {options.part!r}")
    is_reader = reader_folder(options.model) is not None
    if is_reader and options.reuse:
        raise UsageError(f"--reuse has no effect with {options.model}, which keeps no KV; omit it")
    arms = hop_arms(options.hops, config.search.top_k, (None,) if is_reader else options.reuse or ("exact",))
    config = _config(config, options)
    kb = _knowledge_base(questions, options.questions.stem, work_dir, config, on_step)
    samples = _asked(chosen, arms, kb, config, options, on_step)
    parameters = {
        "questions": options.questions.name,
        "part": options.part,
        "num_questions": len(chosen),
        "model": options.model,
        "hop_question": options.hop_question,
        "top_k": config.search.top_k,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
    }
    baseline = HopArm(1, config.search.top_k, None).name
    tables = {"Answers": [_row(arm, samples, options.seed) for arm in arms], "Against one hop": _tests(arms, samples)}
    return BenchResult(
        "stillroom bench hops",
        environment,
        parameters,
        samples,
        baseline,
        notes=_NOTES,
        tables=tables,
        sample_of="question",
    )


def _config(config: StillroomConfig, options: HopsOptions) -> StillroomConfig:
    """Without the query cache, which would answer the searches of later arms, and without KV on disk."""
    return replace(
        config,
        runtime=replace(config.runtime, model=options.model),
        search=replace(config.search, hop_question=options.hop_question),
        query_cache=replace(config.query_cache, max_tokens=0),
        reuse=replace(config.reuse, disk_bytes=0),
    )


def _knowledge_base(
    questions: Sequence[ChunkQuestion],
    name: str,
    work_dir: Path,
    config: StillroomConfig,
    on_step: Callable[[str], None],
) -> Path:
    """Index the documents of all questions, of both parts; kept between runs."""
    texts = list(dict.fromkeys(chunk.text for question in questions for chunk in question.chunks))
    fixed = (config.chunker, config.embedder.model, config.index)
    key = hashlib.sha256(repr((texts, fixed)).encode()).hexdigest()[:12]
    folder = work_dir / f"hops-{name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        lines = (json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts))
        corpus.write_text("".join(lines), encoding="utf-8")
    on_step(f"indexing {len(texts)} documents (cached in {work_dir})")
    with Stillroom.open(folder / "kb", config=config) as stillroom:
        stillroom.add(corpus)
    return folder / "kb"


def _asked(
    questions: Sequence[ChunkQuestion],
    arms: Sequence[HopArm],
    kb: Path,
    config: StillroomConfig,
    options: HopsOptions,
    on_step: Callable[[str], None],
) -> Samples:
    samples = Samples()
    with ExitStack() as opened:
        stillrooms: dict[HopArm | None, Stillroom] = {}
        for arm in arms:
            key = None if arm.reuse is None else arm  # arms must not find each other's KV
            if key not in stillrooms:
                stillrooms[key] = opened.enter_context(_opened(arm, kb, config))
        for number, question in enumerate(questions):
            first = number % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                stillroom = stillrooms[None if arm.reuse is None else arm]
                samples.add(arm.name, _ask(stillroom, question, arm, options.max_tokens))
            if (number + 1) % 10 == 0 or number + 1 == len(questions):
                on_step(f"{number + 1} of {len(questions)} questions")
    return samples


def _opened(arm: HopArm, kb: Path, config: StillroomConfig) -> Stillroom:
    if arm.reuse is not None:
        config = replace(config, reuse=replace(config.reuse, mode=arm.reuse))
    stillroom = Stillroom.open(kb, config=config, create=False)
    stillroom.warm_up()
    if arm.reuse == "prepared":
        stillroom.prepare()
    return stillroom


def _ask(stillroom: Stillroom, question: ChunkQuestion, arm: HopArm, max_tokens: int) -> dict[str, float]:
    began = time.perf_counter()
    asked = AskOptions(hops=arm.hops, top_k=arm.top_k, max_tokens=max_tokens)
    try:
        answer = stillroom.ask(question.question, asked)
    except NothingFoundError:
        found = refused(question.answers, time.perf_counter() - began)
        return {name: getattr(found, name) for name in _QUALITY} | {"searches": 1.0, "read_chunks": 0.0}
    seconds = time.perf_counter() - began
    found = judged(answer, question.answers, (), seconds)
    return {
        **{name: getattr(found, name) for name in _QUALITY},
        "searches": float(max(len(answer.hops), 1)),
        "read_chunks": float(len(answer.sources)),
        "answer_seconds": seconds,
        **_tokens(answer),
    }


def _tokens(answer: Answer) -> dict[str, float]:
    """Prompt tokens of all requests of a question, and those of them that were computed."""
    prompts = answer.reuse.num_prompt_tokens + sum(hop.num_prompt_tokens for hop in answer.hops)
    cached = answer.reuse.num_cached_tokens + sum(hop.num_cached_tokens for hop in answer.hops)
    return {"prompt_tokens": float(prompts), "computed_tokens": float(prompts - cached)}


def _row(arm: HopArm, samples: Samples, seed: int) -> dict[str, Any]:
    found = samples.values[arm.name]
    searches = np.mean(found["searches"])
    shown = {title: str(bootstrapped(np.array(found[name]), seed=seed)) for name, title in _QUALITY.items()}
    return {
        "arm": arm.name,
        **shown,
        "searches": f"{searches:.2f}",
        "chunks read": f"{np.mean(found['read_chunks']):.1f}",
        "prompt tokens": f"{np.mean(found['prompt_tokens']):,.0f}",
        "computed": f"{np.mean(found['computed_tokens']):,.0f}",
        "s / search": f"{np.mean(found['answer_seconds']) / searches:.2f}",
    }


def _tests(arms: Sequence[HopArm], samples: Samples) -> list[dict[str, Any]]:
    """Return paired t-tests of each arm against one hop with as many chunks in a search, and against one hop with as
    many chunks in all; Holm-corrected over the table."""
    pairs = {}
    for arm in arms:
        for other in arms:
            if arm.hops > 1 and other.hops == 1 and other.reuse == arm.reuse:
                for metric in _TESTED:
                    own, theirs = samples.of(arm.name, metric), samples.of(other.name, metric)
                    pairs[arm.name, other.name, metric] = (own, theirs)
    return [
        {
            "arm": name,
            "against": against,
            "measure": _QUALITY[metric],
            "difference": f"{test.mean_difference:+.3f}",
            "p (Holm)": f"{test.adjusted_p:.2g}",
            "significant": "yes" if test.is_significant else "no",
        }
        for (name, against, metric), test in paired_tests(pairs).items()
    ]
