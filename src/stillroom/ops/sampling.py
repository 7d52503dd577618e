"""Picking the next token from logits. Randomness comes in as one uniform number per row, never from here."""

import math

import torch

# B rows (one per sequence that samples), V vocabulary


def sample(
    logits_BV: torch.Tensor, temperature_B: list[float], top_p_B: list[float], uniform_B: list[float]
) -> list[int]:
    """One token id per row.

    Temperature 0 takes the most likely token (the lowest id among equals). Otherwise the row is sharpened by 1 /
    temperature, cut to the nucleus (the fewest most likely tokens whose probabilities reach top_p), and the row's
    uniform number, in [0, 1), picks by inverse cumulative distribution, most likely token first.
    """
    token_ids: list[int] = logits_BV.argmax(dim=-1).tolist()
    rows = [row for row, temperature in enumerate(temperature_B) if temperature > 0]
    if not rows:
        return token_ids
    device = logits_BV.device
    temperature = torch.tensor([temperature_B[row] for row in rows], device=device)
    top_p = torch.tensor([top_p_B[row] for row in rows], device=device)
    uniform = torch.tensor([uniform_B[row] for row in rows], device=device, dtype=torch.float64)
    scaled = logits_BV[rows].float() / temperature[:, None]
    sorted_logits, order = scaled.sort(dim=-1, descending=True, stable=True)
    cumulative = sorted_logits.double().softmax(dim=-1).cumsum(dim=-1)
    num_kept = (cumulative < top_p[:, None].double()).sum(dim=-1).clamp(max=scaled.shape[-1] - 1)
    total = cumulative.gather(1, num_kept[:, None])
    picked = (cumulative <= uniform[:, None] * total).sum(dim=-1).minimum(num_kept)
    for row, token_id in zip(rows, order.gather(1, picked[:, None])[:, 0].tolist(), strict=True):
        token_ids[row] = token_id
    return token_ids


def sample_reference(logits: list[float], temperature: float, top_p: float, uniform: float) -> int:
    """The slow twin of one row of `sample`, in plain Python."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return order[0]
    top = logits[order[0]]
    weights = [math.exp((logits[token] - top) / temperature) for token in order]
    total = math.fsum(weights)
    nucleus, reached = 0.0, 0
    for weight in weights:
        nucleus += weight / total
        reached += 1
        if nucleus >= top_p:
            break
    target, cumulative = uniform * nucleus, 0.0
    for token, weight in zip(order[:reached], weights, strict=False):
        cumulative += weight / total
        if cumulative > target:
            return token
    return order[reached - 1]
