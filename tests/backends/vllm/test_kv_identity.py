"""The fingerprint of vLLM's KV changes with everything that KV depends on, and with nothing else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stillroom.backends.vllm.kv_identity import file_digests, fingerprint_of, processor_of
from stillroom.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "original").mkdir()
    return tmp_path


def fingerprint(folder: Path, **changes: Any) -> bytes:
    usual: dict[str, Any] = {
        "version": "0.32.0",
        "hash": "abc",
        "format": "auto",
        "dtype": "bfloat16",
        "theta": 1.0,
        "layout": "LBHNC",
    }
    found = usual | {"layers": {"one": torch.zeros(4, 2, 8, 6), "two": torch.zeros(4, 2, 8, 6)}} | changes
    vllm = SimpleNamespace(
        compute_hash=lambda: found["hash"],
        load_config=SimpleNamespace(load_format=found["format"]),
        model_config=SimpleNamespace(
            model=str(folder),
            dtype=found["dtype"],
            hf_config=SimpleNamespace(to_json_string=lambda use_diff: f"theta {found['theta']}, {use_diff}"),
        ),
    )
    return fingerprint_of(found["version"], vllm, found["layout"], found["layers"])


def test_fingerprint_names_all_that_kv_depends_on(folder: Path) -> None:
    same = fingerprint(folder)
    assert len(same) == 32 and fingerprint(folder) == same
    more_blocks = {"one": torch.zeros(9, 2, 8, 6), "two": torch.zeros(9, 2, 8, 6)}
    assert fingerprint(folder, layers=more_blocks) == same, "memory for KV changes no KV"
    changes: list[dict[str, Any]] = [
        {"version": "0.32.1"},
        {"hash": "abd"},
        {"format": "safetensors"},
        {"dtype": "float32"},
        {"theta": 2.0},
        {"layout": "LNBHC"},
        {"layers": {"one": torch.zeros(4, 2, 8, 6)}},
        {"layers": {"one": torch.zeros(4, 2, 4, 6), "two": torch.zeros(4, 2, 4, 6)}},
        {"layers": {"one": torch.zeros(4, 2, 8, 6), "two": torch.zeros(4, 2, 8, 6, dtype=torch.bfloat16)}},
    ]
    others = [fingerprint(folder, **change) for change in changes]
    (folder / "model.safetensors").write_bytes(b"weightz")
    others.append(fingerprint(folder))
    assert len({same, *others}) == 1 + len(others)


def test_hub_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give vLLM the folder of a downloaded checkpoint"):
        file_digests(tmp_path / "Qwen/Qwen2.5-0.5B")


def test_processors_differ_by_their_features(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu amx_tile\nprocessor : 1\nflags\t\t: fpu amx_tile\n")
    with_amx = processor_of(CPU, info)
    assert "amx_tile" in with_amx and "processor" not in with_amx
    info.write_text("flags\t\t: fpu\n")
    assert processor_of(CPU, info) != with_amx
    assert processor_of(CPU, tmp_path / "missing").startswith("cpu ")
