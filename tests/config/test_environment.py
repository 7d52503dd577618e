"""Settings that a child process reads from its environment."""

from pathlib import Path

import pytest

from stillroom.config.environment import as_environment
from stillroom.config.load import load_config
from stillroom.config.settings import (
    EngineConfig,
    ReuseConfig,
    RuntimeConfig,
    SearchConfig,
    ServerConfig,
    StillroomConfig,
)

CHANGED = StillroomConfig(
    runtime=RuntimeConfig(model="my model", kv_bytes=123_456_789, batch_delay_ms=1e-7, fixed_shapes=True),
    reuse=ReuseConfig(mode="anywhere", recompute_ratio=0.1 + 0.2, kv_tier="file:///tier", looks_ahead=False),
    search=SearchConfig(top_k=9),
    server=ServerConfig(keys_file="/keys.json", port=0),
)


@pytest.mark.parametrize("config", [StillroomConfig(), CHANGED], ids=["default", "changed"])
def test_child_process_reads_the_same_settings(
    config: StillroomConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stillroom.toml").write_text('[search]\ntop_k = 3\n[reuse]\nmode = "off"\n')
    monkeypatch.chdir(tmp_path)  # the file of the folder does not count
    assert load_config(env=as_environment(config)) == config


def test_sections_settings_and_secrets_are_left_out() -> None:
    config = StillroomConfig(engine=EngineConfig(api_key="hidden"), reuse=ReuseConfig(kv_tier_key="hidden"))
    found = as_environment(config, leave_out=("engine", "server.port"))
    assert "hidden" not in found.values()
    assert not any(name.startswith("STILLROOM_ENGINE__") for name in found)
    assert "STILLROOM_SERVER__PORT" not in found and found["STILLROOM_SERVER__HOST"] == "127.0.0.1"
