"""Samples the next token from logits, with one uniform random number per row from the caller.

Order, as in vLLM and transformers: bias, repetition penalty, presence and frequency penalty; forbidden tokens and
tokens that break the request's constraint; temperature, top-k, top-p, min-p; one draw by inverse cumulative
distribution. Log probabilities are those of the original logits.

Many requests share a call, so no parameters of one row may fail it: bias and penalties are clamped to float32.
Precondition: the logits are finite; `non_finite_rows` finds the rows that are not.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from stillroom.core.batch import SampleSpec, TokenLogprobs

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_FINITE = torch.finfo(torch.float32)

NUM_TRIED = 1024
"""Most likely tokens that a draw sorts before it sorts the vocabulary."""

# B rows (one per request that samples), R of them drawn (not greedy), V vocabulary,
# C likeliest tokens, W words of I = 32 bits


def non_finite_rows(logits_BV: torch.Tensor) -> list[int]:
    """Return rows with NaN or an infinity, in one pass: a float32 sum of logits is finite exactly if its terms are."""
    is_finite_B = logits_BV.sum(-1, dtype=torch.float32).isfinite()
    return [row for row, is_finite in enumerate(is_finite_B.tolist()) if not is_finite]


def sample(logits_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Return one token id per row.

    Temperature 0 picks the most likely token (the lowest id in a tie). Otherwise logits are divided by the temperature,
    tokens sorted by probability (ties by id) and cut: to the first `top_k`; to the fewest of these whose probabilities
    reach `top_p` of their sum; to those at least `min_p` times as likely as the first. The row's uniform number picks
    among them by inverse cumulative distribution, in the order of their ids.
    """
    logits_BV = _adjusted(logits_BV, specs)
    token_ids: list[int] = logits_BV.argmax(dim=-1).tolist()
    rows = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
    if rows:
        drawn = _draw(logits_BV[rows].float(), [specs[row] for row in rows])
        for row, token_id in zip(rows, drawn, strict=True):
            token_ids[row] = token_id
    return token_ids


