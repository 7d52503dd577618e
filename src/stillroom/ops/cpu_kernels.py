"""Hot loops of the decoder on a CPU, compiled by numba, in place of sequences of small torch operators.

Activations are float32; weights, keys and values may be bfloat16, which numba sees as bits (uint16, or two in a
uint32). tests/ops/test_cpu_kernels.py has a reference of every kernel, and the torch path computes the same numbers.
The result does not depend on the number of threads. Products with weights: `cpu_products`.
"""

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from stillroom.ops import cpu_code_scan
from stillroom.ops.cpu_attention import attend_blocks, split_queries
from stillroom.ops.cpu_compiler import Bits, Floats, inlined, kernel, parallel_kernel
from stillroom.ops.cpu_elements import exp, read, write
from stillroom.ops.cpu_panels import panel_gate, panel_products
from stillroom.ops.cpu_products import linear_bfloat16, linear_scaled, product
from stillroom.ops.cpu_row_attention import attend_rows
from stillroom.ops.cpu_vectors import HAS_DOT, LANES

# T tokens, H query heads, G key/value heads, D head dimension, S slots


def use_threads() -> int:
    """Give this thread's kernels as many threads as its torch operators have; returns the number.

    The first call in a process starts numba's threads. That sets OpenMP's thread number of the calling thread, which
    torch shares, to all cores; so torch's number is set again.
    """
    of_torch = torch.get_num_threads()
    num_threads = min(of_torch, int(numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(num_threads)
    if torch.get_num_threads() != of_torch:
        torch.set_num_threads(of_torch)
    return num_threads


def has_kernel(activations: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether the kernels support these activations and this KV cache."""
    is_cpu = activations.device.type == "cpu" and activations.dtype == torch.float32
    return is_cpu and cache.dtype in (torch.float32, torch.bfloat16)


def array(cache: torch.Tensor) -> NDArray[np.float32] | NDArray[np.uint16]:
    """Return a tensor's memory as the kernels read it: float32, or the bits of bfloat16."""
    found: NDArray[np.float32] | NDArray[np.uint16]
    found = cache.view(torch.uint16).numpy() if cache.dtype == torch.bfloat16 else cache.numpy()
    return found


@parallel_kernel
def rms_norm(x_TM: Floats, weight_M: Floats, epsilon: float, out_TM: Any) -> None:
    """x / sqrt(mean(x^2) + epsilon) * weight, row by row; the output is float32 or bfloat16."""
    num_rows, width = x_TM.shape
    for row in numba.prange(num_rows):
        x, out = x_TM[row], out_TM[row]
        total = np.float32(0)
        for i in range(width):
            total += x[i] * x[i]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(epsilon))
        for i in range(width):
            write(out, i, x[i] * scale * weight_M[i])


@parallel_kernel
def silu_gate(gate_up: Any, out: Any) -> None:
    """silu(gate) * up, where a row of `gate_up` [T, 2 * I] is gate, then up; both are float32 or bfloat16."""
    num_rows, width = out.shape
    for row in numba.prange(num_rows):
        gate, up, result = gate_up[row, :width], gate_up[row, width:], out[row]
        for i in range(width):
            g = read(gate[i])
            write(result, i, g / (np.float32(1) + exp(-g)) * read(up[i]))


@parallel_kernel
def rotate_and_store(
    qkv: Any, cos_sin: tuple[Floats, Floats], slots: Any, cache: tuple[Bits, Bits], q_THD: Floats
) -> None:
    """Rotate queries and keys of `qkv` [T, H + 2 G, D]; queries go to `q_THD`, keys and values to their slots.

    cos and sin are [T, P], one for each pair of dimensions (i, i + P); dimensions from 2 P on are copied.
    """
    num_rows, num_heads, head_dim = q_THD.shape
    cos_TP, sin_TP = cos_sin
    k_SGD, v_SGD = cache
    num_kv_heads, half = k_SGD.shape[1], cos_TP.shape[1]
    for row in numba.prange(num_rows):
        cos, sin, slot = cos_TP[row], sin_TP[row], slots[row]
        for head in range(num_heads):
            x, out = qkv[row, head], q_THD[row, head]
            for i in range(half):
                a, b = read(x[i]), read(x[i + half])
                out[i], out[i + half] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]
            for i in range(2 * half, head_dim):
                out[i] = read(x[i])
        for group in range(num_kv_heads):
            x, k = qkv[row, num_heads + group], k_SGD[slot, group]
            for i in range(half):
                a, b = read(x[i]), read(x[i + half])
                write(k, i, a * cos[i] - b * sin[i])
                write(k, i + half, b * cos[i] + a * sin[i])
            for i in range(2 * half, head_dim):
                write(k, i, read(x[i]))
            x, v = qkv[row, num_heads + num_kv_heads + group], v_SGD[slot, group]
            for i in range(head_dim):
                write(v, i, read(x[i]))


@parallel_kernel
def gather_wide(cache: Any, slots: Any, out_KGD: Floats) -> None:
    """Copy rows of a cache [S, G, D] at these slots, as float32."""
    num_heads, head_dim = out_KGD.shape[1], out_KGD.shape[2]
    for row in numba.prange(len(slots)):
        found, out = cache[slots[row]], out_KGD[row]
        for head in range(num_heads):
            for i in range(head_dim):
                out[head, i] = read(found[head, i])


@inlined
def _rotate_row(  # noqa: PLR0913  inlined: there is no call
    sources: Any, source_slots: Any, targets: Any, target_slots: Any, rotation: Any, layer: Any, row: Any
) -> None:
    k_from, v_from = sources
    k_to, v_to = targets
    cos_LTP, sin_LTP = rotation
    num_heads, head_dim, half = k_from.shape[2], k_from.shape[3], cos_LTP.shape[2]
    own = layer if cos_LTP.shape[0] > 1 else 0
    cos, sin = cos_LTP[own, row], sin_LTP[own, row]
    for head in range(num_heads):
        x, out = k_from[layer, source_slots[row], head], k_to[layer, target_slots[row], head]
        for i in range(half):
            a, b = read(x[i]), read(x[i + half])
            write(out, i, a * cos[i] - b * sin[i])
            write(out, i + half, b * cos[i] + a * sin[i])
        for i in range(2 * half, head_dim):
            out[i] = x[i]
        v, copied = v_from[layer, source_slots[row], head], v_to[layer, target_slots[row], head]
        for i in range(head_dim):
            copied[i] = v[i]


@parallel_kernel
def rotate_into(
    sources: tuple[Bits, Bits], source_slots: Any, targets: tuple[Bits, Bits], target_slots: Any, rotation: Any
) -> None:
    """Copy rows of K and V of all layers, each [L, S, G, D], from slots to slots, and rotate the keys.

    cos and sin in `rotation` are [L, T, P], or [1, T, P] if all layers rotate alike.
    """
    num_rows = len(source_slots)
    for task in numba.prange(sources[0].shape[0] * num_rows):
        _rotate_row(sources, source_slots, targets, target_slots, rotation, task // num_rows, task % num_rows)


@kernel
def rotate_into_single_threaded(
    sources: tuple[Bits, Bits], source_slots: Any, targets: tuple[Bits, Bits], target_slots: Any, rotation: Any
) -> None:
    """As `rotate_into`, on one thread, while other threads run kernels: some thread pools of numba serve one only."""
    for layer in range(sources[0].shape[0]):
        for row in range(len(source_slots)):
            _rotate_row(sources, source_slots, targets, target_slots, rotation, layer, row)


def _attend(*arguments: Any) -> Any:
    """`attend_rows`, or `attend_blocks` if there are tasks for it, which reads bfloat16 only."""
    raise NotImplementedError  # implemented by the overload in compiled code


@overload(_attend)
def _compiled_attend(  # noqa: PLR0913  a kernel's call
    q: Any, cache: Any, contexts: Any, splits: Any, blocks: Any, limits: Any, out: Any, num_threads: Any
) -> Any:
    if cache[0].dtype != types.uint16:

        def attend_single(  # noqa: PLR0913
            q: Any, cache: Any, contexts: Any, splits: Any, blocks: Any, limits: Any, out: Any, num_threads: Any
        ) -> None:
            attend_rows(q, cache, contexts, splits, limits, out)

        return attend_single

    def attend_either(  # noqa: PLR0913
        q: Any, cache: Any, contexts: Any, splits: Any, blocks: Any, limits: Any, out: Any, num_threads: Any
    ) -> None:
        if len(blocks[1]) > 0:
            attend_blocks(q, cache, contexts, blocks[0], blocks[1], limits, out, num_threads)
        else:
            attend_rows(q, cache, contexts, splits, limits, out)

    return attend_either


@kernel
def decode_layer(  # noqa: PLR0913  a kernel is one function
    x_TM: Floats,
    norms: tuple[Floats, Floats],
    matrices: tuple[Bits, Bits, Bits, Bits],
    biases: tuple[Floats, Floats, Floats, Floats],
    rotation: tuple[Floats, Floats],
    slots_T: Any,
    cache: tuple[Bits, Bits],
    contexts: tuple[Any, Any],
    splits: tuple[Any, Any],
    blocks: tuple[Any, Any],
    limits: Any,
    epsilon: float,
    num_threads: int,
) -> None:
    """Compute a plain layer for few rows; `x_TM` is changed in place.

    Runs the other kernels without Python in between. Matrices and biases: qkv, output, gate and up, down; other
    arguments as for those kernels. `blocks` are `seen` and `tasks` of `attend_blocks`; without tasks every row is a
    sequence of its own, and `splits` are for `attend_rows`.
    """
    num_rows = x_TM.shape[0]
    num_kv_heads, head_dim = cache[0].shape[1], cache[0].shape[2]
    normed_TM = np.empty_like(x_TM)
    rms_norm(x_TM, norms[0], epsilon, normed_TM)
    qkv = product(normed_TM, matrices[0], biases[0], num_threads)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q_THD = np.empty((num_rows, num_heads, head_dim), np.float32)
    rotate_and_store(qkv.reshape((num_rows, num_heads + 2 * num_kv_heads, head_dim)), rotation, slots_T, cache, q_THD)
    out_THD = np.empty_like(q_THD)
    _attend(q_THD, cache, contexts, splits, blocks, limits, out_THD, num_threads)
    x_TM += product(out_THD.reshape((num_rows, num_heads * head_dim)), matrices[1], biases[1], num_threads)
    rms_norm(x_TM, norms[1], epsilon, normed_TM)
    gate_up = product(normed_TM, matrices[2], biases[2], num_threads)
    inner = np.empty((num_rows, gate_up.shape[1] // 2), np.float32)
    silu_gate(gate_up, inner)
    x_TM += product(inner, matrices[3], biases[3], num_threads)


def compile_all() -> None:
    """Compile the kernels of plain models and of searches. Takes about fifteen seconds without a cache."""
    num_threads, head_dim, slots = use_threads(), 2, np.zeros(1, np.int64)
    rotation, limits = (np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)), np.array([1, 0, 0], np.float32)
    contexts, splits = (slots, np.array([0, 1])), (np.zeros((1, 2), np.int64), np.array([0, 1]))
    x, q = np.ones((1, head_dim), np.float32), np.ones((1, 1, head_dim), np.float32)
    norm, bias, tall = x[0].copy(), np.empty(0, np.float32), np.ones((2 * head_dim, head_dim), np.float32)
    dtype: Any
    for dtype in (np.float32, np.uint16):
        rms_norm(x, norm, 1e-5, np.empty(x.shape, dtype))
        silu_gate(tall.astype(dtype), np.empty((2 * head_dim, head_dim // 2), dtype))
    for is_wide in (True, False):
        kv = np.zeros((1, 1, head_dim), np.float32 if is_wide else np.uint16)

        def matrix(height: int, is_wide: bool = is_wide) -> Any:
            if is_wide:
                return np.zeros((height, head_dim), np.float32), np.ones(height, np.float32)
            return np.zeros((height, head_dim // 2), np.uint32)

        out, weight = np.empty((1, 3), np.float32), matrix(3)
        if is_wide:
            linear_scaled(x, weight[0], weight[1], out, num_threads)
        else:
            linear_bfloat16(x, weight, out, num_threads)
        for dtype in {np.float32, kv.dtype.type}:
            rotate_and_store(np.ones((1, 3, head_dim), dtype), rotation, slots, (kv, kv.copy()), np.empty_like(q))
        gather_wide(kv, slots, np.empty_like(q))
        layers = (kv[None], kv[None].copy())
        for place in (rotate_into, rotate_into_single_threaded):
            place(layers, slots, layers, slots, (rotation[0][None], rotation[1][None]))
        attend_rows(q, (kv, kv.copy()), contexts, splits, limits, np.empty_like(q))
        matrices = (matrix(3 * head_dim), matrix(head_dim), matrix(2 * head_dim), matrix(head_dim))
        cache = (kv, kv.copy())
        biases = (bias, bias, bias, bias)
        blocks = ((slots, slots), np.zeros((0, 3), np.int64))
        arguments = (rotation, slots, cache, contexts, splits, blocks, limits, 1e-5, num_threads)
        decode_layer(x, (norm, norm), matrices, biases, *arguments)
    if HAS_DOT:
        pairs = np.zeros((2 * LANES, LANES), np.uint32)
        for dtype in (np.float32, np.uint16):
            out = np.empty((1, 2 * LANES), dtype)
            panel_products(np.zeros((1, 2 * LANES), np.uint16), pairs, out, False, num_threads)
        panel_gate(np.zeros((1, 2 * LANES), np.uint16), pairs, np.empty((1, LANES), np.uint16), num_threads)
    q, kv, places = np.zeros((1, 1, LANES), np.float32), np.zeros((1, 1, LANES), np.uint16), np.zeros(1, np.int64)
    seen, tasks = (places, places + 1), split_queries(np.array([[0, 1]]), 1, 1)
    attend_blocks(q, (kv, kv.copy()), contexts, seen, tasks, limits, q.copy(), num_threads)
    cpu_code_scan.compile_all()
