"""`stillroom bench lookup`: the time per token of answers that quote, with and without prompt lookup.

The weights are random, so a constraint that allows one token at each position writes the answers: runs of tokens of the
prompt, and tokens that are nowhere else. Both arms compute the same answers in the same order.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import RuntimeConfig
from stillroom.core.clock import Clock, SystemClock
from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_own_decoder
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom_bench.instrument.bench_report import BenchResult, format_value
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, run_arms
from stillroom_bench.instrument.statistics import ratio_of_medians
from stillroom_bench.quality.quality_options import LookupOptions
from stillroom_bench.quality.runtime import Shape, write_checkpoint

OFF, ON = "off", "on"

_SHARES = {"quotes all": 1.0, "quotes half": 0.5, "quotes nothing": 0.0}
"""Shares of an answer's runs that quote."""


@dataclass(slots=True)
class ScriptedAnswer:
    """A `TokenConstraint` that allows one token at each position."""

    token_ids: NDArray[np.int64]
    vocab_size: int
    position: int = 0
    error: str | None = None

    def copy(self) -> "ScriptedAnswer":
        return replace(self)

    def allowed(self) -> NDArray[np.int32]:
        words = np.zeros(-(-self.vocab_size // 32), np.uint32)
        token_id = int(self.token_ids[self.position])
        words[token_id // 32] = 1 << (token_id % 32)
        return words.view(np.int32)

    def allows(self, token_id: int) -> bool:
        return bool(self.token_ids[self.position] == token_id)

    def advance(self, token_id: int) -> None:
        assert self.allows(token_id)
        self.position += 1

    @property
    def is_complete(self) -> bool:
        return self.position == len(self.token_ids)


def run_lookup(
    options: LookupOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    clock: Clock | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps checkpoints between runs.
        clock: of the engines, by which they decide whether proposing pays; None: the system's.
    """
    environment, shape = record_environment(), shape or Shape()

    def load() -> CausalModel:
        folder = options.model or write_checkpoint(work_dir, shape, options.dtype, options.seed)
        return load_own_decoder(folder, device="cpu", dtype=options.dtype)

    decoder = run_in_short_lived_thread(load)
    vocab_size = decoder.spec.vocab_size
    most = {OFF: 0, ON: options.num_proposed}
    engines = {
        name: build_engine(decoder, RuntimeConfig(prompt_lookup=number), clock or SystemClock())[0]
        for name, number in most.items()
    }

    def arm(kind: str, name: str) -> Arm:
        return Arm(f"{kind}/{name}", lambda at: _measure(engines[name], options, vocab_size, _SHARES[kind], at))

    arms = [arm(kind, name) for kind in _SHARES for name in engines]
    samples = run_arms(
        arms,
        repeat=options.repeat,
        warmup=2,
        on_run=lambda name, at: on_progress(f"{name}, run {at}"),
        only_own=True,
    )
    return BenchResult(
        "stillroom bench lookup",
        environment,
        {
            "model": str(options.model or "random weights"),
            "dtype": options.dtype,
            "length": options.length,
            "answer_length": options.answer_length,
            "run_length": options.run_length,
            "requests": options.num_requests,
            "most_proposed": options.num_proposed,
            "repeat": options.repeat,
            "seed": options.seed,
        },
        samples,
        OFF,
        tables={"with lookup against without": [_row(samples, kind) for kind in _SHARES]},
    )


def _measure(engine: Engine, options: LookupOptions, vocab_size: int, share: float, repetition: int) -> Metrics:
    """Answer requests that decode together; returns the time per step and token, without prefill."""
    rng = np.random.default_rng([options.seed, repetition + 100, int(100 * share)])  # warm-up repetitions are negative
    for number in range(options.num_requests):
        engine.submit(_request(rng, options, vocab_size, share, number))
    before = engine.lookup_counts
    started: set[RequestId] = set()
    while len(started) < options.num_requests:
        started.update(event.request_id for event in engine.step())
    began, num_tokens = engine.clock.monotonic(), 0
    while engine.has_work:
        num_tokens += sum(event.token_id is not None for event in engine.step())
    seconds, counts = engine.clock.monotonic() - began, engine.lookup_counts
    found = {"token_seconds": seconds * options.num_requests / num_tokens}
    if proposed := counts.num_proposed - before.num_proposed:
        found["accepted_share"] = (counts.num_accepted - before.num_accepted) / proposed
        found["accepted_tokens"] = counts.num_accepted - before.num_accepted
    return found


def _request(rng: np.random.Generator, options: LookupOptions, vocab_size: int, share: float, number: int) -> Request:
    """Return a request whose answer has runs of its prompt and runs of other tokens, in turn."""
    ids = rng.permutation(np.arange(4, vocab_size))
    prompt, others = ids[: options.length], ids[options.length :]
    answer: list[int] = []
    num_quoted = num_runs = 0
    while len(answer) < options.answer_length:
        num_runs += 1
        is_quoted = num_quoted < round(share * num_runs)
        source = prompt if is_quoted else others
        num_quoted += is_quoted
        first = int(rng.integers(0, max(1, len(source) - options.run_length)))
        answer += source[first : first + options.run_length].tolist()
    script = np.array(answer[: options.answer_length], np.int64)
    return Request(
        request_id=RequestId(str(number)),
        prompt=SegmentedPrompt((Segment(SegmentKind.QUESTION, tuple(prompt.tolist())),)),
        sampling=SamplingParams(max_tokens=options.answer_length),
        constraint=ScriptedAnswer(script, vocab_size),
    )


def _row(samples: Samples, kind: str) -> dict[str, Any]:
    metric = "token_seconds"
    without, with_lookup = (samples.of(f"{kind}/{name}", metric) for name in (OFF, ON))
    return {
        "answer": kind,
        OFF: format_value(metric, statistics.median(without)),
        ON: format_value(metric, statistics.median(with_lookup)),
        "ratio": str(ratio_of_medians(with_lookup, without)),
    }
