"""Matrix products with weights, each by the method that is fastest on this machine.

On a CPU activations are float32 for weights of any dtype. Few rows (decoding) use `cpu_products`. Many rows (prefill)
use `cpu_panels` for bfloat16 weights, or torch: the faster of bfloat16 products and float32 products of widened
weights, or, if inputs may be rounded to 8 bits too, int8 products. Other devices use torch's `linear` in the weights'
dtype.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from stillroom.ops import cpu_kernels, crossovers
from stillroom.ops.cpu_codes import BLOCK, linear_codes, round_weights, widen_codes
from stillroom.ops.cpu_panels import can_use_panels, panel_gate, panel_products
from stillroom.ops.cpu_products import (
    can_multiply_bytes,
    linear_bfloat16,
    linear_bytes,
    linear_scaled,
    round_rows,
    scale_products,
)
from stillroom.ops.cpu_vectors import HAS_DOT

# T tokens, M inputs, N outputs, I inputs of the second product of a feed-forward layer

MAX_ROWS = 16
"""Most rows for which `cpu_products` beats torch with float32 weights, on two processors with AVX-512. For other
weights it depends on the processor, so it is measured: `most_rows_of_kernel`."""

_NUMBERS_OF_ROWS = (2, 4, 8, 12, 16, 24, 32, 48, 64)

_MAX_WIDENED = 1 << 22
"""Weights widened at a time, so that they are still in the processor's cache for the product."""

_MAX_ROUNDED = 1 << 18
"""Weights rounded to int8 at a time, which bounds the extra memory of loading."""

_NUM_PAIRS = 15
_TRIAL_WIDTH, _NUM_COPIES = 2048, 4
"""Of the square matrices with which numbers of rows are compared."""
_WORTH_A_LAYER = 1.2
"""The kernel may take so much of torch's time: few rows run a layer in one compiled call, which saves more."""


