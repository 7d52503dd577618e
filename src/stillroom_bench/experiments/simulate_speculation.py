"""RAGCache Figure 19 and Table 3 for `stillroom bench simulate`: speculative prefill on a modelled machine.

Inputs are the search times of Table 3 ("No DSP"), four stages as in Figure 11, and how often the list of a stage is
final, measured on Stillroom's index (benchmarks/2026-11-21-convergence.md: IVF-PQ, after 2, 4 and 6 of 8 stages, mean
of the first and the first three documents). A list that is not final ends with another document. Search and engine have
separate clocks and do not slow each other down, because the paper runs them on different processors.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from stillroom.backends.base import Load, PreparedPrompt
from stillroom.config.settings import SpeculationConfig
from stillroom.core.clock import VirtualClock
from stillroom.core.document import Chunk, ScoredChunk, SearchResult
from stillroom.core.ids import ChunkId, DocumentId, RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import Request, SampleRequest, SamplingParams
from stillroom.engine.events import Listener, TokenEvent
from stillroom.planner.simulation.simulated_runtime import SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import Prompt, Tokens, segmented
from stillroom.rag.speculation import Attempt, Speculator
from stillroom.telemetry.metrics import Metrics
from stillroom_bench.experiments.experiment_options import SimulateOptions
from stillroom_bench.experiments.simulated_cases import Case, Say, Tables, ragcache_case

TABLE_3 = {
    "mmlu": {0.125: (78.5, 52.1), 0.25: (135.9, 59.2), 0.5: (243.7, 69.7), 1.0: (422.3, 97.4)},
    "nq": {0.125: (105.8, 67.7), 0.25: (163.4, 72.9), 0.5: (282.5, 94.2), 1.0: (446.1, 145.0)},
}
"""Share of vectors searched -> milliseconds of search that do not overlap with prefill, without and with speculative
pipelining."""
FINAL_AFTER = (0.93, 0.975, 0.99)
"""Share of questions whose list is final from each stage on; the last stage is omitted."""
_GAP = 10.0
"""Seconds between questions: 0.1 per second (7.3)."""

Mode = Literal["off", "on"]


def speculation(options: SimulateOptions, say: Say) -> Tables:
    """RAGCache Figure 19 and Table 3: Mistral-7B, one question at a time."""
    rows = []
    for curve, shares in TABLE_3.items():
        case = ragcache_case("mistral-7b-a10g", curve, 2, options)
        for share, (search_ms, paper_ms) in shares.items():
            say(f"speculation, {curve}, {share:.1%} of the vectors")
            off, on = (_Overlapping(case, mode).run(search_ms / 1e3) for mode in ("off", "on"))
            row: dict[str, Any] = {"curve": curve, "searched": f"{share:.1%}", "search ms": search_ms}
            row |= {"search left over ms": 1e3 * on["exposed"], "paper ms": paper_ms}
            row |= {"times less": off["exposed"] / on["exposed"], "paper times less": search_ms / paper_ms}
            row |= {"search first s": off["ttft"], "begin early s": on["ttft"], "ratio": off["ttft"] / on["ttft"]}
            rows.append(row | {"paper": "up to 1.6", "begun per question": on["begun"]})
    return {"Figure 19 and Table 3: search first / begin early": rows}


class _Overlapping(SimulatedRuntime):
    """Simulated engine with a concurrent search: the backend of a `Speculator`."""

    may_speculate = True

    def __init__(self, case: Case, mode: Mode) -> None:
        super().__init__(case.hardware, case.ragcache(), case.options.seed)
        self._case = case
        self._max_tokens = case.hardware.max_tokens
        self._searching = VirtualClock()
        self._speculator = Speculator(self, SpeculationConfig(mode=mode), self._searching, Metrics())
        self._listeners: dict[RequestId, Listener] = {}
        self._documents: dict[ChunkId, Tokens] = {}
        self._num_asked = 0

    @property
    def load(self) -> Load:
        scheduler = self.engine.scheduler
        return Load(scheduler.num_waiting, scheduler.num_running, num_prefilling=scheduler.num_prefilling)

    def cancel(self, request_id: RequestId) -> None:
        event = self.engine.cancel(request_id)
        if event is not None:
            self._dispatch([event])

    def run(self, search_seconds: float) -> dict[str, float]:
        """Return means over all questions after warm-up."""
        options, traffic = self._case.options, self._case.traffic
        self.ask(traffic.prompts(options.num_warm, 0))
        count = options.num_requests
        draw = np.random.default_rng([options.seed, 7])
        asked = [
            self._question(prompt, float(draw.uniform()), other[1], search_seconds)
            for prompt, other in zip(traffic.prompts(count, 2), traffic.prompts(count, 3), strict=True)
        ]
        return {name: float(np.mean([one[name] for one in asked])) for name in asked[0]}

    def _question(self, prompt: Prompt, luck: float, wrong: Tokens, search_seconds: float) -> dict[str, float]:
        began = self.clock.monotonic() + _GAP
        self._run_until(began)
        self._searching.now = began

        def stages(num_stages: int) -> Iterator[SearchResult]:
            for stage in range(num_stages):
                now = began + search_seconds * (stage + 1) / num_stages
                self._run_until(now)
                self._searching.now = now
                is_final = stage == num_stages - 1 or luck < FINAL_AFTER[stage]
                documents = prompt[1:-1] if is_final else (*prompt[1:-2], wrong)
                yield SearchResult(tuple(map(self._scored, documents)), search_seconds=now - began)

        def attempt_with(found: Sequence[ScoredChunk]) -> Attempt:
            self._num_asked += 1
            sampling = SamplingParams(max_tokens=self._max_tokens)
            sample = SampleRequest(request_id=RequestId(f"q{self._num_asked}"), sampling=sampling)
            documents = [self._documents[one.chunk.chunk_id] for one in found]
            whole = segmented((prompt[0], *documents, prompt[-1]))
            return Attempt(self, PreparedPrompt(whole, (), whole.num_tokens), [sample])

        found = self._speculator.find(stages, "dense", attempt_with)
        events: list[TokenEvent] = []
        found.attempt.deliver([events.append], self._searching.monotonic())
        while not events:
            self._dispatch(self.engine.step())
        self._run_until(float("inf"))
        ahead = min(found.report.ahead_seconds, search_seconds)
        return {
            "ttft": events[0].at - began,
            "exposed": search_seconds - ahead,
            "begun": found.report.num_started,
        }

    def _run_until(self, moment: float) -> None:
        """Run the engine until a moment; a step in progress then is completed."""
        while self.engine.has_work and self.clock.monotonic() < moment:
            self._dispatch(self.engine.step())
        if self.clock.monotonic() < moment < float("inf"):
            self.clock.advance(moment - self.clock.monotonic())

    def _dispatch(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._listeners[event.request_id](event)
            if event.finish_reason is not None:
                del self._listeners[event.request_id]

    def _scored(self, document: Tokens) -> ScoredChunk:
        chunk_id = ChunkId(hash(document) & 0x7FFFFFFF)
        self._documents[chunk_id] = document
        return ScoredChunk(Chunk(chunk_id, DocumentId("/made"), 0, ""), 1.0, {})

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        assert isinstance(prepared.prompt, SegmentedPrompt)
        for sample, listener in zip(samples, listeners, strict=True):
            self._listeners[sample.request_id] = listener
            request = Request(request_id=sample.request_id, prompt=prepared.prompt, sampling=sample.sampling)
            self.engine.submit(request)
