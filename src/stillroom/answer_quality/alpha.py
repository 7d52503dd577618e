"""`stillroom calibrate --quality`: finds the least recomputation that keeps answer quality (Cache-Craft Eq. 13)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from stillroom.answer_quality.arms import FULL, QualityArm, alpha_name
from stillroom.answer_quality.asking import QualityOptions, QuestionOutcome, ask_all
from stillroom.backends.assembly import anywhere_options
from stillroom.kvcache.tree.chunk_scores import AlphaCell, choose_alpha

ALPHAS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class AlphaChoice:
    cells: tuple[AlphaCell, ...]
    """For each alpha, the mean share of placed tokens that is recomputed, and the quality."""
    alpha: float | None
    """Alpha with the least recomputation that reaches the desired quality; None if no alpha reaches it."""
    has_answers: bool
    """True: quality is the number of correct answers relative to a full prefill. False, where no accepted answers are
    known: quality is the share of answers that equal the full prefill's token for token."""


def find_alpha(
    options: QualityOptions, desired: float, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> AlphaChoice:
    """Answer every question with every alpha; all other reuse options stay as configured.

    Args:
        desired: quality relative to a full prefill.

    Raises:
        UsageError, ModelError, ConfigError: as `run_quality`.
    """
    names = {alpha: alpha_name(options.reuse.token_selector, alpha) for alpha in options.alphas}
    arms = [
        QualityArm(name, anywhere_options(replace(options.reuse, recompute_budget="cfo", alpha=alpha)))
        for alpha, name in names.items()
    ]
    outcomes = ask_all(options, options.load(), arms, has_exact=False, on_progress=on_progress)
    has_answers = fmean(one.is_right for one in outcomes[FULL]) > 0  # False for NaN
    cells = tuple(
        AlphaCell(
            alpha,
            fmean(one.recomputed for one in outcomes[name]),
            _quality(outcomes[name], outcomes[FULL], has_answers=has_answers),
        )
        for alpha, name in names.items()
    )
    return AlphaChoice(cells, choose_alpha(cells, desired), has_answers)


def _quality(outcomes: Sequence[QuestionOutcome], full: Sequence[QuestionOutcome], *, has_answers: bool) -> float:
    if not has_answers:
        return fmean(one.agrees for one in outcomes)
    return fmean(one.is_right for one in outcomes) / fmean(one.is_right for one in full)
