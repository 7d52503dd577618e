"""Arms of `stillroom bench quality`: Cache-Craft 5.1's baselines, other token selectors, and Stillroom's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from stillroom.config.settings import TokenSelector
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions

FULL = "full prefill"
PREFIX = "prefix cache"
"""Exact reuse of an identical prompt."""
SET = "set cache"
"""Exact reuse of the same documents, reordered to match the cached order (Cache-Craft 5.1)."""
NONE = "no recompute"
"""Cache-Craft's FULL-CACHE: keys are rotated to their new positions, no token is recomputed."""
OURS: TokenSelector = "question"
SELECTORS: tuple[TokenSelector, ...] = get_args(TokenSelector)
RATIOS = (0.05, 0.15, 0.3, 0.6)


@dataclass(frozen=True, slots=True)
class QualityArm:
    name: str
    options: AnywhereOptions
    ends_after: int = 0
    """Ends recomputation in chunks out of focus once so many layers agree, as Cache-Craft's Algorithm 1 is written
    (`early_termination`); 0: never."""


def arm_name(selector: TokenSelector, ratio: float) -> str:
    """Return the arm name of a selector that recomputes `ratio` of all placed tokens."""
    return f"{selector} {100 * ratio:g}%"


def alpha_name(selector: TokenSelector, alpha: float) -> str:
    """Return the arm name of a selector whose budget is alpha times each document's CFO."""
    return f"{selector}, alpha {alpha:g}"


def ended_name(name: str) -> str:
    """Return the name of an arm that ends recomputation in chunks out of focus at layer L*."""
    return f"{name}, ended at L*"


def quality_arms(
    selectors: Sequence[TokenSelector],
    ratios: Sequence[float],
    alphas: Sequence[float] = (),
    *,
    focus_window: int = 0,
    has_unturned: bool = False,
) -> list[QualityArm]:
    """Return an arm without recomputation, one per selector and budget, and the optional arms.

    Args:
        focus_window: adds arms with Cache-Craft's Algorithm 1 over this many layers, for the selectors `context` and
            `question`: one that knows the focus before it recomputes, and one that ends at layer L*; 0 adds none.
        has_unturned: adds arms whose keys are not rotated (Cache-Craft Table 3).
    """
    arms = [QualityArm(NONE, AnywhereOptions(0.0, "first"))]
    arms += [QualityArm(arm_name(name, ratio), AnywhereOptions(ratio, name)) for ratio in ratios for name in selectors]
    for alpha in alphas:
        arms += [QualityArm(alpha_name(name, alpha), AnywhereOptions(1.0, name, alpha)) for name in selectors]
    if focus_window:
        focused: list[TokenSelector] = [name for name in ("context", OURS) if name in selectors]
        for name in focused:
            for ratio in ratios:
                options = AnywhereOptions(ratio, name, focus_window=focus_window)
                arms.append(QualityArm(f"{arm_name(name, ratio)}, focused", options))
                arms.append(QualityArm(ended_name(arm_name(name, ratio)), AnywhereOptions(ratio, name), focus_window))
            for alpha in alphas:
                options = AnywhereOptions(1.0, name, alpha, focus_window)
                arms.append(QualityArm(f"{alpha_name(name, alpha)}, focused", options))
                options = AnywhereOptions(1.0, name, alpha)
                arms.append(QualityArm(ended_name(alpha_name(name, alpha)), options, focus_window))
    if has_unturned:
        arms.append(QualityArm("keys not turned, no recompute", AnywhereOptions(0.0, "first", rotates_keys=False)))
        for ratio in ratios:
            options = AnywhereOptions(ratio, OURS, rotates_keys=False)
            arms.append(QualityArm(f"keys not turned, {arm_name(OURS, ratio)}", options))
    return arms
