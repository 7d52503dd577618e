"""Arithmetic of quantised weights: packed integers, small floating-point numbers, and scales of groups and blocks."""

import torch

# N outputs, M inputs, G groups of inputs

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of E2M1 with the sign bit clear (Open Compute Project, Microscaling Formats 1.0, section 5.3.3)."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned numbers of `bits` bits each, 1 to 8, that lie one behind the other in the last dimension.

    The first number is in the lowest bits of the first word; a number may continue in the next word.

    Returns:
        uint8, the last dimension longer by the number of numbers in a word.
    """
    octets = words.contiguous().view(torch.uint8)
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        return torch.stack([(octets >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
    eights = octets.reshape(*octets.shape[:-1], -1, bits).long()  # so many bytes hold eight numbers
    whole = sum(eights[..., place] << (8 * place) for place in range(bits))
    assert isinstance(whole, torch.Tensor)
    return torch.stack([(whole >> (bits * place)) & mask for place in range(8)], dim=-1).flatten(-2).to(torch.uint8)


def fp4_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of E2M1 codes of four bits."""
    return torch.tensor([*_FP4, *(-value for value in _FP4)])[codes.int()]


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; those of bytes are exponents of two with a bias of 127 (E8M0)."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.float() - 127)
    return scale.float()


def scaled(
    numbers_NM: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return (number - zero) * scale in float32.

    Args:
        scale: one number; [N] or [N, 1], one for each output; [N, G], one for each group of inputs of equal size; or
            [N / height, M / width], rounded up, one for each block.
        zero: as `scale`.
        block: height and width of a block.

    Raises:
        ValueError: the shapes do not fit together.
    """
    num_outputs, num_inputs = numbers_NM.shape
    numbers, scale = numbers_NM.float(), scale_values(scale)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.ndim == 1:
        scale = scale[:, None]
    if zero is not None:
        zero = zero.float().reshape(scale.shape)
    if block is not None and scale.shape == (-(-num_outputs // block[0]), -(-num_inputs // block[1])):
        whole = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return numbers * whole[:num_outputs, :num_inputs]
    if len(scale) not in (1, num_outputs) or num_inputs % scale.shape[1]:
        raise ValueError(f"scales of shape {list(scale.shape)} do not fit {num_outputs} x {num_inputs} weights")
    groups_NGI = numbers.reshape(num_outputs, scale.shape[1], -1)
    if zero is not None:
        groups_NGI = groups_NGI - zero[..., None]
    return (groups_NGI * scale[..., None]).flatten(1)
