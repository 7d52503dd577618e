"""The result of a step for one request: its sampled token, and whether the request ends with it."""

from typing import NamedTuple

from stillroom.core.batch import SampledToken, TokenLogprobs
from stillroom.core.ids import RequestId
from stillroom.core.request import Admission, FinishReason, LookupCounts
from stillroom.core.reuse import PromptReuse
from stillroom.errors import NonFiniteError, UsageError
from stillroom.scheduler.sequence import Sequence


class SequenceUpdate(NamedTuple):
    """Result of a step for one request."""

    request_id: RequestId
    token_id: int | None
    """The new token; None if it was a stop token."""
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    """Those of the new token, if requested."""
    reuse: PromptReuse | None = None
    """Set with the first token."""
    admission: Admission | None = None
    """Set with the first token."""
    lookup: LookupCounts | None = None
    """Prompt lookup of the request so far; None before the first proposal."""
    error: UsageError | NonFiniteError | None = None
    """Why the request was aborted."""


def append_sampled_token(sequence: Sequence, sampled: SampledToken) -> SequenceUpdate:
    """Append the token sampled for a sequence, unless it is a stop token; the caller ends a finished sequence."""
    token_id = sampled.token_id
    is_answer = token_id not in sequence.request.stop_token_ids
    if is_answer:
        sequence.append(token_id)
    if (error := sequence.error) is not None:
        return SequenceUpdate(sequence.request_id, None, FinishReason.ABORTED, error=error)
    reason: FinishReason | None = None
    if not is_answer or sequence.is_complete:
        reason = FinishReason.STOP
    elif sequence.num_generated == sequence.request.sampling.max_tokens:
        reason = FinishReason.LENGTH
    is_first = sequence.num_new <= 1
    return SequenceUpdate(
        sequence.request_id,
        token_id if is_answer else None,
        reason,
        sampled.logprobs if is_answer else None,
        sequence.lease.reuse if is_first else None,
        sequence.admission if is_first else None,
        sequence.lookup.counts,
    )
