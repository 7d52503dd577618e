"""Tells where bfloat16 is multiplied in hardware; emulation is slower than float32."""

from typing import Any

import torch


def has_bfloat16(device_type: str) -> bool:
    """Return whether the processor, or the GPU for `cuda`, multiplies bfloat16 in hardware."""
    return torch.cuda.is_bf16_supported() if device_type == "cuda" else _cpu_has_bfloat16()


def _cpu_has_bfloat16() -> bool:
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    found: dict[str, Any] = capabilities() if capabilities is not None else {}
    names = ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16")
    if any(found.get(name) for name in names):
        return True
    older = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(older is not None and older())
