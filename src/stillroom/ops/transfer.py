"""Copies host arrays to a device without waiting for it."""

import numpy as np
import torch
from numpy.typing import ArrayLike


def to_device(array: ArrayLike, device: torch.device) -> torch.Tensor:
    """Return an int64 tensor of the same shape. The copy is asynchronous, for which a GPU needs pinned memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
