"""What an engine tells of a request, whichever engine it is: pieces of its answer and how it ended."""

from collections.abc import Callable
from dataclasses import dataclass

from stillroom.core.batch import TokenLogprobs
from stillroom.core.ids import RequestId
from stillroom.core.request import Admission, FinishReason
from stillroom.core.reuse import PromptReuse


@dataclass(frozen=True, slots=True)
class RemoteUsage:
    """Tokens as an engine elsewhere counted them."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that it did not compute; 0 also where it does not say."""
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Something happened to a request: a token or a piece of text, its end, or both."""

    request_id: RequestId
    token_id: int | None
    """The new token; None if the request ended without one, and from an engine that sends text."""
    finish_reason: FinishReason | None
    """Set on the last event of a request."""
    at: float
    """Seconds on the engine's monotonic clock."""
    error: Exception | None = None
    """Why the request was aborted by the engine, if it was."""
    text: str = ""
    """The new text, from an engine that sends text."""
    usage: RemoteUsage | None = None
    """On the last event, from an engine that counts for itself."""
    logprobs: TokenLogprobs | None = None
    """Of the new token, if the request wants them."""
    reuse: PromptReuse | None = None
    """How much of the prompt's KV was kept; from our own engine."""
    admission: Admission | None = None
    """When its turn came; from our own engine, with the first token."""


Listener = Callable[[TokenEvent], None]
"""Called from the engine's thread with each event of one request; must return quickly."""
