"""`stillroom calibrate --quality`: how much to compute again so that answers stay good enough (Cache-Craft Eq. 13)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from stillroom.answer_quality.arms import FULL, QualityArm, alpha_name
from stillroom.answer_quality.asking import QualityScope, QuestionOutcome, ask_all
from stillroom.backends.assembly import anywhere_options
from stillroom.kvcache.tree.chunk_scores import AlphaCell, choose_alpha

ALPHAS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class AlphaChoice:
    cells: tuple[AlphaCell, ...]
    """For each alpha, the mean share of placed tokens computed again, and the quality."""
    alpha: float | None
    """The one that computes least again among those that are good enough; None if none is."""
    has_answers: bool
    """Quality is right answers as a share of a full prefill's; without known answers, the share of answers that are
    the full prefill's, token for token."""


def find_alpha(
    scope: QualityScope, desired: float, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> AlphaChoice:
    """Ask every question with every alpha of the scope, with all other options of its `reuse`.

    Args:
        desired: quality, as a share of a full prefill's.

    Raises:
        UsageError, ModelError, ConfigError: as `run_quality`.
    """
    names = {alpha: alpha_name(scope.reuse.token_selector, alpha) for alpha in scope.alphas}
    arms = [
        QualityArm(name, anywhere_options(replace(scope.reuse, recompute_budget="cfo", alpha=alpha)))
        for alpha, name in names.items()
    ]
    outcomes = ask_all(scope, scope.load(), arms, has_exact=False, on_progress=on_progress)
    has_answers = fmean(one.is_right for one in outcomes[FULL]) > 0  # false for not a number
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
