"""Checks answers from placed KV against a full prefill, a few of them and in idle moments only.

A sampled answer's prompt runs again without placing anything, with the same sampling; its first tokens agree or they do
not. When it is sure, with 95 % confidence, that more answers differ than the user allows, the recompute ratio doubles,
and in the end nothing is placed any more. It is never lowered by itself: restart, or configure, to try again.
"""

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.engine.events import TokenEvent
from stillroom.kvcache.placement import AnywhereOptions

logger = logging.getLogger(__name__)

NUM_TOKENS = 8
"""First tokens of an answer that are compared."""
CONFIDENCE = 0.95
_MAX_WAITING = 8


@dataclass(frozen=True, slots=True)
class AuditFigures:
    num_audited: int
    num_disagreed: int
    upper_bound: float
    """On the share of answers that differ, since the ratio last changed; one-sided, 95 % confidence."""
    options: AnywhereOptions | None
    """Now; None if nothing is placed any more."""


@dataclass(slots=True)
class _Answer:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    has_placed: bool = False


class Audit:
    """Of one engine, in its thread."""

    def __init__(
        self,
        options: AnywhereOptions,
        allow: Callable[[AnywhereOptions | None], None],
        *,
        share: float,
        max_disagreement: float,
        randomness: random.Random,
    ) -> None:
        """
        Args:
            allow: told when the options change.
            share: of the answers with placed KV that is audited.
            max_disagreement: share of these that may differ.
        """
        self._options: AnywhereOptions | None = options
        self._allow = allow
        self._share, self._limit = share, max_disagreement
        self._randomness = randomness
        self._open: dict[RequestId, _Answer] = {}
        self._waiting: deque[tuple[Request, list[int]]] = deque(maxlen=_MAX_WAITING)
        self._shadow: tuple[Request, list[int], list[int]] | None = None  # what runs, what was said, what it says
        self._num_here = self._num_disagreed_here = 0
        self._num_audited = self._num_disagreed = 0

    @property
    def figures(self) -> AuditFigures:
        bound = upper_bound(self._num_disagreed_here, self._num_here)
        return AuditFigures(self._num_audited, self._num_disagreed, bound, self._options)

    def submitted(self, request: Request) -> None:
        if self._options is not None:
            self._open[request.request_id] = _Answer(request)

    def hear(self, event: TokenEvent) -> bool:
        """Take note of an event; True if it is of an audit, and nobody else's business."""
        if self._shadow is not None and event.request_id == self._shadow[0].request_id:
            self._hear_shadow(event)
            return True
        answer = self._open.get(event.request_id)
        if answer is not None:
            if event.token_id is not None and len(answer.token_ids) < NUM_TOKENS:
                answer.token_ids.append(event.token_id)
            if event.reuse is not None:
                answer.has_placed = event.reuse.has_placed
            if event.finish_reason is not None:
                self._close(answer, event.finish_reason)
        return False

    def next(self) -> Request | None:
        """The prompt of an answer to be audited, to run now; None if there is none."""
        if self._shadow is not None or not self._waiting:
            return None
        request, said = self._waiting.popleft()
        self._shadow = (request, said, [])
        return request

    def interrupt(self) -> RequestId | None:
        """Somebody needs the engine: what is to be aborted, to run again later; None if no audit runs."""
        if self._shadow is None:
            return None
        request, said, _ = self._shadow
        self._shadow = None
        self._waiting.appendleft((request, said))
        return request.request_id

    def give_up(self) -> RequestId | None:
        """A step failed, maybe for it: what is to be aborted, never to run again; None if no audit runs."""
        if self._shadow is None:
            return None
        request, self._shadow = self._shadow[0], None
        return request.request_id

    def _close(self, answer: _Answer, reason: FinishReason) -> None:
        del self._open[answer.request.request_id]
        if not answer.has_placed or not answer.token_ids or self._randomness.random() >= self._share:
            return
        request, said = answer.request, answer.token_ids
        # an answer that the model ended must end there again
        ends = reason is FinishReason.STOP and len(said) < NUM_TOKENS
        num_tokens = len(said) + ends
        sampling = replace(
            request.sampling,
            max_tokens=num_tokens,
            min_tokens=min(request.sampling.min_tokens, num_tokens),
            logprobs=None,
        )
        name = RequestId(f"audit-{request.request_id}")
        self._waiting.append((replace(request, request_id=name, sampling=sampling, may_place=False), said))

    def _hear_shadow(self, event: TokenEvent) -> None:
        assert self._shadow is not None
        _, said, says = self._shadow
        if event.token_id is not None:
            says.append(event.token_id)
        if event.finish_reason is not None:
            self._shadow = None
            if event.finish_reason is not FinishReason.ABORTED:
                self._count(agrees=says == said)

    def _count(self, *, agrees: bool) -> None:
        self._num_audited += 1
        self._num_here += 1
        self._num_disagreed += not agrees
        self._num_disagreed_here += not agrees
        if self._options is not None and lower_bound(self._num_disagreed_here, self._num_here) > self._limit:
            self._step_up(self._options)

    def _step_up(self, options: AnywhereOptions) -> None:
        new = options.next_safer()
        logger.warning(
            "%d of %d audited answers differ from a full prefill, surely more than reuse.max_disagreement=%g: %s",
            self._num_disagreed_here,
            self._num_here,
            self._limit,
            "KV is reused for exact prefixes only from now on" if new is None else f"{new} from now on",
        )
        self._options = new
        self._num_here = self._num_disagreed_here = 0
        self._waiting.clear()  # how far the old options were off is known; of the new ones these say nothing
        self._open.clear()
        self._allow(new)


def upper_bound(num_disagreed: int, num_audited: int) -> float:
    """One-sided Clopper-Pearson bound on a share; 1 before anything was seen."""
    from scipy.stats import beta  # takes a while to import

    if num_disagreed == num_audited:
        return 1.0
    return float(beta.ppf(CONFIDENCE, num_disagreed + 1, num_audited - num_disagreed))


def lower_bound(num_disagreed: int, num_audited: int) -> float:
    """The same from below; 0 before anything was seen."""
    from scipy.stats import beta

    if num_disagreed == 0:
        return 0.0
    return float(beta.ppf(1.0 - CONFIDENCE, num_disagreed, num_audited - num_disagreed + 1))