def logprobs(logits_BV: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row the log probability of its token, and its `num_top` most likely tokens."""
    logprobs_BV = logits_BV.float().log_softmax(dim=-1)
    picked = logprobs_BV.gather(1, torch.tensor(token_ids, device=logits_BV.device)[:, None])[:, 0].tolist()
    values, order = logprobs_BV.topk(min(max(num_top), logits_BV.shape[-1]), dim=-1)
    rows = zip(picked, num_top, order.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:count], tops[:count], strict=True))) for logprob, count, ids, tops in rows
    ]


def _adjusted(logits_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Return the logits after bias, penalties and bans; the same tensor if no row has any."""
    biases, repeated, answered, forbidden = _Edits(), _Edits(), _Edits(), _Edits()
    for row, spec in enumerate(specs):
        params = spec.params
        if params.logit_bias:
            biases.add(row, list(params.logit_bias), list(params.logit_bias.values()))
        if params.repetition_penalty != 1.0:
            repeated.add(row, np.unique(spec.token_ids), max(params.repetition_penalty, _FINITE.tiny))
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            tokens, counts = np.unique(spec.token_ids[spec.num_prompt_tokens :], return_counts=True)
            answered.add(row, tokens, params.presence_penalty + params.frequency_penalty * counts)
        if spec.forbidden:
            forbidden.add(row, list(spec.forbidden), 0.0)
    constrained = [row for row, spec in enumerate(specs) if spec.constraint is not None]
    if not (biases or repeated or answered or forbidden or constrained):
        return logits_BV
    adjusted_BV = logits_BV.to(torch.float32, copy=True)
    biases.apply(adjusted_BV, torch.add)
    repeated.apply(adjusted_BV, lambda logit, penalty: torch.where(logit > 0, logit / penalty, logit * penalty))
    answered.apply(adjusted_BV, torch.sub)
    adjusted_BV.clamp_(_FINITE.min, _FINITE.max)
    forbidden.apply(adjusted_BV, lambda logit, _: torch.full_like(logit, -math.inf))
    if constrained:
        adjusted_BV[constrained] = _constrained(adjusted_BV[constrained], [specs[row] for row in constrained])
    return adjusted_BV


def _constrained(logits_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    masks = [spec.constraint.allowed() for spec in specs if spec.constraint is not None]
    words_BW = torch.from_numpy(np.stack(masks)).to(logits_BV.device)
    bits_BWI = (words_BW[:, :, None] >> torch.arange(32, device=logits_BV.device, dtype=torch.int32)) & 1
    return logits_BV.masked_fill(bits_BWI.flatten(1)[:, : logits_BV.shape[-1]] == 0, -math.inf)


class _Edits:
    """Changes of one kind at (row, token) pairs, collected over the batch and applied at once."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, tokens: ArrayLike, values: ArrayLike) -> None:
        """Add tokens of a row; each may be given once."""
        self._tokens.append(np.asarray(tokens, dtype=np.int64))
        size = len(self._tokens[-1])
        self._rows.append(np.full(size, row, dtype=np.int64))
        finite = np.clip(np.asarray(values, dtype=np.float64), _FINITE.min, _FINITE.max).astype(np.float32)
        self._values.append(np.broadcast_to(finite, size))

    def apply(self, logits_BV: torch.Tensor, change: Change) -> None:
        if self:
            rows, tokens, values = (
                torch.from_numpy(np.concatenate(parts)).to(logits_BV.device)
                for parts in (self._rows, self._tokens, self._values)
            )
            logits_BV[rows, tokens] = change(logits_BV[rows, tokens], values)


def _draw(logits_RV: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Draw a token for each row; overwrites the logits.

    Sorting a whole vocabulary takes longer than a layer of the model, so only the most likely tokens are sorted first.
    A row whose cut they do not decide is sorted as a whole.
    """
    temperatures_R1 = _column([min(spec.params.temperature, _FINITE.max) for spec in specs], logits_RV)
    # the maximum becomes 0, so that no quotient overflows
    scaled_RV = logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(temperatures_R1)
    size = scaled_RV.shape[-1]
    token_ids = [0] * len(specs)

    def pick(rows: list[int], num_tried: int) -> list[int]:
        """Draw for these rows; return those that need more tokens."""
        if not rows:
            return []
        picked, is_decided = _pick(scaled_RV[rows], num_tried, [specs[row] for row in rows])
        for row, token_id in zip(rows, picked, strict=True):
            token_ids[row] = token_id
        return [row for row, decided in zip(rows, is_decided, strict=True) if not decided]

    uncut = [row for row, spec in enumerate(specs) if _is_uncut(spec)]
    if uncut:
        picked = _inverse_cumulative(scaled_RV[uncut].double().exp(), [specs[row] for row in uncut])
        for row, token_id in zip(uncut, picked[:, 0].tolist(), strict=True):
            token_ids[row] = token_id
    cut = [row for row, spec in enumerate(specs) if not _is_uncut(spec)]
    pick(pick(cut, NUM_TRIED if size > 4 * NUM_TRIED else size), size)
    return token_ids


def _is_uncut(spec: SampleSpec) -> bool:
    return spec.params.top_k == 0 and spec.params.top_p == 1.0 and spec.params.min_p == 0.0


def _pick(scaled_RV: torch.Tensor, num_tried: int, specs: Sequence[SampleSpec]) -> tuple[list[int], list[bool]]:
    """Draw a token for each row among its C = `num_tried` most likely tokens, and say whether the draw is final."""
    size = scaled_RV.shape[-1]
    sorted_RC, order_RC = _likeliest(scaled_RV, num_tried)
    weights_RC = (sorted_RC - sorted_RC[:, :1]).double().exp()  # the first weighs 1
    cumulative_RC = weights_RC.cumsum(dim=-1)
    all_R1 = (
        cumulative_RC[:, -1:]
        if num_tried == size
        else (scaled_RV - sorted_RC[:, :1]).exp().sum(-1, True, dtype=torch.double)
    )

    top_k = _column([min(spec.params.top_k or size, size) for spec in specs], cumulative_RC).long()
    top_p = _column([spec.params.top_p for spec in specs], cumulative_RC)
    min_p = _column([spec.params.min_p for spec in specs], cumulative_RC)
    top_k_mass = torch.where(top_k == size, all_R1, cumulative_RC.gather(1, top_k.clamp(max=num_tried) - 1))
    is_mass_known = (top_k <= num_tried) | (top_k == size)  # else the sum that `top_p` is a share of is unknown
    nucleus = (cumulative_RC < top_p * top_k_mass).sum(-1, True) + 1
    likely = (weights_RC >= min_p).sum(-1, True)
    num_kept = nucleus.minimum(top_k).minimum(likely).clamp(max=num_tried)
    num_kept = num_kept.minimum((weights_RC > 0).sum(-1, True)).clamp(min=1)
    is_decided = is_mass_known & ((nucleus <= num_tried) | (likely < num_tried)) | (num_tried == size)
    if num_tried < size:  # a tie with the last of the sorted tokens may have a lower id that was left out
        is_decided &= sorted_RC.gather(1, num_kept - 1) > sorted_RC[:, -1:]

    weights_RC[torch.arange(num_tried, device=num_kept.device) >= num_kept] = 0.0
    ids_RC, by_id = order_RC.sort(dim=-1)
    picked = _inverse_cumulative(weights_RC.gather(1, by_id), specs)
    return ids_RC.gather(1, picked)[:, 0].tolist(), is_decided[:, 0].tolist()


def _inverse_cumulative(weights_RN: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Return the index that each row's uniform number picks, [R, 1].

    Args:
        weights_RN: float64, in the order of the tokens' ids: in the order of probability, a change of the last digits
            of two logits swaps their tokens.
    """
    cumulative_RN = weights_RN.cumsum(dim=-1)
    target = _column([spec.uniform for spec in specs], cumulative_RN) * cumulative_RN[:, -1:]
    last = (cumulative_RN < cumulative_RN[:, -1:]).sum(-1, True)  # the last token with a weight
    return (cumulative_RN <= target).sum(-1, True).minimum(last)


def _likeliest(scaled_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest logits of each row in descending order, and their tokens; ties by id."""
    if count == scaled_RV.shape[-1]:
        return scaled_RV.sort(dim=-1, descending=True, stable=True)
    token_ids, _ = scaled_RV.topk(count, dim=-1).indices.sort(dim=-1)
    values, order = scaled_RV.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype)[:, None]


def sample_reference(logits: Sequence[float], spec: SampleSpec) -> int:
    """Reference of one row of `sample`, in plain Python."""
    params = spec.params
    scores = _adjusted_reference(logits, spec)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.is_greedy:
        return order[0]
    top = scores[order[0]]
    weights = [math.exp((scores[token] - top) / params.temperature) for token in order][: params.top_k or len(order)]
    total, nucleus, kept = math.fsum(weights), 0.0, list[float]()
    for weight in weights:
        nucleus += weight
        kept.append(weight)
        if nucleus >= params.top_p * total:
            break
    kept = [weight for weight in kept if weight >= params.min_p]  # the first weighs 1
    by_id = sorted(zip(order, kept, strict=False))
    target, cumulative = spec.uniform * math.fsum(kept), 0.0
    for token, weight in by_id:
        cumulative += weight
        if cumulative > target:
            return token
    return max(token for token, weight in by_id if weight > 0)


def _adjusted_reference(logits: Sequence[float], spec: SampleSpec) -> list[float]:
    params, scores = spec.params, list(logits)
    known = spec.token_ids.tolist()
    answer = Counter(known[spec.num_prompt_tokens :])
    for token in range(len(scores)):
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in known:
            penalty = params.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        scores[token] -= params.presence_penalty * (token in answer) + params.frequency_penalty * answer[token]
        if token in spec.forbidden:
            scores[token] = -math.inf
        if spec.constraint is not None and not int(spec.constraint.allowed()[token // 32]) >> (token % 32) & 1:
            scores[token] = -math.inf
    return scores