class Linear:
    """x @ weight.T + bias; immutable."""

    def __init__(
        self,
        weight_NM: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        scale_N: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        rounds_inputs: bool = False,
    ) -> None:
        """
        Args:
            scale_N: float32 factor of each row of int8 weights, or bfloat16 factors of the blocks of codes of four bits
                (`cpu_codes`), [N, M / 64]; both run on a CPU only.
            dtype: to which many rows of inputs may be rounded; None: the weight's.
            rounds_inputs: two or more rows may be rounded to int8 too, each with its own scale.
        """
        self.weight, self.scale, self._rounds_inputs = weight_NM, scale_N, rounds_inputs
        self.dtype = dtype or weight_NM.dtype
        is_cpu = weight_NM.device.type == "cpu"
        self._is_native = not is_cpu or weight_NM.dtype == torch.float32
        # a bias is added to activations, which are float32 on a CPU
        self.bias = bias_N.float() if bias_N is not None and is_cpu else bias_N
        self._kernel_weight: Any = None
        if is_cpu and weight_NM.dtype == torch.float32:
            self._kernel_weight = (weight_NM.numpy(), np.ones(len(weight_NM), np.float32))
        elif is_cpu and weight_NM.dtype == torch.bfloat16 and weight_NM.shape[1] % 2 == 0:
            self._kernel_weight = weight_NM.view(torch.uint32).numpy()
        elif self.has_codes and scale_N is not None:
            self._kernel_weight = (weight_NM.numpy(), scale_N.view(torch.uint16).numpy())
        elif scale_N is not None:
            self._kernel_weight = (weight_NM.numpy(), scale_N.numpy())
            if rounds_inputs and can_multiply_bytes(weight_NM.shape[1]):
                self._kernel_weight += (weight_NM.sum(1, dtype=torch.int32).numpy(),)

    @classmethod
    def int8(
        cls, parts: Sequence[torch.Tensor], bias_N: torch.Tensor | None = None, *, rounds_inputs: bool = False
    ) -> "Linear":
        """Make a product with weights rounded to int8, one scale per row: half the memory of bfloat16.

        Args:
            parts: rows of the weight, in parts that need not be contiguous.
        """
        num_outputs, num_inputs = sum(len(part) for part in parts), parts[0].shape[1]
        weight, scale_N = torch.empty((num_outputs, num_inputs), dtype=torch.int8), torch.empty(num_outputs)
        first = 0
        height = max(1, _MAX_ROUNDED // num_inputs)
        for piece in (piece for part in parts for piece in torch.split(part, height)):
            wide, rows = piece.float(), slice(first, first := first + len(piece))
            low_N1, high_N1 = torch.aminmax(wide, dim=1, keepdim=True)
            scale_N1 = (torch.maximum(-low_N1, high_N1) / 127).clamp_(min=1e-30)
            weight[rows] = torch.round(wide / scale_N1)
            scale_N[rows] = scale_N1[:, 0]
        return cls(weight, bias_N, scale_N, dtype=parts[0].dtype, rounds_inputs=rounds_inputs)

    @classmethod
    def int4(cls, parts: Sequence[torch.Tensor], bias_N: torch.Tensor | None = None) -> "Linear":
        """Make a product with weights rounded to four bits, one scale for 64 inputs: 0.28 of the memory of bfloat16.

        Args:
            parts: as in `int8`; the number of inputs is a multiple of 64.
        """
        num_outputs, num_inputs = sum(len(part) for part in parts), parts[0].shape[1]
        codes = np.empty((num_outputs, num_inputs // 4), np.uint16)
        scale_NB = torch.empty((num_outputs, num_inputs // BLOCK), dtype=torch.bfloat16)
        scales = scale_NB.view(torch.uint16).numpy()
        first = 0
        for part in parts:
            rows = slice(first, first := first + len(part))
            numbers = part if part.dtype in (torch.float32, torch.bfloat16) else part.float()
            round_weights(cpu_kernels.array(numbers), codes[rows], scales[rows], cpu_kernels.use_threads())
        return cls(torch.from_numpy(codes), bias_N, scale_NB, dtype=parts[0].dtype)

    @property
    def has_codes(self) -> bool:
        """Whether weights have four bits."""
        return self.weight.dtype == torch.uint16

    def __call__(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] -> [T, N], in the dtype of x."""
        if self._kernel_weight is not None and (x_TM.shape[0] <= 1 or x_TM.shape[0] <= self.most_rows):
            return self._few_rows(x_TM)
        if self._is_native:
            return F.linear(x_TM, self.weight, self.bias)
        out = self._many_rows(x_TM, torch.float32)
        return out if self.bias is None else out.add_(self.bias)

    def in_bfloat16(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] -> [T, N], both bfloat16, without the bias: many rows on a CPU that multiplies bfloat16 fast."""
        return self._many_rows(x_TM, torch.bfloat16)

    def gated_in_bfloat16(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] -> [T, N / 2], as `in_bfloat16`: silu(gate) * up of the product, whose columns are gate, then up."""
        out_TI = torch.empty((len(x_TM), len(self.weight) // 2), dtype=torch.bfloat16)
        if self._uses_panels(len(self.weight) // 2):
            self._gate_by_panels(x_TM, out_TI)
        else:
            _gate(self.in_bfloat16(x_TM), out_TI)
        return out_TI

    def add_to(self, out_TN: torch.Tensor, x_TM: torch.Tensor) -> None:
        """Add the product with x, as `in_bfloat16`, to a contiguous float32 tensor."""
        if self._uses_panels():
            self._by_panels(x_TM, out_TN, is_added=True)
        else:
            out_TN.add_(self.in_bfloat16(x_TM))

    @property
    def most_rows(self) -> int:
        """The most rows for which `cpu_products` is faster than torch; measured in about half a second."""
        if self.weight.dtype == torch.bfloat16:
            return most_rows_of_kernel()
        if self.has_codes:
            return most_rows_of_int4_kernel()
        return MAX_ROWS if self.scale is None else most_rows_of_int8_kernel(rounds_inputs=self._rounds_inputs)

    @property
    def kernel_arrays(self) -> tuple[Any, NDArray[np.float32]] | None:
        """Weight and bias for the CPU kernels; None if the kernels cannot read the weight.

        A weight that is not bfloat16 comes with its scale, and with the sums of its rows if inputs are rounded. An
        absent bias is an empty array.
        """
        if self._kernel_weight is None:
            return None
        return self._kernel_weight, np.empty(0, np.float32) if self.bias is None else self.bias.numpy()

    def _few_rows(self, x_TM: torch.Tensor) -> torch.Tensor:
        out_TN = torch.empty((x_TM.shape[0], self.weight.shape[0]))
        x, out, num_threads = x_TM.contiguous().numpy(), out_TN.numpy(), cpu_kernels.use_threads()
        if self.weight.dtype == torch.bfloat16:
            linear_bfloat16(x, self._kernel_weight, out, num_threads)
        elif self.has_codes:
            codes, scale_NB = self._kernel_weight
            linear_codes(x, codes, scale_NB, out, num_threads)
        else:
            weight, scale, *sums = self._kernel_weight
            if sums and len(x) > 1:
                linear_bytes(x, weight, scale, sums[0], out, num_threads)
            else:
                linear_scaled(x, weight, scale, out, num_threads)
        return out_TN if self.bias is None else out_TN.add_(self.bias)

    def _many_rows(self, x_TM: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The product without its bias, in this dtype."""
        if self._uses_panels():
            out_TN = torch.empty((len(x_TM), len(self.weight)), dtype=dtype)
            self._by_panels(x_TM, out_TN, is_added=False)
            return out_TN
        if self._rounds_inputs and is_int8_faster():
            return self._with_rounded_inputs(x_TM, dtype)
        wide = torch.bfloat16 if self.dtype == torch.bfloat16 and not is_float32_faster() else torch.float32
        if self.scale is None or self.has_codes:
            return self._widened(x_TM, wide).to(dtype)
        out_TN = torch.empty((len(x_TM), len(self.weight)), dtype=dtype)
        return self._scaled(self._widened(x_TM, wide), torch.ones(len(x_TM)), out_TN)

    def _uses_panels(self, num_outputs: int | None = None) -> bool:
        """Whether `cpu_panels` multiplies many rows, by default with all outputs."""
        is_bfloat16 = self.weight.dtype == torch.bfloat16 and self._kernel_weight is not None
        num_outputs = num_outputs or len(self.weight)
        return is_bfloat16 and can_use_panels(num_outputs, self.weight.shape[1]) and are_panels_fastest()

    def _by_panels(self, x_TM: torch.Tensor, out_TN: torch.Tensor, *, is_added: bool) -> None:
        x, num_threads = cpu_kernels.array(x_TM.to(torch.bfloat16).contiguous()), cpu_kernels.use_threads()
        panel_products(x, self._kernel_weight, cpu_kernels.array(out_TN), is_added, num_threads)

    def _gate_by_panels(self, x_TM: torch.Tensor, out_TI: torch.Tensor) -> None:
        num_threads = cpu_kernels.use_threads()
        panel_gate(cpu_kernels.array(x_TM), self._kernel_weight, cpu_kernels.array(out_TI), num_threads)

    def _widened(self, x_TM: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x_TM = x_TM.to(dtype)
        if self.weight.dtype == dtype:
            return F.linear(x_TM, self.weight)
        height = max(1, _MAX_WIDENED // x_TM.shape[1])
        pieces = (
            self._part(slice(first, min(first + height, len(self.weight))))
            for first in range(0, len(self.weight), height)
        )
        parts = [F.linear(x_TM, piece.to(dtype)) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _part(self, rows: slice) -> torch.Tensor:
        """These rows of the weight, in bfloat16 if it has four bits."""
        if not self.has_codes or self.scale is None:
            return self.weight[rows]
        codes, scale_NB = (array[rows] for array in self._kernel_weight)
        out_NM = torch.empty((len(codes), BLOCK * scale_NB.shape[1]), dtype=torch.bfloat16)
        widen_codes(codes, scale_NB, cpu_kernels.array(out_NM), cpu_kernels.use_threads())
        return out_NM

    def _with_rounded_inputs(self, x_TM: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rounded_TM, scale_T = torch.empty(x_TM.shape, dtype=torch.int8), torch.empty(len(x_TM))
        cpu_kernels.use_threads()
        round_rows(cpu_kernels.array(x_TM.contiguous()), rounded_TM.numpy(), scale_T.numpy())
        sums_TN = torch._int_mm(rounded_TM, self.weight.t())
        return self._scaled(sums_TN, scale_T, torch.empty(sums_TN.shape, dtype=dtype))

    def _scaled(self, products_TN: torch.Tensor, scale_T: torch.Tensor, out_TN: torch.Tensor) -> torch.Tensor:
        assert self.scale is not None
        cpu_kernels.use_threads()
        products, out = cpu_kernels.array(products_TN), cpu_kernels.array(out_TN)
        scale_products(products, scale_T.numpy(), self.scale.numpy(), out)
        return out_TN


def _gate(gate_up: torch.Tensor, out_TI: torch.Tensor) -> None:
    cpu_kernels.use_threads()
    cpu_kernels.silu_gate(cpu_kernels.array(gate_up), cpu_kernels.array(out_TI))


@functools.cache
def is_float32_faster() -> bool:
    """Return whether this processor multiplies bfloat16 matrices faster after widening them to float32.

    Measured in about 100 ms, because processors with bfloat16 instructions differ.
    """

    def ratio() -> float:
        x, weight = _trial(256)
        narrow = functools.partial(F.linear, x.to(torch.bfloat16), weight)
        return ratio_of_times(lambda: F.linear(x, weight.float()), lambda: narrow().float())

    return crossovers.remembered("float32 of bfloat16", ratio) <= 1.0


@functools.cache
def are_panels_fastest() -> bool:
    """Return whether `cpu_panels` computes a feed-forward layer of many rows in less time than torch's products.

    Measured in about 100 ms. On processors with AMX torch is faster.
    """
    if not HAS_DOT:
        return False
    wide = torch.float32 if is_float32_faster() else torch.bfloat16

    def ratio() -> float:
        x, weight = _trial(256)
        up, down = Linear(weight), Linear(weight.view(weight.shape[1], -1)[:, : len(weight) // 2].contiguous())
        narrow, inner = x.to(torch.bfloat16), torch.empty((len(x), len(weight) // 2), dtype=torch.bfloat16)

        def by_panels() -> None:
            up._gate_by_panels(narrow, inner)
            down._by_panels(inner, x, is_added=True)

        def by_torch() -> None:
            _gate(up._widened(narrow, wide).to(torch.bfloat16), inner)
            x.add_(down._widened(inner, wide))

        return ratio_of_times(by_panels, by_torch)

    return crossovers.remembered("panels of torch's", ratio) < 1.0


@functools.cache
def is_int8_faster() -> bool:
    """Return whether products of rows and weights in int8 take less time than the others. Measured in about 100 ms."""

    def ratio() -> float:
        x, weight = _trial(256)
        rounding, exact = Linear.int8([weight], rounds_inputs=True), Linear.int8([weight])
        return ratio_of_times(
            lambda: rounding._with_rounded_inputs(x, torch.float32), lambda: exact._many_rows(x, torch.float32)
        )

    return crossovers.remembered("int8 of exact", ratio) < 1.0


@functools.cache
def most_rows_of_kernel() -> int:
    """Return the most rows for which `cpu_products` multiplies with bfloat16 weights faster than torch; 1 at least."""
    return int(crossovers.remembered("rows of bfloat16 from memory", lambda: _most_rows(Linear)))


@functools.cache
def most_rows_of_int8_kernel(*, rounds_inputs: bool) -> int:
    """As `most_rows_of_kernel`, with int8 weights."""

    def most() -> int:
        return _most_rows(lambda weight: Linear.int8([weight], rounds_inputs=rounds_inputs))

    return int(crossovers.remembered("rows of w8a8 from memory" if rounds_inputs else "rows of int8 from memory", most))


@functools.cache
def most_rows_of_int4_kernel() -> int:
    """As `most_rows_of_kernel`, with weights of four bits."""
    return int(
        crossovers.remembered("rows of int4 from memory", lambda: _most_rows(lambda weight: Linear.int4([weight])))
    )


def _most_rows(of_weight: Callable[[torch.Tensor], Linear]) -> int:
    """Measure with several copies of a large matrix, so that weights are read from memory, as those of a model are."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((_TRIAL_WIDTH, _TRIAL_WIDTH), generator=generator).to(torch.bfloat16)
    linears = itertools.cycle([of_weight(weight.clone()) for _ in range(_NUM_COPIES)])
    most = 1
    for num_rows in _NUMBERS_OF_ROWS:
        x = torch.randn((num_rows, _TRIAL_WIDTH), generator=generator)

        def of_kernel(x: torch.Tensor = x) -> None:
            next(linears)._few_rows(x)

        def of_torch(x: torch.Tensor = x) -> None:
            next(linears)._many_rows(x, torch.float32)

        ratio = ratio_of_times(of_kernel, of_torch)
        if ratio > _WORTH_A_LAYER:
            break
        most = num_rows
    return most


def _trial(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((1024, 512), generator=generator)
    return torch.randn((num_rows, 512), generator=generator), weight.to(torch.bfloat16)


def ratio_of_times(first: Callable[[], object], second: Callable[[], object]) -> float:
    """Return how long the first takes, as a share of the second: the median of pairs on one thread.

    Other work of the machine slows both measurements of a pair, and threads would wait for each other.
    """

    def seconds(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = [seconds(first) / seconds(second) for _ in range(_NUM_PAIRS + 1)]
    finally:
        torch.set_num_threads(num_threads)
    return statistics.median(ratios[1:])  # the first pair selects kernels
