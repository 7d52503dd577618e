"""Tests `stillroom bench runtime` on a tiny shape with transformers as the peer."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stillroom.errors import UsageError
from stillroom.models.loader import load_own_decoder
from stillroom_bench.quality.quality_options import RuntimeOptions
from stillroom_bench.quality.runtime import OTHERS_OF_OURS, OURS, Shape, run_runtime, write_checkpoint

RUNTIMES = {OURS, *OTHERS_OF_OURS, "transformers"}
TINY = Shape(97, 32, 48, 2, 4, 2, 8)


@pytest.mark.slow  # starts processes that import torch and transformers
def test_run_measures_all_arms_and_limits(tmp_path: Path) -> None:
    peers = (f"transformers={sys.executable}", f"vllm={sys.executable}")
    result = run_runtime(RuntimeOptions(peers, ("float32",), (5, 9), repeat=2), tmp_path, shape=TINY)
    groups = ["prefill of 5 tokens", "prefill of 9 tokens", "decode after 512 tokens", "batch of 8"]
    assert set(result.samples.values) == {f"float32: {g}/{name}" for g in groups for name in RUNTIMES}
    assert result.ratio("float32: batch of 8/transformers", "tokens_per_second") is not None
    assert len(result.notes) == 1 and result.notes[0].startswith("vllm, float32: left out")
    assert {row["runtime"] for row in result.tables["memory, float32"]} == RUNTIMES
    assert len(result.tables["against the machine's limits, float32"]) == 6


def test_checkpoint_loads_and_is_reused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, TINY, "bfloat16", seed=1)
    decoder = load_own_decoder(folder, device="cpu")
    assert decoder.dtype == torch.bfloat16 and decoder.spec.num_kv_heads == 2
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert write_checkpoint(tmp_path, TINY, "bfloat16", seed=1) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert write_checkpoint(tmp_path, TINY, "bfloat16", seed=2) != folder


def test_shape_counts_parameters_and_operations(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, TINY, "float32", seed=0)
    matrices = [tensor for tensor in load_file(folder / "model.safetensors").values() if tensor.dim() == 2]
    assert TINY.layer_parameters + 97 * 32 == sum(matrix.numel() for matrix in matrices)
    assert 134e6 < Shape().layer_parameters + 49_152 * 576 < 136e6
    assert TINY.prefill_flops(1) >= 2 * (TINY.layer_parameters + 97 * 32)
    assert TINY.decode_bytes(10, 4) == 4 * (TINY.layer_parameters + 97 * 32 + 2 * 2 * 2 * 8 * 10)
    assert json.loads((folder / "config.json").read_text())["head_dim"] == 8


def test_unknown_peer_dtype_and_long_prompts_are_refused(tmp_path: Path) -> None:
    for options in (
        RuntimeOptions(peers=("unknown=python",)),
        RuntimeOptions(dtypes=("int3",)),
        RuntimeOptions(lengths=(5000,)),
    ):
        with pytest.raises(UsageError):
            run_runtime(options, tmp_path)
