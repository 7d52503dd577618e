"""Errors of torch that mean that the device is lost, and errors that mean that a call failed."""

import pytest
import torch

from stillroom.errors import DeviceLostError
from stillroom.runner.device_errors import first_line, is_device_loss

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call.\n"

LOST = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: unspecified launch failure",
    "CUDA error: device-side assert triggered",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: no CUDA-capable device is detected",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "CUDA driver error: unknown error",
    "HIP error: an illegal memory access was encountered",
    "Triton Error [CUDA]: an illegal memory access was encountered",
]
FAILED = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    "CUDA error: out of memory",
    "CUDA error: invalid configuration argument",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: too many resources requested for launch",
    "CUDA error: operation failed due to a previous error during capture",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`",
    "Triton Error [CUDA]: out of memory",
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory",
]


def errors(text: str) -> list[RuntimeError]:
    """Return the error as older and newer versions of torch raise it."""
    found = [RuntimeError(text + ADVICE)]
    if hasattr(torch, "AcceleratorError") and text.startswith(("CUDA error", "HIP error")):
        found.append(torch.AcceleratorError(text + ADVICE))
    return found


@pytest.mark.parametrize("text", LOST)
def test_error_that_leaves_the_device_unusable_is_a_loss(text: str) -> None:
    for error in errors(text):
        assert is_device_loss(error) and first_line(error) == text


@pytest.mark.parametrize("text", FAILED)
def test_error_of_one_call_is_no_loss(text: str) -> None:
    assert not any(is_device_loss(error) for error in errors(text))


def test_out_of_memory_is_no_loss() -> None:
    error = torch.OutOfMemoryError("CUDA error: out of memory, or whatever it says")
    assert not is_device_loss(error) and not is_device_loss(MemoryError())


def test_error_of_an_unknown_accelerator_is_a_loss() -> None:
    if not hasattr(torch, "AcceleratorError"):
        pytest.skip("torch has had this error since 2.8")
    assert is_device_loss(torch.AcceleratorError("device 3 has left"))


def test_error_raised_from_a_loss_is_a_loss() -> None:
    try:
        raise ValueError("the step failed") from RuntimeError(LOST[0])
    except ValueError as error:
        assert is_device_loss(error)
    assert is_device_loss(DeviceLostError("gone")) and not is_device_loss(ValueError(LOST[0]))
