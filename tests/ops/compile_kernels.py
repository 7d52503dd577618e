"""Compiles the GPU kernels for two architectures, Ampere and Hopper, without a GPU; a program of its own.

Asserts properties that results do not show: bfloat16 is loaded in pieces of 16 bytes, and shared memory suffices.
"""

from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stillroom.ops import triton_attention, triton_experts, triton_rows

SHARED_MEMORY = 99 * 1024
"""Shared memory of the smallest GPUs: RTX 30 and 40, L4."""


def compile_for(
    architecture: int, kernel: Any, types: dict[str, str], options: dict[str, Any], **constants: Any
) -> str:
    """Declare pointers and strides as multiples of 16, as Triton finds them at run time; returns the PTX."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] != "f"}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert compiled.asm["cubin"], "no machine code"
    assert compiled.metadata.shared <= SHARED_MEMORY, (kernel, constants, compiled.metadata.shared)
    return str(compiled.asm["ptx"])


def compile_wide(
    architecture: int, kernel: Any, types: dict[str, str], options: dict[str, Any], **constants: Any
) -> None:
    """As `compile_for`, of a kernel whose threads have several numbers next to each other, which they load together."""
    ptx = compile_for(architecture, kernel, types, options, **constants)
    assert "ld.global.b16" not in ptx, "loads single numbers"


def attention(architecture: int, head_dim: int, shape: tuple[int, int], dtype: torch.dtype, limited: bool) -> None:
    num_queries, num_splits = shape
    element = f"*{'bf16' if dtype == torch.bfloat16 else 'fp32'}"
    types = dict.fromkeys(("q_THD", "k_SGD", "v_SGD", "out_THD"), element)
    types |= dict.fromkeys(("partial_THPD", "statistics_THP2"), "*fp32")
    types |= {"tiles_N4": "*i64", "slots_C": "*i64", "factor": "fp32", "cap_factor": "fp32"}
    types |= dict.fromkeys(("window", "slot_stride", "head_stride"), "i32")
    sizes = triton_attention.block_sizes(4, head_dim, num_queries, dtype)
    flags = {"NUM_SPLITS": num_splits, "HAS_WINDOW": limited, "HAS_CAP": limited}
    compile_wide(architecture, triton_attention._attend, types, triton_attention.OPTIONS, **sizes, **flags)
    if num_splits > 1:
        merged = {name: types[name] for name in ("partial_THPD", "statistics_THP2", "out_THD")}
        head = {name: sizes[name] for name in ("HEAD_DIM", "BLOCK_D")}
        options = triton_attention.OPTIONS
        compile_wide(architecture, triton_attention._merge, merged, options, **head, NUM_SPLITS=num_splits)


def experts(architecture: int, is_first: bool, block_r: int) -> None:
    types = {"x": "*bf16", "out": "*bf16", "addresses_E": "*i64", "tiles_N3": "*i64", "order_R": "*i64"}
    types |= {"num_inputs": "i32", "num_outputs": "i32"}
    sizes = triton_experts.block_sizes(block_r, torch.bfloat16)
    flags = {"NUM_ACTIVE": 8, "IS_FIRST": is_first}
    compile_wide(architecture, triton_experts._multiply, types, triton_experts.OPTIONS, **sizes, **flags)


def rows(architecture: int, head_dim: int, num_pairs: int) -> None:
    types = dict.fromkeys(("qkv_THD", "k_SGD", "v_SGD", "q_THD"), "*bf16")
    types |= {"cos_TP": "*fp32", "sin_TP": "*fp32", "slots_T": "*i64", "slot_stride": "i32", "head_stride": "i32"}
    sizes = triton_rows.block_sizes(12, 2, head_dim, num_pairs)
    rotate = compile_wide if num_pairs > 32 else compile_for  # a warp has 32 threads
    rotate(architecture, triton_rows._rotate_and_store, types, triton_rows.OPTIONS, **sizes)
    types = {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}
    compile_wide(architecture, triton_rows._silu_gate, types, {"num_warps": 4}, BLOCK=1024)


if __name__ == "__main__":
    for architecture in (80, 90):
        rows(architecture, 128, 64)
        rows(architecture, 80, 20)
        for head_dim, shape in product((64, 256), ((1, 8), (16, 1))):
            attention(architecture, head_dim, shape, torch.bfloat16, limited=head_dim == 256)
        experts(architecture, is_first=True, block_r=16)
        experts(architecture, is_first=False, block_r=64)
    attention(80, 256, (8, 1), torch.float32, limited=True)
