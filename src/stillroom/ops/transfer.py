"""The way from host arrays to a device, without waiting for it."""

import numpy as np
import torch
from numpy.typing import ArrayLike


def to_device(array: ArrayLike, device: torch.device) -> torch.Tensor:
    """int64, the same shape. Pinned memory lets a GPU fetch it while the host goes on; from ordinary memory the driver
    would first wait for everything under way."""
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
