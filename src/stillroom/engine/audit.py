"""Compares sampled answers from placed KV with a full prefill, while the engine is idle.

An audit runs the prompt of an answer again without placing KV, with the same sampling, and compares the first tokens.
After each audit the share of answers that differ is tested with bounds that hold at all times (`confidence_sequence`):

- Surely above `max_disagreement`: the recompute ratio doubles. Above the largest ratio no KV is placed until the engine
  starts again, because nothing is left to audit.
- Surely below half of `max_disagreement`, after at least `_FIRST_PATIENCE` audits, twice as many after each further
  rise: the ratio goes back one step, never below the configured one.

Every change starts new evidence. The k-th evidence errs with probability at most 0.05 / 2^k, so all of them together
with at most 0.05. The doubled patience bounds how often a failed ratio returns: about log2(n / 50) times in n audits.
"""

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.engine.confidence_sequence import is_surely_above, is_surely_below, upper_bound
from stillroom.engine.events import TokenEvent
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions

logger = logging.getLogger(__name__)

NUM_TOKENS = 8
"""Number of first tokens of an answer that are compared."""
ALPHA = 0.05
"""Bound on the probability that any of an engine's changes of ratio is a mistake."""
_FIRST_PATIENCE = 50
_MAX_WAITING = 8


@dataclass(frozen=True, slots=True)
class AuditStats:
    num_audited: int
    num_disagreed: int
    upper_bound: float
    """Bound on the share of answers that differ at the present ratio; holds at all times with 95 % confidence."""
    options: AnywhereOptions | None
    """Present options; None if no KV is placed any more."""


@dataclass(slots=True)
class _Answer:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    has_placed: bool = False


class Audit:
    """Audits of one engine. Runs in the engine's thread."""

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
            allow: called with the new options when they change.
            share: share of the answers with placed KV that is audited.
            max_disagreement: share of the audited answers that may differ.
        """
        self._options: AnywhereOptions | None = options
        self._allow = allow
        self._share, self._limit = share, max_disagreement
        self._randomness = randomness
        self._open: dict[RequestId, _Answer] = {}
        self._waiting: deque[tuple[Request, list[int]]] = deque(maxlen=_MAX_WAITING)
        self._shadow: tuple[Request, list[int], list[int]] | None = None  # running audit, expected and actual tokens
        self._lower: list[AnywhereOptions] = []  # earlier options, from the configured ones on
        self._patience = _FIRST_PATIENCE
        self._alpha = ALPHA / 2  # for the present evidence
        self._num_here = self._num_disagreed_here = 0
        self._num_audited = self._num_disagreed = 0

    @property
    def stats(self) -> AuditStats:
        bound = upper_bound(self._num_disagreed_here, self._num_here, self._alpha)
        return AuditStats(self._num_audited, self._num_disagreed, bound, self._options)

    def on_submit(self, request: Request) -> None:
        if self._options is not None:
            self._open[request.request_id] = _Answer(request)

    def observe(self, event: TokenEvent) -> bool:
        """Record an event; True if it belongs to an audit and so has no listener."""
        if self._shadow is not None and event.request_id == self._shadow[0].request_id:
            self._observe_shadow(event)
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
        """Return the next audit to run; None if there is none, or one runs already."""
        if self._shadow is not None or not self._waiting:
            return None
        request, expected = self._waiting.popleft()
        self._shadow = (request, expected, [])
        return request

    def interrupt(self) -> RequestId | None:
        """Put the running audit back into the queue; returns the request to abort, None if no audit runs."""
        if self._shadow is None:
            return None
        request, expected, _ = self._shadow
        self._shadow = None
        self._waiting.appendleft((request, expected))
        return request.request_id

    def abandon(self) -> RequestId | None:
        """Drop the running audit; returns the request to abort, None if no audit runs."""
        if self._shadow is None:
            return None
        request, self._shadow = self._shadow[0], None
        return request.request_id

    def forget_chunks(self, existing: Callable[[set[ChunkId]], set[ChunkId]], salt: str) -> RequestId | None:
        """Drop audits of a tenant's prompts with removed chunks.

        Args:
            existing: returns which of some chunks still exist.

        Returns:
            The request to abort; None if no audit of such a prompt runs.
        """

        def is_current(request: Request) -> bool:
            chunk_ids = set(request.prompt.chunk_ids)
            return request.cache_salt != salt or existing(chunk_ids) == chunk_ids

        self._waiting = deque((one for one in self._waiting if is_current(one[0])), _MAX_WAITING)
        return None if self._shadow is None or is_current(self._shadow[0]) else self.abandon()

    def _close(self, answer: _Answer, reason: FinishReason) -> None:
        del self._open[answer.request.request_id]
        if not answer.has_placed or not answer.token_ids or self._randomness.random() >= self._share:
            return
        request, expected = answer.request, answer.token_ids
        # one token more, so that an answer that the model ended must end there again
        ends = reason is FinishReason.STOP and len(expected) < NUM_TOKENS
        num_tokens = len(expected) + ends
        sampling = replace(
            request.sampling,
            max_tokens=num_tokens,
            min_tokens=min(request.sampling.min_tokens, num_tokens),
            logprobs=None,
        )
        name = RequestId(f"audit-{request.request_id}")
        self._waiting.append((replace(request, request_id=name, sampling=sampling, may_place=False), expected))

    def _observe_shadow(self, event: TokenEvent) -> None:
        assert self._shadow is not None
        _, expected, actual = self._shadow
        if event.token_id is not None:
            actual.append(event.token_id)
        if event.finish_reason is not None:
            self._shadow = None
            if event.finish_reason is not FinishReason.ABORTED:
                self._count(agrees=actual == expected)

    def _count(self, *, agrees: bool) -> None:
        self._num_audited += 1
        self._num_here += 1
        self._num_disagreed += not agrees
        self._num_disagreed_here += not agrees
        evidence = (self._num_disagreed_here, self._num_here, self._alpha)
        if self._options is None:
            return
        if is_surely_above(self._limit, *evidence):
            self._raise_ratio(self._options)
        elif self._lower and self._num_here >= self._patience and is_surely_below(self._limit / 2, *evidence):
            self._lower_ratio()

    def _raise_ratio(self, options: AnywhereOptions) -> None:
        new = options.next_safer()
        logger.warning(
            "%d of %d audited answers differ from a full prefill, surely more than reuse.max_disagreement=%g: %s",
            self._num_disagreed_here,
            self._num_here,
            self._limit,
            "KV is reused for exact prefixes only until the next start" if new is None else f"{new} from now on",
        )
        self._lower.append(options)
        self._patience *= 2
        self._change(new)

    def _lower_ratio(self) -> None:
        new = self._lower.pop()
        logger.info(
            "%d of %d audited answers differ from a full prefill, surely less than half of "
            "reuse.max_disagreement=%g: back to %s",
            self._num_disagreed_here,
            self._num_here,
            self._limit,
            new,
        )
        self._change(new)

    def _change(self, new: AnywhereOptions | None) -> None:
        self._options = new
        self._alpha /= 2
        self._num_here = self._num_disagreed_here = 0
        self._waiting.clear()  # answers of the old ratio are no evidence for the new one
        self._open.clear()
        self._allow(new)
