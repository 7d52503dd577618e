"""How much KV of other contexts answers may use: lowered and raised again by the evidence of audits.

After each audit the share of answers that agree with no reference is tested with bounds that hold at all times
(`confidence_sequence`):

- Surely above `max_disagreement`: the recompute ratio doubles. Above the largest ratio, and for prepared KV at once,
  placing is suspended: answers use exact prefixes only.
- Surely below half of `max_disagreement`, after at least `_FIRST_PATIENCE` audits, twice as many after each further
  rise: the ratio goes back one step, never below the configured one, or placing resumes.

Every change starts new evidence. So does evidence that placing must stay suspended, so that earlier audits do not
count against KV that is right again. The k-th evidence errs with probability at most 0.05 / 2^k, so all of them
together with at most 0.05. The doubled patience bounds how often a failed ratio returns: about log2(n / 50) times in n
audits.
"""

import logging
from collections.abc import Callable

from stillroom.engine.confidence_sequence import is_surely_above, is_surely_below, upper_bound
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions

logger = logging.getLogger(__name__)

ALPHA = 0.05
"""Bound on the probability that any of an engine's changes is a mistake."""
_FIRST_PATIENCE = 50


class ReuseLevel:
    """The present options of placing, whether it is suspended, and the evidence for that."""

    def __init__(
        self, options: AnywhereOptions, allow: Callable[[AnywhereOptions], None], max_disagreement: float
    ) -> None:
        """
        Args:
            allow: called with the new options when they change.
            max_disagreement: share of the audited answers that may agree with no reference.
        """
        self.options = options
        """Also while placing is suspended: audits place by them then."""
        self.is_suspended = False
        self._allow = allow
        self._limit = max_disagreement
        self._lower: list[AnywhereOptions] = []  # earlier options, from the configured ones on
        self._patience = _FIRST_PATIENCE
        self._alpha = ALPHA / 2  # for the present evidence
        self._num_seen = self._num_disagreed = 0  # of the present evidence

    @property
    def upper_bound(self) -> float:
        """Bound on the share of answers that agree with no reference now."""
        return upper_bound(self._num_disagreed, self._num_seen, self._alpha)

    def count(self, *, agrees: bool) -> bool:
        """Count an audited answer; returns whether that changed the options or suspended or resumed placing."""
        self._num_seen += 1
        self._num_disagreed += not agrees
        evidence = (self._num_disagreed, self._num_seen, self._alpha)
        if is_surely_above(self._limit, *evidence):
            if not self.is_suspended:
                self._fall_back()
                return True
            if self._num_seen >= self._patience:
                self._start_evidence()
        elif (
            (self.is_suspended or self._lower)
            and self._num_seen >= self._patience
            and is_surely_below(self._limit / 2, *evidence)
        ):
            self._return()
            return True
        return False

    def _fall_back(self) -> None:
        new = self.options.next_safer()
        logger.warning(
            "%s, surely more than reuse.max_disagreement=%g: %s",
            self._found,
            self._limit,
            "KV is reused for exact prefixes only, until audits agree again. If that does not happen, set "
            'reuse.mode = "exact", or raise reuse.max_disagreement if answers may differ more often'
            if new is None
            else f"{new} from now on",
        )
        self._patience *= 2
        if new is None:
            self.is_suspended = True
        else:
            self._lower.append(self.options)
            self._use(new)
        self._start_evidence()

    def _return(self) -> None:
        new = self.options if self.is_suspended else self._lower.pop()
        logger.log(
            logging.WARNING if self.is_suspended else logging.INFO,
            "%s, surely less than half of reuse.max_disagreement=%g: %s",
            self._found,
            self._limit,
            "KV of other contexts is used again; nothing is to be done" if self.is_suspended else f"back to {new}",
        )
        if self.is_suspended:
            self.is_suspended = False
        else:
            self._use(new)
        self._start_evidence()

    @property
    def _found(self) -> str:
        found = f"{self._num_disagreed} of {self._num_seen} audited answers"
        if self.options.only_prepared:
            return f"{found} equal neither a full prefill of their prompt nor one of their documents"
        return f"{found} differ from a full prefill of their prompt"

    def _use(self, options: AnywhereOptions) -> None:
        self.options = options
        self._allow(options)

    def _start_evidence(self) -> None:
        self._alpha /= 2
        self._num_seen = self._num_disagreed = 0
