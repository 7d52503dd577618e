"""Chooses the device that computes a model."""

import torch

from stillroom.errors import ConfigError


def torch_device(name: str) -> torch.device:
    """Return a torch device that works; `auto` is CUDA if there is a GPU, else the CPU.

    Raises:
        ConfigError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        number = torch.zeros(1, device=name)
        number.item()  # fails on `meta`
        return number.device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
