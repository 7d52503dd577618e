"""Options of the vLLM connector, and which configurations of vLLM it refuses. Imports neither vLLM nor torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from stillroom.config.load import load_config
from stillroom.config.quantities import Range, check_ranges
from stillroom.config.settings import ReuseConfig
from stillroom.errors import ConfigError

TESTED_VERSION = "0.32."
"""vLLM calls its interface for connectors experimental; other versions are refused."""
_EXTRA = "kv_connector_extra_config"
_TIER_SETTINGS = ("kv_tier", "kv_tier_bytes", "kv_tier_ttl_s", "kv_tier_timeout_s", "prefetch_bytes")
_FILE_FORMATS = ("auto", "safetensors", "hf", "mistral", "pt", "fastsafetensors", "npcache")
"""Values of `--load-format` that read all weights from the files of the model's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """What `kv_connector_extra_config` holds beside settings of the tier."""

    piece_tokens: Annotated[int, Range(1, 1_000_000)] = 128
    """Tokens of a record; rounded up to whole blocks. The end of a prompt that fills no piece is not kept."""
    save_at_use: Annotated[int, Range(1, 1000)] = 2
    """A piece is stored when this many requests have used it."""
    max_wait_s: Annotated[float, Range(0.0, 3600.0)] = 1.0
    """Seconds that a request waits for the tier; then the rest of its prompt is computed."""

    def __post_init__(self) -> None:
        check_ranges(_EXTRA, self)

    def piece_size(self, block_size: int) -> int:
        """Return the tokens of a piece: a multiple of the block size."""
        return -(-self.piece_tokens // block_size) * block_size


def read_options(extra: Mapping[str, Any], env: Mapping[str, str]) -> tuple[ConnectorOptions, ReuseConfig]:
    """Read `kv_connector_extra_config`, and the settings of the tier from it and from the environment.

    Raises:
        ConfigError: a name is unknown, a value is not possible, or no tier is named.
    """
    own = [field.name for field in fields(ConnectorOptions)]
    unknown = sorted(set(extra) - set(own) - set(_TIER_SETTINGS))
    if unknown:
        raise ConfigError(f"{_EXTRA}: unknown {', '.join(unknown)}; known are {', '.join((*own, *_TIER_SETTINGS))}")
    given = {name: extra[name] for name in own if name in extra}
    for name, value in given.items():
        is_seconds = name.endswith("_s")
        if isinstance(value, bool) or not isinstance(value, int | float if is_seconds else int):
            raise ConfigError(f"{_EXTRA}: {name} = {value!r} is not a {'number' if is_seconds else 'whole number'}")
    options = ConnectorOptions(**given)
    tier = {f"reuse.{name}": extra[name] for name in _TIER_SETTINGS if name in extra}
    config = load_config(env=env, overrides=tier).reuse
    if not config.kv_tier:
        raise ConfigError(
            f'{_EXTRA} names no tier; add "kv_tier": "file:///shared/folder" or "valkey://host:6379" to it, or set '
            "STILLROOM_REUSE__KV_TIER"
        )
    return options, config


def check_supported(version: str, vllm: Any, kv_cache: Any) -> None:
    """Refuse configurations in which records might be incomplete, or in which it is not certain what KV depends on.

    Args:
        version: of vLLM.
        vllm: its `VllmConfig`.
        kv_cache: its `KVCacheConfig`.

    Raises:
        ConfigError: names what is refused.
    """
    problems = _of_settings(version, vllm) + _of_cache(kv_cache)
    if problems:
        raise ConfigError(f"Stillroom's connector does not support this: {'; '.join(problems)}")


def _of_settings(version: str, vllm: Any) -> list[str]:
    found = [] if version.startswith(TESTED_VERSION) else [f"vLLM {version}; it was tested with {TESTED_VERSION}x"]
    parallel = vllm.parallel_config
    if parallel.world_size > 1 or parallel.decode_context_parallel_size > 1:
        found.append(f"a model on {parallel.world_size} workers; use one, or more replicas")
    if vllm.speculative_config is not None:
        found.append("speculative decoding; leave out --speculative-config")
    if vllm.load_config.load_format not in _FILE_FORMATS:
        found.append(f"--load-format {vllm.load_config.load_format}: its weights cannot be told from their files")
    return found


def _of_cache(kv_cache: Any) -> list[str]:
    groups = kv_cache.kv_cache_groups
    names = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or names != ["FullAttentionSpec"]:
        return [f"a KV cache of {len(groups)} groups of {', '.join(names)}; it must be one of FullAttentionSpec"]
    spec = groups[0].kv_cache_spec
    return [] if spec.kv_quant_mode.name == "NONE" else ["a quantised KV cache; leave out --kv-cache-dtype"]
