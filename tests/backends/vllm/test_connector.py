"""The connector under a real vLLM. Skipped without one, as vLLM is no dependency: STILLROOM_VLLM names its Python.

STILLROOM_VLLM_PATH is added to its module path, for packages that Stillroom needs and vLLM's environment lacks.
"""

import importlib.util
import os
import random
from pathlib import Path

import pytest

from stillroom.errors import ConfigError
from stillroom.models.bundled_models import bundled_folder
from tests.backends.vllm.vllm_process import started

PYTHON = os.environ.get("STILLROOM_VLLM", "")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="needs vLLM .* install Stillroom into vLLM's environment"):
        importlib.import_module("stillroom.backends.vllm.connector")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="STILLROOM_VLLM names no Python with vLLM")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_of_vllm_stay_the_same(dtype: str, tmp_path: Path) -> None:
    """Two vLLM with a tier against one without; trained weights. Then every record is damaged."""
    folder = bundled_folder("bundled:microworld")
    assert folder is not None
    rng = random.Random(0)
    stem = [rng.randrange(4, 990) for _ in range(700)]
    prompts = [[*stem[:length], *(rng.randrange(4, 990) for _ in range(40))] for length in (700, 500, 150, 30, 700)]
    (tmp_path / "tier").mkdir()
    extra = {"kv_tier": f"file://{tmp_path}/tier", "piece_tokens": 64, "save_at_use": 1}
    with started(PYTHON, folder, dtype, None) as alone:
        expected = alone.ask(prompts)["tokens"]
    with started(PYTHON, folder, dtype, extra) as one:
        first = one.ask(prompts)
        assert first["tokens"] == expected and list((tmp_path / "tier").rglob("*.kv"))
    with started(PYTHON, folder, dtype, extra) as other:
        again = other.ask(prompts)
        assert again["tokens"] == expected
        assert again["cached"] == [704, 512, 128, 64, 704]
        assert other.ask(prompts, salt="tenant")["cached"] == first["cached"], "only what vLLM itself has"
        for path in (tmp_path / "tier").rglob("*.kv"):
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1
            path.write_bytes(content)
        damaged = other.ask(prompts)
        assert damaged["tokens"] == expected and damaged["cached"][0] == 0
