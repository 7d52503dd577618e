"""Measures what a question costs on this machine beyond its search and its steps alone.

A few questions are asked one at a time, and then while searches run on the same cores. Nothing of it is taken from the
workload's times, so a validation (`planner/validation.py`) scores a prediction that it did not shape.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from stillroom.core.clock import Clock
from stillroom.planner.inputs import Overheads, PlanInputs
from stillroom.planner.simulation.search_station import SharedCores
from stillroom.planner.simulation.simulated_runtime import SimulatedRuntime
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.knowledge_base import KnowledgeBase

_NUM_QUESTIONS = 8
_ANSWER_TOKENS = 16
_LEAST = 2
_BUDGET_SECONDS = 20.0
"""After these, no question beyond the least is measured."""


@dataclass(slots=True)
class ObservedOverheads:
    """Measured times, one entry for each question that was asked."""

    questions: list[int] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    """Time to first token of a question that was asked before: its search and its KV are kept."""
    per_token: list[float] = field(default_factory=list)
    """Time per token after the first."""
    search_slowdowns: list[float] = field(default_factory=list)
    """Time of a search beside an answer without kept KV, divided by its time alone."""
    answer_slowdowns: list[float] = field(default_factory=list)
    """Time of that answer beside searches, divided by its time alone."""

    @property
    def cores(self) -> SharedCores:
        return SharedCores(_slowdown(self.search_slowdowns), _slowdown(self.answer_slowdowns))


def observe(
    stillroom: Stillroom, kb: KnowledgeBase, texts: Sequence[str], numbers: Sequence[int], clock: Clock
) -> ObservedOverheads:
    """Ask up to eight distinct questions of `numbers`, alone and beside searches.

    Args:
        stillroom: answers nothing else meanwhile.
        kb: the knowledge base that it answers from.

    Raises:
        StillroomError: as `Stillroom.ask`.
    """
    stillroom.warm_up()
    asking = _Asking(stillroom, kb, texts, clock)
    seen, began = ObservedOverheads(), clock.monotonic()
    for number in list(dict.fromkeys(numbers))[:_NUM_QUESTIONS]:
        if len(seen.questions) >= _LEAST and clock.monotonic() - began > _BUDGET_SECONDS:
            break
        asking.ask(number)
        timing = asking.ask(number).timing
        seen.questions.append(number)
        seen.repeated.append(timing.ttft_seconds)
        seen.per_token.append(timing.tpot_seconds)
        search, answer = float(np.median([asking.search(number) for _ in range(3)])), asking.ask_anew(number)
        searches, beside = asking.beside_searches(number)
        if searches:
            seen.search_slowdowns.append(float(np.median(searches)) / search)
            seen.answer_slowdowns.append(beside / answer)
    return seen


def with_overheads(inputs: PlanInputs, seen: ObservedOverheads) -> PlanInputs:
    """Return the inputs with what the observed times have beyond the modelled ones, at least 0."""
    runtime = SimulatedRuntime(replace(inputs.hardware, max_tokens=_ANSWER_TOKENS), inputs.policy)
    modelled = [runtime.ask([inputs.found[number].prompt] * 2) for number in seen.questions]
    firsts = np.array([one.seconds[1] for one in modelled])
    per_token = (np.array([one.response_seconds[1] for one in modelled]) - firsts) / (_ANSWER_TOKENS - 1)
    step = max(0.0, float(np.median(np.array(seen.per_token) - per_token)))
    request = max(0.0, float(np.median(np.array(seen.repeated) - firsts)) - step)
    hardware = replace(inputs.hardware, step_seconds=inputs.hardware.step_seconds + step)
    return replace(inputs, hardware=hardware, overheads=Overheads(request, step, seen.cores))


def _slowdown(ratios: Sequence[float]) -> float:
    """Return the median, at least 1: a search does not speed up the model. 1 without measurements."""
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


class _Asking:
    """Asks for answers of equal length, and searches without the query cache."""

    def __init__(self, stillroom: Stillroom, kb: KnowledgeBase, texts: Sequence[str], clock: Clock) -> None:
        self._stillroom, self._kb, self._texts, self._clock = stillroom, kb, texts, clock
        self._options = AskOptions(max_tokens=_ANSWER_TOKENS, min_tokens=_ANSWER_TOKENS)
        self._systems = count(1)

    def ask(self, number: int) -> Answer:
        return self._stillroom.ask(self._texts[number], self._options)

    def ask_anew(self, number: int) -> float:
        """Ask with a system message of its own, behind which no document's KV is kept; return the seconds from the
        prompt to the last token."""
        system = f"This is request {next(self._systems)}."
        timing = self._stillroom.ask(self._texts[number], replace(self._options, system=system)).timing
        return timing.total_seconds - timing.retrieval_seconds

    def search(self, number: int) -> float:
        """Return the seconds of a search."""
        began = self._clock.monotonic()
        self._kb.search(self._texts[number])
        return self._clock.monotonic() - began

    def beside_searches(self, number: int) -> tuple[list[float], float]:
        """Search until a question is answered in another thread; return the seconds of the searches that ended before
        it, and those of the answer."""
        searches = list[float]()
        with ThreadPoolExecutor(1, "stillroom-plan") as pool:
            answer = pool.submit(self.ask_anew, number)
            while not answer.done():
                seconds = self.search(number)
                searches += [] if answer.done() else [seconds]
            return searches, answer.result()
