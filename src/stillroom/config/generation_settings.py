"""Settings of answers: the engine, defaults of sampling, and the request log.

Users import them from `config.settings`.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Literal

from stillroom.config.addresses import check_address, check_key, split_addresses, with_path
from stillroom.config.engine_address import parse_engine_addresses
from stillroom.config.quantities import AboveZero, Addresses, AtLeastZero, Int63, Range, Share, check_ranges
from stillroom.errors import ConfigError

ONE_TENANT_ONLY = (
    "engine.kind = 'openai' serves one tenant only: response times would tell a tenant which prompts of others the "
    "server has cached; set engine.cache_salt = true if the servers honour it (vLLM and SGLang do), use the builtin "
    "engine, or one server for each tenant"
)

EngineKind = Literal["builtin", "openai", "cluster"]
EnginePrompt = Literal["chat", "text", "tokens"]
DocumentOrder = Literal["prefix", "rank"]
ChunkOrder = Literal["rank", "document"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine that generates answers: in this process, Stillroom's own in other processes (docs/cluster.md), or an
    OpenAI-compatible server (docs/engines.md)."""

    kind: EngineKind = "builtin"
    """`builtin`: the runtime of this process. `openai`: the servers at `base_url`; no model is loaded in this
    process. `cluster`: the engines at `urls`; this process loads the tokenizer of `runtime.model`, not its weights."""
    base_url: Addresses = ""
    """The server's address, such as `http://127.0.0.1:8000/v1`; `/v1` is added if there is no path. Several servers of
    one model: a list, or text with commas (docs/engines.md)."""
    model: str = ""
    """Model to request from the servers. Empty: the first that the first reachable one lists."""
    api_key: str = field(default="", repr=False)
    """Bearer token for all servers. Read from the environment only, never from files or flags."""
    prompt: EnginePrompt = "chat"
    """`chat`: sends messages, and the server applies its model's template. `text`, `tokens`: `/v1/completions` with a
    prompt rendered by the tokenizer of `runtime.model`; with `tokens`, text of documents is never read as special
    tokens."""
    document_order: DocumentOrder = "prefix"
    """`prefix`: documents that began an earlier prompt come first, so that the server's prefix cache is hit. `rank`:
    best first."""
    extra_sampling: bool = True
    """Send the sampling parameters that OpenAI lacks (`top_k`, `min_p`, `repetition_penalty`), at neutral values unless
    set: servers have defaults of their own. Use `false` for servers that refuse unknown fields, such as OpenAI's."""
    cache_salt: bool = False
    """Send `cache_salt`, a secret of the tenant's knowledge base: the server shares cached KV among requests of the
    same salt only. Needed for several tenants. Use it only for servers that honour it, such as vLLM and SGLang; others
    ignore or refuse it (docs/engines.md)."""
    connect_timeout_s: AboveZero = 5.0
    """Seconds to wait for a connection."""
    read_timeout_s: AboveZero = 300.0
    """Longest silence of the server, in seconds. A long prompt on a slow machine is silent until its first token."""
    max_retries: AtLeastZero = 4
    """Retries of a request that failed before its first text: no connection, HTTP 429 or 5xx, or no answer in the
    reply."""
    max_retry_wait_s: float = 30.0
    """Longest wait before a retry, in seconds; the request fails if the server asks for more."""

    urls: Addresses = ""
    """Where the engines of a cluster are, a list or text with commas: `http://host:9100` of one engine,
    `dns://name:9100` for all addresses of a name, `file:///folder/engines` and `list+http://host/` for a list with an
    address a line."""
    max_migrations: AtLeastZero = 3
    """Engines of a cluster that may take a request and not complete it before the request fails; the first is not
    counted."""
    wait_s: AboveZero = 30.0
    """Longest wait for an engine of a cluster that takes requests, in seconds: at the start, and of a request. Set it
    above the time in which an engine loads; with `serve --replicas` a request waits up to 300 s for engines that
    start."""
    silence_s: AboveZero = 12.0
    """Silence after which an answer of a cluster's engine is continued by another one, in seconds. Engines send a sign
    of life every 5 s."""

    def __post_init__(self) -> None:
        check_ranges("engine", self)
        if self.kind == "builtin":
            return
        if self.kind == "cluster":
            parse_engine_addresses("engine.urls", self.urls)
            return
        if not self.base_url:
            raise ConfigError("engine.kind = 'openai' needs an address: --base-url http://127.0.0.1:8000/v1")
        for url in split_addresses(self.base_url):
            check_address("engine.base_url", url, "http://127.0.0.1:8000/v1", "STILLROOM_ENGINE__API_KEY")
        if repeated := [url for url, times in Counter(self.base_urls).items() if times > 1]:
            raise ConfigError(f"engine.base_url names {repeated[0]} twice; name each server once")
        check_key("STILLROOM_ENGINE__API_KEY", self.api_key)

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The addresses without trailing slashes, with the path /v1 if they have none."""
        return tuple(with_path(url) for url in split_addresses(self.base_url))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Defaults of an answer; each can be set per question."""

    max_tokens: int = 256
    """Most tokens in an answer."""
    max_prompt_tokens: AtLeastZero = 0
    """Most tokens in a prompt. Documents that do not fit are left out; a question that does not fit without documents
    is refused. 0: the limit of the model."""
    chunk_order: ChunkOrder = "rank"
    """Order of the chunks in a prompt of a model in this process. `rank`: best first. `document`: the document of the
    best chunk first, and chunks of one document in its order, so that "she" stands behind the sentence that names
    her (docs/prepared.md)."""
    temperature: float = 0.0
    """0: greedy, always the most likely token."""
    top_p: Annotated[float, Range(0, 1, is_low_open=True)] = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    sample_top_k: AtLeastZero = 0
    """Sample from this many of the most likely tokens. 0: all."""
    min_p: Share = 0.0
    """Sample from tokens at least this likely relative to the most likely one."""
    repetition_penalty: AboveZero = 1.0
    """Above 1: tokens of the prompt and the answer become less likely, quotes included."""
    presence_penalty: float = 0.0
    """Above 0: tokens of the answer become less likely."""
    frequency_penalty: float = 0.0
    """Above 0: tokens become less likely with each occurrence in the answer."""
    seed: Int63 = 0
    """The same seed, question and documents give the same answer in any batch. In half precision, a near tie between
    two tokens may be decided differently in another batch."""
    citations: bool = True
    """Find the source of each sentence of an answer and check whether it supports the sentence, after the last token
    (docs/citations.md). Takes milliseconds, some tens of them where words alone do not decide."""
    ask_for_citations: bool = False
    """Ask the model, behind the question, to name its sources as `[n]`; a model of this process cannot write a number
    without a source. Answers in JSON are not asked. The bundled reader always names its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """The request log, which `stillroom explain` reads."""

    keep: Int63 = 1000
    """Questions kept in the knowledge base's folder, with their text; older ones are deleted. 0: none, and the existing
    ones are deleted when the next process starts to answer."""
