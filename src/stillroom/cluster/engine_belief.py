"""What a front believes about an engine at the moment of a decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stillroom.core.kv import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBelief:
    """An engine that may get a request. Beliefs may be out of date: a wrong one costs time and changes no answer."""

    engine_id: str
    held: Mapping[bytes, Tier] = field(default_factory=dict)
    """Fastest tier of the kept KV, by key (exact prefix) and by content (any position)."""
    queue_seconds: float = 0.0
    """Predicted seconds until the engine would begin a new prompt."""
    num_outstanding: int = 0
    """Requests that the engine has and has not completed."""
    age_seconds: float = 0.0
    """Since the engine was last heard of."""
    is_alive: bool = True
    """False once a stream to the engine failed or its health check did."""
