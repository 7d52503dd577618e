"""Settings of answers: where they are generated, their defaults, and what is remembered of them.

Users import them from `config.settings`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stillroom.config.addresses import check_address, check_key
from stillroom.config.quantities import AboveZero, AtLeastZero, Int63, Range, Share
from stillroom.errors import ConfigError

EngineKind = Literal["builtin", "openai"]
EnginePrompt = Literal["chat", "text", "tokens"]
DocumentOrder = Literal["prefix", "rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where answers are generated: here, or by a server with OpenAI's routes. See docs/engines.md."""

    kind: EngineKind = "builtin"
    """`builtin`: the runtime of this process. `openai`: the server at `base_url`; no model is loaded here."""
    base_url: str = ""
    """The server's address, such as `http://127.0.0.1:8000/v1`; `/v1` is added where there is no path."""
    model: str = ""
    """The model to ask the server for. Empty: the first that it lists."""
    api_key: str = field(default="", repr=False)
    """Sent as a bearer token. Taken from the environment only, so that it is in no file and on no command line."""
    prompt: EnginePrompt = "chat"
    """`chat`: messages, which the server puts into its model's own template. `text`, `tokens`: `/v1/completions` with
    the prompt rendered for `runtime.model`, whose tokenizer is loaded for it; `tokens` keeps text from documents from
    being read as special tokens."""
    document_order: DocumentOrder = "prefix"
    """`prefix`: documents that an earlier prompt began with stand first, so that the server's prefix cache has them.
    `rank`: best first."""
    extra_sampling: bool = True
    """Whether to send sampling parameters that OpenAI does not have (`top_k`, `min_p`, `repetition_penalty`), at values
    that change nothing unless asked for: servers have defaults of their own. `false` for servers that refuse fields
    they do not know, such as OpenAI's."""
    connect_timeout_s: AboveZero = 5.0
    """Seconds to wait for a connection."""
    read_timeout_s: AboveZero = 300.0
    """Longest silence of the server, in seconds; a long prompt on a slow machine is silent until its first token."""
    max_retries: AtLeastZero = 4
    """How often a request is repeated that failed before its first token: no connection, HTTP 429 or 5xx."""
    max_retry_wait_s: float = 30.0
    """Longest wait before a repetition, in seconds; a server that asks for more is given up."""

    def __post_init__(self) -> None:
        if self.kind == "builtin":
            return
        if not self.base_url:
            raise ConfigError("engine.kind = 'openai' needs an address: --base-url http://127.0.0.1:8000/v1")
        check_address("engine.base_url", self.base_url, "http://127.0.0.1:8000/v1", "STILLROOM_ENGINE__API_KEY")
        check_key("STILLROOM_ENGINE__API_KEY", self.api_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Defaults for an answer; each can be set per question."""

    max_tokens: int = 256
    """Most tokens in an answer."""
    max_prompt_tokens: AtLeastZero = 0
    """Most tokens in a prompt, whoever asks: documents that do not fit are left out, and what does not fit without any
    is refused. 0: as many as the model takes."""
    temperature: float = 0.0
    """0: greedy, the most likely token each time."""
    top_p: Annotated[float, Range(0, 1, is_low_open=True)] = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    sample_top_k: AtLeastZero = 0
    """Sample from this many of the most likely tokens. 0: all."""
    min_p: Share = 0.0
    """Sample from tokens at least this likely relative to the most likely one."""
    repetition_penalty: AboveZero = 1.0
    """Above 1: tokens of the prompt and of the answer so far become less likely, so quotes do too."""
    presence_penalty: float = 0.0
    """Above 0: tokens that the answer has become less likely."""
    frequency_penalty: float = 0.0
    """Above 0: tokens become less likely each time the answer has them."""
    seed: Int63 = 0
    """Same seed, question and documents: same answer, whatever else runs in the batch. In half precision a near tie
    between two tokens may go the other way in another batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What is remembered of past questions, for `stillroom explain`."""

    keep: Int63 = 1000
    """Questions remembered in the knowledge base's folder, with their text; older ones are forgotten. 0: none,
    and those of before are removed when the next process begins to answer."""
