"""Events of a request, from the local engine, the reader or a remote engine: pieces of its answer, and its end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from stillroom.core.batch import TokenLogprobs
from stillroom.core.ids import RequestId
from stillroom.core.request import Admission, FinishReason, LookupCounts
from stillroom.core.reuse import PromptReuse


@dataclass(frozen=True, slots=True)
class RemoteUsage:
    """Token counts as reported by a remote engine."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that it did not compute; 0 also if it does not report them."""
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class Quote:
    """Words of a document, and which of them answer the question."""

    text: str
    highlight: tuple[int, int]
    """Characters of `text`."""


@dataclass(frozen=True, slots=True)
class Route:
    """The engine of a cluster, or the server of a remote engine, that generates an answer, and why it was chosen
    (docs/cluster.md, docs/engines.md)."""

    engine: str
    """Its name (`cluster.front_engines.engine_name`)."""
    predicted_seconds: float | None
    """Predicted when it was chosen: seconds to the first token, waiting included; None without a cost profile."""
    num_expected_tokens: int
    """Prompt tokens whose KV the engine was believed to reuse; of a remote engine estimated from characters."""
    num_migrations: int = 0
    """Engines before it that took the request and did not complete it; of a remote engine all earlier attempts."""
    is_resumed: bool = False
    """Whether an engine before it had generated a part of the answer."""


class TokenEvent(NamedTuple):
    """A token or a piece of text of a request, its end, or both."""

    request_id: RequestId
    token_id: int | None
    """The new token; None if the request ended without one, and from engines that send text."""
    finish_reason: FinishReason | None
    """Set on the last event of a request."""
    at: float
    """Seconds on the engine's monotonic clock."""
    error: Exception | None = None
    """Why the engine aborted the request."""
    text: str = ""
    """The new text, from a remote engine or the reader."""
    usage: RemoteUsage | None = None
    """On the last event, from a remote engine."""
    logprobs: TokenLogprobs | None = None
    """Those of the new token, if requested."""
    reuse: PromptReuse | None = None
    """From the local engine, with the first token."""
    admission: Admission | None = None
    """From the local engine and the reader, with the first token or piece."""
    lookup: LookupCounts | None = None
    """Prompt lookup of the request so far, from the local engine; None before the first proposal."""
    highlight: tuple[int, int] | None = None
    """Characters of the whole answer that answer the question; from the reader, the same on every event."""
    confidence: float | None = None
    """How sure the reader is that the documents answer the question, in [0, 1]; the same on every event."""
    best: Quote | None = None
    """The reader's best quote, also if its score is too low to be the answer; the same on every event."""
    route: Route | None = None
    """From an engine of a cluster, or a remote engine."""


Listener = Callable[[TokenEvent], None]
"""Called from the engine's thread with each event of one request; must return quickly."""
