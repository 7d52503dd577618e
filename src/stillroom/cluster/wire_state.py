"""Messages of an engine about itself: what it is (`EngineInfo`), and what it holds and does (`EngineState`)."""

from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from stillroom.cluster.prediction import EngineCosts
from stillroom.cluster.wire import WIRE_VERSION, check_version
from stillroom.cluster.wire_reading import (
    Fields,
    Reader,
    T,
    count,
    flag,
    hexadecimal,
    items,
    number,
    seconds,
    shown,
    text,
    tokens,
)
from stillroom.cluster.wire_reuse import tier_of
from stillroom.core.kv import Link, Tier
from stillroom.errors import WireError
from stillroom.kvcache.tree.cost_model import CostProfile

NAME_BYTES = 32
"""Length of the names of pieces: SHA-256."""
_GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The reply to `GET info`: constant while the engine runs."""

    run: str
    """Random; another value is another start of the engine, which holds other KV."""
    version: str
    """Of Stillroom; for people."""
    model: str
    """Name, as the engine was given it."""
    fingerprint: bytes
    """Hash of everything but tokens that KV depends on (`PrefixKeys.fingerprint`); engines with equal ones answer
    alike."""
    vocabulary: bytes
    """Digest of the tokenizer's vocabulary (`Tokenizer.vocabulary_digest`)."""
    knowledge_base: str
    """Identity of the default tenant's knowledge base."""
    vocab_size: int
    """Tokens that the model knows."""
    max_positions: int
    """Prompt plus answer, in tokens."""
    num_blocks: int
    block_size: int
    stop_token_ids: frozenset[int]
    max_num_seqs: int
    """Sequences that run at the same time; most samples of a request."""
    tail_tokens: int
    """Length of a piece of a prompt's last segment (`PrefixKeys.tail_tokens`); 0: no KV is kept."""
    places_computed: bool
    """Whether the KV of any prompt may be placed in others (`FrontBeliefs`)."""
    costs: EngineCosts | None
    """None: no KV is kept, so no costs were measured."""

    def max_output_tokens(self, segment_lengths: Collection[int]) -> int:
        """Return how many tokens fit behind segments of these lengths, by the engine's blocks; may be negative."""
        *before, last = segment_lengths
        num_before = sum(-(-length // self.block_size) for length in before)
        return (self.num_blocks - num_before) * self.block_size - last

    def to_json(self) -> dict[str, Any]:
        return {
            "wire": WIRE_VERSION,
            "run": self.run,
            "version": self.version,
            "model": self.model,
            "fingerprint": self.fingerprint.hex(),
            "vocabulary": self.vocabulary.hex(),
            "knowledge_base": self.knowledge_base,
            "vocab_size": self.vocab_size,
            "max_positions": self.max_positions,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "stop_token_ids": sorted(self.stop_token_ids),
            "max_num_seqs": self.max_num_seqs,
            "tail_tokens": self.tail_tokens,
            "places_computed": self.places_computed,
            "costs": None if self.costs is None else _costs_to_json(self.costs),
        }

    @classmethod
    def from_json(cls, value: Any) -> "EngineInfo":
        """Read an engine's information. Raises WireError."""
        found = Fields(value, "the engine's info")
        check_version(found)
        info = cls(
            run=found.read("run", text),
            version=found.read("version", text),
            model=found.read("model", text),
            fingerprint=found.read("fingerprint", hexadecimal),
            vocabulary=found.read("vocabulary", hexadecimal),
            knowledge_base=found.read("knowledge_base", text),
            vocab_size=found.read("vocab_size", count),
            max_positions=found.read("max_positions", count),
            num_blocks=found.read("num_blocks", count),
            block_size=found.read("block_size", _positive),
            stop_token_ids=frozenset(found.read("stop_token_ids", tokens)),
            max_num_seqs=found.read("max_num_seqs", count),
            tail_tokens=found.read("tail_tokens", count),
            places_computed=found.read("places_computed", flag),
            costs=found.read_or("costs", _read_costs, None),
        )
        found.close()
        return info


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The reply to `GET state`."""

    run: str
    sequence: int
    """Number of the last change; the next `since`."""
    is_all: bool = False
    """Whether `changes` are all names that are held: forget those of earlier replies."""
    changes: Mapping[bytes, Tier | None] = field(default_factory=dict)
    """By key and by content of pieces, the fastest tier; None: not held any more."""
    queue_seconds: float = 0.0
    """Predicted seconds until a new prompt would begin."""
    num_outstanding: int = 0
    """Requests that are not completed."""
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    kept_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Of kept KV, by tier; a tier without KV may be absent."""
    is_draining: bool = False
    """Whether the engine takes no new requests."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON in which the names of each tier are one base64 text: a tree may have 100,000 of them."""
        by_tier: dict[str, list[bytes]] = {}
        for name, tier in self.changes.items():
            by_tier.setdefault(_GONE if tier is None else tier.label, []).append(name)
        return {
            "wire": WIRE_VERSION,
            "run": self.run,
            "sequence": self.sequence,
            "all": self.is_all,
            "changes": {label: b64encode(b"".join(names)).decode() for label, names in by_tier.items()},
            "queue_seconds": self.queue_seconds,
            "outstanding": self.num_outstanding,
            "waiting": self.num_waiting,
            "running": self.num_running,
            "blocks": self.num_blocks,
            "free_blocks": self.num_free_blocks,
            "kept_bytes": {tier.label: num_bytes for tier, num_bytes in self.kept_bytes.items()},
            "draining": self.is_draining,
        }

    @classmethod
    def from_json(cls, value: Any) -> "EngineState":
        """Read an engine's state. Raises WireError."""
        found = Fields(value, "the engine's state")
        check_version(found)
        state = cls(
            run=found.read("run", text),
            sequence=found.read("sequence", count),
            is_all=found.read("all", flag),
            changes=found.read("changes", _read_changes),
            queue_seconds=found.read("queue_seconds", seconds),
            num_outstanding=found.read("outstanding", count),
            num_waiting=found.read("waiting", count),
            num_running=found.read("running", count),
            num_blocks=found.read("blocks", count),
            num_free_blocks=found.read("free_blocks", count),
            kept_bytes=found.read("kept_bytes", _by_tier(count)),
            is_draining=found.read("draining", flag),
        )
        found.close()
        return state


def _read_changes(value: Any, where: str) -> dict[bytes, Tier | None]:
    found: dict[bytes, Tier | None] = {}
    if type(value) is not dict:
        raise WireError(f"{where} is {shown(value)}; it must be an object")
    for label, names in value.items():
        tier = None if label == _GONE else tier_of(label, where)
        for name in _read_names(names, f"{where}.{label}"):
            if name in found:
                raise WireError(f"{where} has the name {name.hex()} twice")
            found[name] = tier
    return found


def _read_names(value: Any, where: str) -> list[bytes]:
    try:
        joined = b64decode(value, validate=True) if type(value) is str else b"-"
    except ValueError:
        joined = b"-"
    if len(joined) % NAME_BYTES:
        raise WireError(f"{where} is {shown(value)}; it must be names of {NAME_BYTES} bytes in base64")
    return [joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)]


def _costs_to_json(costs: EngineCosts) -> dict[str, Any]:
    profile = costs.profile
    return {
        "cached": list(profile.cached),
        "new": list(profile.new),
        "seconds": [list(line) for line in profile.seconds],
        "links": {tier.label: [link.latency_seconds, link.bytes_per_second] for tier, link in profile.links.items()},
        "bytes_per_token": costs.bytes_per_token,
        "recompute_share": costs.recompute_share,
        "has_query_pass": costs.has_query_pass,
    }


def _read_costs(value: Any, where: str) -> EngineCosts:
    found = Fields(value, where)
    grids = found.read("cached", items(count)), found.read("new", items(count))
    values, links = found.read("seconds", items(items(number))), found.read("links", _by_tier(_read_link))
    try:
        profile = CostProfile(*grids, values, links)
    except AssertionError:
        raise WireError(
            f"{where} is not a cost profile: its grids do not increase, or its seconds do not fit"
        ) from None
    costs = EngineCosts(
        profile=profile,
        bytes_per_token=found.read("bytes_per_token", count),
        recompute_share=found.read_or("recompute_share", _share, None),
        has_query_pass=found.read("has_query_pass", flag),
    )
    found.close()
    return costs


def _by_tier(read: Reader[T]) -> Reader[dict[Tier, T]]:
    """Return a reader of an object with a value for each tier."""

    def read_object(value: Any, where: str) -> dict[Tier, T]:
        if type(value) is not dict:
            raise WireError(f"{where} is {shown(value)}; it must be an object")
        return {tier_of(label, where): read(one, f"{where}.{label}") for label, one in value.items()}

    return read_object


def _read_link(value: Any, where: str) -> Link:
    pair = items(seconds, least=2, most=2)(value, where)
    if pair[1] <= 0:
        raise WireError(f"{where} has no bytes per second")
    return Link(*pair)


def _share(value: Any, where: str) -> float:
    if (found := seconds(value, where)) > 1:
        raise WireError(f"{where} is {found}; it must be in [0, 1]")
    return found


def _positive(value: Any, where: str) -> int:
    if (found := count(value, where)) < 1:
        raise WireError(f"{where} is 0; it must be at least 1")
    return found
