"""Matrix products of an encoder that give a row the same bits whichever rows are computed with it.

So a text has the same vector alone and among others. On a CPU, outside of training, each weight is packed once into the
layout in which oneDNN computes; `nn.Linear` packs it again at each call, which costs as much as a product of 32 rows.
Packed float32 products also give all numbers of rows above one the same bits (measured on AVX-512).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
"""[rows, inputs] -> [rows, outputs]."""

_PIECE, _MOST_ROWS = 32, 512
_TRIED = (2, 7, 16, 40, 96, 200, 352, 448)
"""Numbers of rows that are compared with `_MOST_ROWS`; products of more are taken to add in the same order."""


class SteadyLinear(nn.Linear):
    """All weights are zeros until a checkpoint is loaded."""

    _packed: dict[Any, tuple[Any, Product]] | None = None
    """By type: queries are embedded in float32, documents and sentences in bfloat16, in turn."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, *, then_gelu: bool = False) -> Tensor:
        """Return [..., outputs] of [..., inputs], through GELU (by the error function) if asked."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        if x.device.type != "cpu" or torch.is_grad_enabled() or not is_packable(dtype):
            out = super().forward(x)
            return F.gelu(out) if then_gelu else out
        rows = x.flatten(0, -2).to(dtype)
        product = self._product(dtype, then_gelu)
        most = _rows_at_once(self.out_features, self.in_features, dtype, torch.get_num_threads())
        if most is None or len(rows) >= _MOST_ROWS:
            out = product(rows)
        else:
            padded = F.pad(rows, (0, 0, 0, -len(rows) % most))
            out = torch.cat([product(piece) for piece in padded.chunk(len(padded) // most)])[: len(rows)]
        return out.view(*x.shape[:-1], -1)

    def _product(self, dtype: torch.dtype, then_gelu: bool) -> Product:
        """Return the product with the packed weight, which is packed again after a change of the weight."""
        state = (self.weight.data_ptr(), self.weight._version, self.bias._version)
        if self._packed is None:
            self._packed = {}
        packed = self._packed.get((dtype, then_gelu))
        if packed is None or packed[0] != state:
            packed = state, _product_of(self.weight.detach(), self.bias.detach(), dtype, then_gelu)
            self._packed[dtype, then_gelu] = packed
        return packed[1]

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the packed weight."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


@functools.cache
def is_packable(dtype: torch.dtype) -> bool:
    """Whether this build of torch computes with packed weights of this type on the CPU."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _product_of(weight: Tensor, bias: Tensor, dtype: torch.dtype, then_gelu: bool) -> Product:
    """Return the product with a weight [outputs, inputs] and a bias [outputs], computed in `dtype`."""
    packed, bias = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _PIECE), bias.to(dtype)
    name, kind = ("gelu", "none") if then_gelu else ("none", "")
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, name, [], kind)


@functools.cache
def _rows_at_once(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_threads: int) -> int | None:
    """Return the number of rows of each product; None: all rows at once have the same bits, by a trial of some 30 ms.

    With AMX, oneDNN adds 1,536 inputs in bfloat16 in another order for 37 to 383 rows than for fewer or more.

    Args:
        num_threads: of torch now, by which its product may be chosen too.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn((size, num_inputs), generator=generator).to(dtype) for size in (_MOST_ROWS, num_outputs))
    product = _product_of(weight, torch.zeros(num_outputs), dtype, then_gelu=False)
    whole = product(x)
    return None if all(torch.equal(product(x[:n]), whole[:n]) for n in _TRIED) else _PIECE
