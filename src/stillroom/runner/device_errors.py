"""Distinguishes the loss of a device from a failed call.

After some errors a device's memory is unusable, and a CUDA context often answers every later call with the same error.
After others (out of memory, invalid arguments) only the call has failed. torch raises both as RuntimeError, some of
them at a later call, so the first line of the message decides.
"""

import re

import torch

from stillroom.errors import DeviceLostError

_OF_THE_DEVICE = re.compile(
    r"\b(CUDA|HIP|CUDA driver|cuDNN|MIOpen|cuBLAS) error\b|Triton Error|\b(CUBLAS|CUDNN|HIPBLAS|MIOPEN)_STATUS_",
    re.IGNORECASE,
)
_OF_ONE_CALL = re.compile(
    r"out of memory|invalid (argument|configuration argument|device function|resource handle)|no kernel image"
    r"|too many resources requested|invalid device ordinal|captur"
    r"|STATUS_(ALLOC_FAILED|BAD_PARAM\w*|INVALID_VALUE|NOT_SUPPORTED\w*|ARCH_MISMATCH)",
    re.IGNORECASE,
)
"""Errors of the device after which the next call may succeed."""


def is_device_loss(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, means that the device's memory is unusable."""
    cause: BaseException | None = error
    while cause is not None:
        if _is_loss(cause):
            return True
        cause = cause.__cause__
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, which leaves out torch's advice."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_loss(error: BaseException) -> bool:
    if isinstance(error, DeviceLostError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    text = first_line(error)
    accelerator_error = getattr(torch, "AcceleratorError", ())  # since torch 2.8
    is_of_device = isinstance(error, accelerator_error) or _OF_THE_DEVICE.search(text) is not None
    return is_of_device and _OF_ONE_CALL.search(text) is None
