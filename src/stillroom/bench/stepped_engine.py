"""An engine stepped by hand, as `reuse_worker.drive` wants it: prompts are lists of token ids, and first tokens say
what was kept of them."""

from collections.abc import Iterable, Sequence

from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent


class SteppedEngine:
    """Most of a `reuse_worker.Runtime`; whoever inherits it makes the engine."""

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
        kinds = [SegmentKind.SYSTEM, *[SegmentKind.CHUNK] * (len(prompt) - 2), SegmentKind.QUESTION]
        segments = tuple(Segment(kind, tuple(tokens)) for kind, tokens in zip(kinds, prompt, strict=True))
        sampling = SamplingParams(max_tokens=self._max_tokens)
        request = Request(request_id=RequestId(str(number)), prompt=SegmentedPrompt(segments), sampling=sampling)
        self.engine.submit(request)

    def step(self) -> list[tuple[int, list[int]]]:
        """The first token of a request is the one that says what was reused."""
        return first_tokens(self.engine.step())

    def tend(self) -> bool:
        return self.engine.tend()


def first_tokens(events: Iterable[TokenEvent]) -> list[tuple[int, list[int]]]:
    """Whose first tokens are among them, and how many tokens of their prompts were kept on each tier."""
    return [
        (int(event.request_id), [event.reuse.num_tokens_from(tier) for tier in Tier])
        for event in events
        if event.reuse is not None
    ]
