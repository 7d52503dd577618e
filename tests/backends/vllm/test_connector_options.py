"""Options of the vLLM connector, and the configurations of vLLM that it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest

from stillroom.backends.vllm.connector_options import check_supported, read_options
from stillroom.errors import ConfigError

TIER = {"kv_tier": "file:///tier"}


def test_options_and_settings_of_the_tier_are_read() -> None:
    extra = TIER | {"piece_tokens": 100, "max_wait_s": 2, "prefetch_bytes": "1GiB", "kv_tier_ttl_s": 60}
    options, reuse = read_options(extra, {"STILLROOM_REUSE__KV_TIER_KEY": "secret"})
    assert (options.piece_tokens, options.save_at_use, options.max_wait_s) == (100, 2, 2)
    assert options.piece_size(32) == 128 and options.piece_size(100) == 100 and options.piece_size(256) == 256
    assert (reuse.kv_tier, reuse.kv_tier_key, reuse.prefetch_bytes) == ("file:///tier", "secret", 2**30)
    assert reuse.kv_tier_ttl_s == 60.0
    assert read_options({}, {"STILLROOM_REUSE__KV_TIER": "file:///other"})[1].kv_tier == "file:///other"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "names no tier; add .kv_tier.: .file:///shared/folder."),
        (TIER | {"pieces": 1}, "unknown pieces; known are piece_tokens"),
        (TIER | {"kv_tier_key": "secret"}, "unknown kv_tier_key"),
        (TIER | {"piece_tokens": 0}, "piece_tokens=0; it must be at least 1"),
        (TIER | {"piece_tokens": "64"}, "piece_tokens = '64' is not a whole number"),
        (TIER | {"save_at_use": True}, "save_at_use = True is not a whole number"),
        (TIER | {"save_at_use": 1.5}, "save_at_use = 1.5 is not a whole number"),
        (TIER | {"max_wait_s": "1"}, "max_wait_s = '1' is not a number"),
        (TIER | {"kv_tier_ttl_s": -1}, "kv_tier_ttl_s"),
        ({"kv_tier": "ftp://x"}, "begins with no scheme"),
    ],
)
def test_invalid_options_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(extra, {})


class FullAttentionSpec:
    kv_quant_mode = SimpleNamespace(name="NONE")


class MLAAttentionSpec(FullAttentionSpec):
    pass


def config(**changes: Any) -> Any:
    usual = {"world_size": 1, "decode_context_parallel_size": 1, "load_format": "auto", "speculative_config": None}
    found = usual | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=found["world_size"], decode_context_parallel_size=found["decode_context_parallel_size"]
        ),
        load_config=SimpleNamespace(load_format=found["load_format"]),
        speculative_config=found["speculative_config"],
    )


def cache(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_supported_configuration_is_accepted() -> None:
    check_supported("0.32.0", config(), cache(FullAttentionSpec()))
    check_supported("0.32.1+cpu", config(load_format="safetensors"), cache(FullAttentionSpec()))


@pytest.mark.parametrize(
    ("version", "changes", "specs", "message"),
    [
        ("0.33.0", {}, [FullAttentionSpec()], r"vLLM 0.33.0; it was tested with 0.32.x"),
        ("0.3.2", {}, [FullAttentionSpec()], "vLLM 0.3.2"),
        ("0.32.0", {"world_size": 2}, [FullAttentionSpec()], "2 workers; use one"),
        ("0.32.0", {"decode_context_parallel_size": 2}, [FullAttentionSpec()], "workers"),
        ("0.32.0", {"speculative_config": "eagle"}, [FullAttentionSpec()], "speculative"),
        ("0.32.0", {"load_format": "dummy"}, [FullAttentionSpec()], "--load-format dummy"),
        ("0.32.0", {}, [FullAttentionSpec(), FullAttentionSpec()], "2 groups of FullAttentionSpec"),
        ("0.32.0", {}, [MLAAttentionSpec()], "1 groups of MLAAttentionSpec"),
    ],
)
def test_unsupported_configuration_is_refused(
    version: str, changes: dict[str, Any], specs: list[Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_supported(version, config(**changes), cache(*specs))


def test_quantised_kv_is_refused() -> None:
    spec = FullAttentionSpec()
    spec.kv_quant_mode = SimpleNamespace(name="FP8_PER_TENSOR")
    with pytest.raises(ConfigError, match="quantised KV cache"):
        check_supported("0.32.0", config(), cache(spec))
