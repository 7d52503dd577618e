"""An engine stepped by hand, as `driving.drive` wants it: prompts are lists of token ids, and first tokens say
what was kept of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.config.settings import ReuseConfig, RuntimeConfig, SchedulingPolicy
from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent

Tokens = tuple[int, ...]
Prompt = tuple[Tokens, ...]
"""EnginePolicy prompt, documents, question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicy:
    """What is kept, and who is served first."""

    reuse: ReuseConfig
    scheduling: SchedulingPolicy = "first_come"
    window: int = RuntimeConfig().starvation_window
    """Later requests that may be admitted before one that waits."""


class SteppedEngine:
    """Most of a `driving.Runtime`; whoever inherits it makes the engine."""

    def __init__(self, max_tokens: int) -> None:
        """
        Args:
            max_tokens: of each answer.
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
        request = Request(request_id=RequestId(str(number)), prompt=segmented(prompt), sampling=sampling)
        self.engine.submit(request)

    def step(self) -> tuple[list[tuple[int, list[int]]], list[int]]:
        """See `driving.Runtime.step`."""
        return stepped(self.engine.step())

    def do_idle_work(self) -> bool:
        return self.engine.do_idle_work()


def stepped(events: Sequence[TokenEvent]) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Whose first tokens are among them (those that say what was reused), with how many tokens of their prompts were
    kept on each tier; and whose last ones."""
    firsts = [
        (int(event.request_id), [event.reuse.num_tokens_from(tier) for tier in Tier])
        for event in events
        if event.reuse is not None
    ]
    return firsts, [int(event.request_id) for event in events if event.finish_reason is not None]


def segmented(prompt: Sequence[Sequence[int]]) -> SegmentedPrompt:
    """EnginePolicy prompt, documents, question."""
    kinds = [SegmentKind.SYSTEM, *[SegmentKind.CHUNK] * (len(prompt) - 2), SegmentKind.QUESTION]
    return SegmentedPrompt(tuple(Segment(kind, tuple(tokens)) for kind, tokens in zip(kinds, prompt, strict=True)))
