"""An engine that `driving.drive` steps: prompts are token ids, and first tokens report the reused KV."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig, SchedulingPolicy
from stillroom.core.ids import RequestId
from stillroom.core.kv import OWN_TIERS
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent

Tokens = tuple[int, ...]
Prompt = tuple[Tokens, ...]
"""System prompt, documents, question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicy:
    """Policies of reuse and admission."""

    reuse: ReuseConfig
    scheduling: SchedulingPolicy = "first_come"
    window: int = RuntimeConfig().starvation_window
    """Later requests that may be admitted before a waiting one."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)


class SteppedEngine:
    """Implements `driving.DrivenRuntime` except `reset`; a subclass makes the engine."""

    def __init__(self, max_tokens: int) -> None:
        """
        Args:
            max_tokens: tokens of each answer.
        """
        self._max_tokens = max_tokens
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None:
        sampling = SamplingParams(max_tokens=self._max_tokens)
        request = Request(request_id=RequestId(str(number)), prompt=self.segments_of(prompt), sampling=sampling)
        self.engine.submit(request)

    def segments_of(self, prompt: Sequence[Sequence[int]]) -> SegmentedPrompt:
        return segmented(prompt)

    def step(self) -> tuple[list[tuple[int, list[int]]], list[int]]:
        return step_outcome(self.engine.step())

    def do_idle_work(self) -> bool:
        return self.engine.do_idle_work()


def step_outcome(events: Sequence[TokenEvent]) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Return the first tokens among the events, with the reused prompt tokens by tier, and the completed requests."""
    firsts = [
        (int(event.request_id), [event.reuse.num_tokens_from(tier) for tier in OWN_TIERS])
        for event in events
        if event.reuse is not None
    ]
    return firsts, [int(event.request_id) for event in events if event.finish_reason is not None]


def segmented(prompt: Sequence[Sequence[int]]) -> SegmentedPrompt:
    """Mark the parts of a prompt: system, documents, question."""
    kinds = [SegmentKind.SYSTEM, *[SegmentKind.CHUNK] * (len(prompt) - 2), SegmentKind.QUESTION]
    return SegmentedPrompt(tuple(Segment(kind, tuple(tokens)) for kind, tokens in zip(kinds, prompt, strict=True)))
