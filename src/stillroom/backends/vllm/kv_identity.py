"""The fingerprint of KV that vLLM computes: a hash of everything but tokens and salt that it depends on.

It names more than it must, such as the path of the model and the features of the processor, because a hash that is too
narrow costs computing, and a hash that is too wide a wrong answer.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from stillroom.errors import ConfigError

_VERSION = "stillroom-vllm-1"
"""Raise this when the bytes of a record change their meaning."""
_CPU_INFO = Path("/proc/cpuinfo")


def fingerprint_of(version: str, vllm: Any, layout: str, layers: Mapping[str, torch.Tensor]) -> bytes:
    """Return the fingerprint, 32 bytes.

    Args:
        version: of vLLM.
        vllm: its `VllmConfig`; `compute_hash` covers architecture, types, attention backend and compilation.
        layout: vLLM's name of the layout of its KV cache.
        layers: vLLM's KV cache of each layer, by name.

    Raises:
        ConfigError: the model is no folder, or a file of it cannot be read.
    """
    device = next(iter(layers.values())).device
    parts = {
        "version": [_VERSION, version, torch.__version__],
        "config": [vllm.compute_hash(), vllm.load_config.load_format, str(vllm.model_config.dtype)],
        "model": vllm.model_config.hf_config.to_json_string(use_diff=False),
        "files": file_digests(Path(vllm.model_config.model)),
        "layout": [layout, *(f"{name} {list(one.shape[1:])} {one.dtype}" for name, one in layers.items())],
        "processor": processor_of(device),
    }
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def file_digests(folder: Path) -> list[str]:
    """Return name and xxh3 hash of each file in the model's folder, in order of names.

    Raises:
        ConfigError: it is no folder, or a file of it cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give vLLM the folder of a downloaded checkpoint, not a hub name")
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            hasher = xxhash.xxh3_128()
            try:
                with path.open("rb") as file:
                    while part := file.read(2**22):
                        hasher.update(part)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
            found.append(f"{path.name}:{hasher.hexdigest()}")
    return found


def processor_of(device: torch.device, cpu_info: Path = _CPU_INFO) -> str:
    """Return the name of a GPU, or a CPU's features, by which kernels and the layout of their KV are chosen."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = ("flags", "Features")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    flags = [line for line in lines if line.split(":")[0].strip() in names]
    return f"{device.type} {flags[0] if flags else torch.backends.cpu.get_cpu_capability()}"
