"""One engine as its front sees it: whether it may get requests, why not, and what was sent to it."""

from dataclasses import dataclass, field

from stillroom.cluster.wire_state import EngineInfo, EngineState

NOT_ASKED = "it was not heard of yet"
"""The first problem of each engine."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A stream of a request from an engine."""

    engine: str
    epoch: int
    """Of the engine: another one once it was lost."""
    number: int
    at: float
    fingerprint: bytes
    """Of the engine's model."""
    predicted_seconds: float | None
    """To the first token, waiting included; None without a cost profile."""
    num_expected_tokens: int
    """Prompt tokens whose KV the engine is believed to reuse."""


@dataclass(slots=True)
class EngineCounts:
    """Requests of this front to an engine, since the front started."""

    num_sent: int = 0
    """Streams that were asked for."""
    num_broken: int = 0
    """Streams that ended before their answers."""
    num_refused: int = 0
    """Requests that the engine did not take: it was full, or could not be reached."""
    num_losses: int = 0
    """Times that the engine was lost, or missed a report."""
    num_runs: int = 0
    """Starts of the engine that were used, the first one included."""
    num_prompt_tokens: int = 0
    """Of prompts whose reuse the engine has reported."""
    num_reused_tokens: int = 0
    """Of these, those whose KV was not computed."""
    num_predicted: int = 0
    """First tokens with a prediction."""
    predicted_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """Sum over the same first tokens."""


@dataclass(slots=True)
class FrontEngine:
    """What a front knows of an engine but for what it holds."""

    epoch: int = 0
    info: EngineInfo | None = None
    """None while it is lost or refused."""
    is_used: bool = False
    """Whether it took requests since it was there last; one that drains is used until it is lost or replaced."""
    run: str = ""
    """Of its last information."""
    sequence: int = 0
    state: EngineState | None = None
    is_paused: bool = False
    """It refused a request since its last report."""
    problem: str = NOT_ASKED
    """Why it gets no request; empty if it may get one."""
    is_silent: bool = False
    """Whether it missed its last report; counted as a loss."""
    is_misfit: bool = False
    """Whether it was asked, and does not fit this front."""
    open: set[int] = field(default_factory=set)
    """Numbers of the requests under way, of this epoch."""
    counts: EngineCounts = field(default_factory=EngineCounts)

    @property
    def is_draining(self) -> bool:
        return self.state is not None and self.state.is_draining
