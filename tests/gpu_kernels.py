"""Runs GPU kernels in tests: compiled on a GPU, else in Triton's interpreter on the CPU (see conftest.py)."""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

HALF_PRECISION = [
    torch.float16,
    # Triton's interpreter keeps bfloat16 as 16 bits, and multiplies matrices of them as if they were integers
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the GPU kernels on the CPU too."""
    pytest.importorskip("triton")
    for module in (
        "ops.attention",
        "ops.device_attention",
        "ops.rope",
        "ops.row_kernels",
        "models.mixture_of_experts",
        "runner.decode_graphs",
    ):
        monkeypatch.setattr(f"stillroom.{module}.has_kernels", lambda device: True)
