"""Numbers of every architecture, recorded when `NUMERICS_VERSION` was last raised.

The key of kept KV has that version. So when a kernel or formula changes numbers, the version must change too, or
old KV would be used as exact. `python -m tests.models.test_numerics` writes numerics.json.
"""

import json
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from stillroom.models.numerics import NUMERICS_VERSION, kv_fingerprint
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionSpan
from tests.fakes import random_checkpoint
from tests.models.test_oracle import CASES

GOLDEN = Path(__file__).with_name("numerics.json")
PIECES = (1, 50, 16, 1, 22)
"""Prefill and decode kernels, with and without a context."""
NUM_PROJECTIONS = 3
TOLERANCE = 2e-5
"""Tolerance, as a share of the root mean square. Other pieces of the prompt, which sum in other orders,
change numbers by 2e-6; a RoPE base that is 1 % off, by 7e-4 or more."""


def decoder_of(folder: Path, case: str) -> Decoder:
    """Set weights from NumPy's `RandomState`, which is frozen, unlike torch's random numbers."""
    kind, settings = CASES[case]
    random_checkpoint(folder, kind, **settings)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(tensor.shape))
        is_norm = "norm" in name and not name.endswith("bias")
        has_offset = kind.startswith("Gemma")
        weights[name] = torch.from_numpy(values * 0.15 + float(is_norm and not has_offset)).float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return load_own_decoder(folder, device="cpu", dtype="float32")


@torch.inference_mode()
def numbers_of(decoder: Decoder) -> list[float]:
    """Return random projections of every layer's keys and values and of the last logits, each with its mean square."""
    spec, num_tokens = decoder.spec, sum(PIECES)
    token_ids = torch.from_numpy(np.random.RandomState(0).randint(3, 301, num_tokens))
    slots = torch.from_numpy(np.random.RandomState(1).permutation(num_tokens))
    kv = torch.zeros(2, spec.num_layers, num_tokens, spec.num_kv_heads, spec.head_dim)
    start = 0
    for size in PIECES:
        end = start + size
        spans = [AttentionSpan(0, size, slots[:end], end)]
        own = slice(start, end)
        packed = PackedInput(token_ids[own], torch.arange(start, end), slots[own], spans, [size - 1])
        hidden = decoder.hidden_states(packed, lambda layer: (kv[0, layer], kv[1, layer]))
        start = end
    found = [number for layer in kv[:, :, slots].flatten(0, 1) for number in projected(layer.numpy())]
    return found + projected(decoder.logits(hidden).float().numpy())


def projected(values: NDArray[np.float32]) -> list[float]:
    flat = values.astype(np.float64).ravel()
    signs = np.random.RandomState(len(flat)).choice((-1.0, 1.0), (NUM_PROJECTIONS, len(flat)))
    numbers = [*(signs @ flat / np.sqrt(len(flat))), np.sqrt(np.square(flat).mean())]
    return [round(float(number), 6) for number in numbers]


def largest_change(numbers: list[float], golden: list[float]) -> float:
    """Return the largest difference as a share of the root mean square."""
    new, old = (np.array(one).reshape(-1, NUM_PROJECTIONS + 1) for one in (numbers, golden))
    return float((np.abs(new - old) / old[:, -1:]).max())


def golden() -> dict[str, list[float]]:
    kept = json.loads(GOLDEN.read_text())
    assert kept["version"] == NUMERICS_VERSION, "write the numbers: python -m tests.models.test_numerics"
    return dict(kept["cases"])


@pytest.mark.parametrize("case", CASES)
def test_numbers_change_only_with_their_version(case: str, tmp_path: Path) -> None:
    change = largest_change(numbers_of(decoder_of(tmp_path, case)), golden()[case])
    assert change < TOLERANCE, (
        "KV or logits have changed. If that is right, raise NUMERICS_VERSION; then python -m tests.models.test_numerics"
    )


def with_other_base(decoder: Decoder) -> Decoder:
    """Return the decoder with a RoPE base 1 % larger."""
    rope = replace(decoder.spec.rope, theta=1.01 * decoder.spec.rope.theta)
    return Decoder(replace(decoder.spec, rope=rope), decoder.weights)


def without_window(decoder: Decoder) -> Decoder:
    return Decoder(replace(decoder.spec, windows=(None,) * decoder.spec.num_layers), decoder.weights)


@pytest.mark.parametrize("case", ["llama", "llama3-rope", "qwen2-tied-yarn", "phi3-partly-rotated", "gemma3-window"])
def test_rope_base_off_by_one_percent_is_detected(case: str, tmp_path: Path) -> None:
    numbers = numbers_of(with_other_base(decoder_of(tmp_path, case)))
    assert largest_change(numbers, golden()[case]) > 10 * TOLERANCE


@pytest.mark.parametrize("case", ["mistral-window", "qwen2-window", "phi3-window", "gemma2-window"])
def test_missing_window_is_detected(case: str, tmp_path: Path) -> None:
    numbers = numbers_of(without_window(decoder_of(tmp_path, case)))
    assert largest_change(numbers, golden()[case]) > 10 * TOLERANCE


def test_kv_of_another_version_has_another_fingerprint() -> None:
    assert kv_fingerprint(b"m") == kv_fingerprint(b"m", NUMERICS_VERSION)
    assert len({kv_fingerprint(b"m"), kv_fingerprint(b"m", NUMERICS_VERSION + 1), kv_fingerprint(b"n"), b"m"}) == 4


if __name__ == "__main__":
    cases = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = numbers_of(decoder_of(Path(folder), name))
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in cases.items())
    GOLDEN.write_text(f'{{"version": {NUMERICS_VERSION}, "cases": {{\n{rows}\n}}}}\n')
