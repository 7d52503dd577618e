"""Rankings of `stillroom bench looking`: scores of candidates by each way, and what a ranking is worth.

Which heads are read is chosen on one half of the questions and used on the other, so that no question is ranked by
heads that were chosen on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import ChunkId
from stillroom.retrieval.fusion import rrf
from stillroom_bench.quality.looking_scores import Floats, Look

# C candidates, F features: rows of the question (all, last token) x layers x heads, n tokens of one chunk

Bools = NDArray[np.bool_]

NUM_HEADS = 4
SEARCH = "search"
LIKELIHOOD, CERTAINTY = "likelihood of the question", "certainty of the answer"
ALL_HEADS, CALIBRATED = "attention of all heads", "attention of all heads, calibrated"
BEST_HEAD, BEST_HEADS = "attention of the best head", f"attention of the {NUM_HEADS} best heads"
BEST_CALIBRATED = f"{BEST_HEADS}, calibrated"


@dataclass(frozen=True, slots=True)
class View:
    """Scores from looking at the candidates of one question."""

    likelihood_C: Floats
    certainty_C: Floats
    masses_CF: Floats
    """Attention mass on the chunk."""
    calibrated_CF: Floats
    """The same less that of the content-free question."""
    icr_C: Floats
    """Mean of all heads over the question's tokens, calibrated token by token (In-Context Re-ranking)."""
    shape: tuple[int, ...]
    """Of the features: rows of the question, layers, heads."""

    @classmethod
    def of(cls, look: Look, content_free: Look) -> "View":
        masses_CF, free_CF = _masses(look), _masses(content_free)
        icr_C = np.array([_icr(one, free) for one, free in zip(look.attention, content_free.attention, strict=True)])
        return cls(
            look.likelihood_C, look.certainty_C, masses_CF, masses_CF - free_CF, icr_C, look.attention[0].shape[:3]
        )

    @property
    def all_heads_C(self) -> Floats:
        """Mean over layers and heads of the question's tokens."""
        mean: Floats = self.masses_CF[:, : self.masses_CF.shape[1] // 2].mean(1)
        return mean


def _masses(look: Look) -> Floats:
    return np.stack([one.sum(-1, dtype=np.float64).ravel() for one in look.attention])


def _icr(attention: NDArray[np.float32], content_free: NDArray[np.float32]) -> float:
    """Sum the calibrated attention of a chunk's tokens, without those 2 standard deviations below their mean."""
    tokens_n = (attention[0] - content_free[0]).mean((0, 1), dtype=np.float64)
    return float(tokens_n[tokens_n >= tokens_n.mean() - 2 * tokens_n.std()].sum())


def scores_of(views: Sequence[View], needed: Sequence[Bools], seed: int) -> tuple[dict[str, list[Floats]], list[str]]:
    """Return the scores of every question's candidates by each way of looking, and the heads that were chosen.

    Args:
        needed: [C] of each question.
    """
    scores = {
        LIKELIHOOD: [view.likelihood_C for view in views],
        CERTAINTY: [view.certainty_C for view in views],
        ALL_HEADS: [view.all_heads_C for view in views],
        CALIBRATED: [view.icr_C for view in views],
    }
    plain, calibrated = [view.masses_CF for view in views], [view.calibrated_CF for view in views]
    halves = np.random.default_rng(seed).permutation(len(views)) % 2
    chosen = {half: _order_of_heads(plain, needed, halves != half) for half in (0, 1)}
    chosen_calibrated = {half: _order_of_heads(calibrated, needed, halves != half) for half in (0, 1)}
    pairs = list(zip(plain, halves.tolist(), strict=True))
    scores[BEST_HEAD] = [masses_CF[:, chosen[half][0]] for masses_CF, half in pairs]
    scores[BEST_HEADS] = [_joined(masses_CF[:, chosen[half][:NUM_HEADS]]) for masses_CF, half in pairs]
    scores[BEST_CALIBRATED] = [
        _joined(masses_CF[:, chosen_calibrated[half][:NUM_HEADS]])
        for masses_CF, half in zip(calibrated, halves.tolist(), strict=True)
    ]
    names = [[_name_of(int(head), views[0].shape) for head in order[:NUM_HEADS]] for order in chosen.values()]
    return scores, [", ".join(one) for one in names]


def _name_of(feature: int, shape: tuple[int, ...]) -> str:
    """Layer and head, counted from 0, marked `last` if only the last token of the question is read."""
    row, layer, head = np.unravel_index(feature, shape)
    return f"{layer}.{head}{' last' if row else ''}"


def _order_of_heads(masses: Sequence[Floats], needed: Sequence[Bools], is_used: Bools) -> NDArray[np.int64]:
    """Return the features, first the one that puts needed chunks before others most often on these questions."""
    shares = [
        _share_in_order(masses_CF, needed_C)
        for masses_CF, needed_C, used in zip(masses, needed, is_used.tolist(), strict=True)
        if used and needed_C.any() and not needed_C.all()
    ]
    if not shares:
        return np.arange(masses[0].shape[1])
    order: NDArray[np.int64] = np.argsort(-np.mean(shares, axis=0), kind="stable")
    return order


def _share_in_order(masses_CF: Floats, needed_C: Bools) -> Floats:
    """Return for each feature the share of pairs of a needed and another chunk in the right order; ties are half."""
    needed, others = masses_CF[needed_C][:, None], masses_CF[~needed_C][None]
    share_F: Floats = ((needed > others) + 0.5 * (needed == others)).mean((0, 1))
    return share_F


def _joined(masses_CF: Floats) -> Floats:
    """Sum of features, each with mean 0 and deviation 1 over the candidates."""
    spread = masses_CF.std(0)
    joined: Floats = ((masses_CF - masses_CF.mean(0)) / np.where(spread > 0, spread, 1.0)).sum(1)
    return joined


def fused(*scores: Floats) -> Floats:
    """Fuse scores of the same candidates by the product's reciprocal rank fusion."""
    ranking = rrf([[(ChunkId(at), float(score)) for at, score in enumerate(one_C)] for one_C in scores])
    fused_C = np.empty(len(scores[0]))
    for at, score in ranking:
        fused_C[at] = score
    return fused_C


def best(scores_C: Floats, count: int) -> NDArray[np.int64]:
    """Return the indexes of the `count` best candidates; ties in the order of the candidates."""
    return np.argsort(-scores_C, kind="stable")[:count]


def measures(scores_C: Floats, needed_C: Bools, num_missing: int, count: int) -> Mapping[str, float]:
    """Return what a ranking is worth: whether it has all needed chunks among its `count` best, the recall there, and
    nDCG@10 with one grade."""
    is_needed = needed_C[best(scores_C, len(scores_C))]
    total = int(needed_C.sum()) + num_missing
    gains = 1 / np.log2(np.arange(2, 12))
    found = int(is_needed[:count].sum())
    return {
        "all_needed": float(found == total),
        "recall": found / total,
        "ndcg_at_10": float((gains[: len(is_needed)] * is_needed[:10]).sum() / gains[:total].sum()),
    }
