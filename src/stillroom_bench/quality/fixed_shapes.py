"""`stillroom bench fixed-shapes`: effect of `runtime.fixed_shapes` on answers and time.

An engine that reuses exact prefixes and an engine without reuse answer the same questions, one at a time, with and
without fixed shapes. Reported are the number of answers that differ between the two, the largest difference of the
first token's log probability, and the time to first token.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import ReuseConfig, RuntimeConfig
from stillroom.core.batch import TokenLogprobs
from stillroom.core.clock import SystemClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_model
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.quality.quality_options import FixedShapesOptions

_NUM_DOCUMENTS = 6
_SYSTEM = 10
_LENGTHS = (60, 250)
"""Tokens of a document."""
_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TimedReply:
    """An answer with its timing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    first_token_seconds: float


def questions(vocab_size: int, count: int, seed: int) -> list[Request]:
    """Make prompts of random tokens: a shared system prompt, two of six documents, and a distinct question."""
    randomness = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(randomness.integers(4, vocab_size, randomness.integers(low, high)).tolist())

    system, documents = tokens(_SYSTEM, _SYSTEM + 1), [tokens(*_LENGTHS) for _ in range(_NUM_DOCUMENTS)]
    found = []
    for number in range(count):
        chunks = [
            Segment(SegmentKind.CHUNK, documents[one], ChunkId(int(one)))
            for one in randomness.choice(_NUM_DOCUMENTS, 2, replace=False)
        ]
        segments = (Segment(SegmentKind.SYSTEM, system), *chunks, Segment(SegmentKind.QUESTION, tokens(8, 40)))
        sampling = SamplingParams(max_tokens=_MAX_TOKENS, logprobs=5)
        found.append(Request(request_id=RequestId(f"q{number}"), prompt=SegmentedPrompt(segments), sampling=sampling))
    return found


def answer(engine: Engine, question: Request) -> TimedReply:
    """Submit a question and run the engine until its answer is complete."""
    began, first = engine.clock.monotonic(), 0.0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    engine.submit(question)
    while engine.has_work:
        for event in engine.step():
            if event.token_id is not None and event.logprobs is not None:
                first = first or event.at - began
                token_ids.append(event.token_id)
                logprobs.append(event.logprobs)
    return TimedReply(token_ids, logprobs, first)


def run_fixed_shapes(options: FixedShapesOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Run every question on every engine `repeat` times, with a new engine for each run.

    Raises:
        ModelError: the checkpoint cannot be used.
    """
    model, dtype, num_questions = options.model, options.dtype, options.num_questions
    environment = record_environment()
    decoder = load_model(model, dtype=dtype).decoder
    asked = questions(decoder.spec.vocab_size, num_questions, options.seed)
    found: dict[str, list[TimedReply]] = {}

    def arm(name: str, mode: ReuseConfig, runtime: RuntimeConfig) -> Arm:
        def run(_: int) -> Metrics:
            found[name] = _replies(decoder, asked, runtime, mode)
            return {"time_to_first_token_seconds": statistics.median(one.first_token_seconds for one in found[name])}

        return Arm(name, run)

    off, exact = ReuseConfig(mode="off"), ReuseConfig(mode="exact")
    shapes = {"": RuntimeConfig(), ", fixed shapes": RuntimeConfig(fixed_shapes=True)}
    arms = [
        arm(name + suffix, mode, runtime)
        for suffix, runtime in shapes.items()
        for name, mode in (("off", off), ("exact", exact))
    ]
    samples = run_arms(
        arms, repeat=options.repeat, on_run=lambda name, at: on_progress(f"{name}, run {at}"), only_own=True
    )
    rows = [
        {"fixed shapes": "yes" if suffix else "no"} | _differences(found["exact" + suffix], found["off" + suffix])
        for suffix in shapes
    ]
    return BenchResult(
        "stillroom bench fixed-shapes",
        environment,
        {
            "model": model,
            "dtype": dtype,
            "num_questions": num_questions,
            "repeat": options.repeat,
            "seed": options.seed,
        },
        samples,
        "off",
        tables={"exact reuse against none": rows},
    )


def _replies(
    decoder: CausalModel, asked: Sequence[Request], runtime: RuntimeConfig, reuse: ReuseConfig
) -> list[TimedReply]:
    """Answer all questions with a new engine, after one answer to the first question as warm-up."""
    engine, cache = build_engine(decoder, runtime, SystemClock(), reuse=reuse, fingerprint=bytes(32))
    answer(engine, asked[0])
    found = [answer(engine, one) for one in asked]
    cache.close()
    return found


def _differences(kept: Sequence[TimedReply], computed: Sequence[TimedReply]) -> dict[str, Any]:
    pairs = list(zip(kept, computed, strict=True))
    return {
        "questions": len(pairs),
        "answers that differ": sum(one.token_ids != other.token_ids for one, other in pairs),
        "log probabilities that differ": sum(
            (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs) for one, other in pairs
        ),
        "first log probability, at most by": max(
            abs(one.logprobs[0].logprob - other.logprobs[0].logprob) for one, other in pairs
        ),
    }
