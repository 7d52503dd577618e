"""`BreakEven` decides by measured gains and costs when staged search pays."""

import pytest

from stillroom.rag.break_even import BreakEven, Overlap, Stage


def measured(*, plain: float, staged: float, gained: float, num: int = 4) -> BreakEven:
    made = BreakEven()
    for _ in range(num):
        made.note_plain(plain)
        made.note_staged(Overlap(staged, gained), [Stage(True, gained)])
    return made


def test_plain_and_staged_search_alternate_until_both_are_measured() -> None:
    made = BreakEven()
    tried = []
    for _ in range(6):
        tried.append(made.decide())
        if tried[-1]:
            made.note_staged(Overlap(0.1, 0.0), [])
        else:
            made.note_plain(0.1)
    assert tried == [False, True, False, True, False, True]


@pytest.mark.parametrize(("gained", "pays"), [(0.03, True), (0.01, False)])
def test_stages_pay_only_if_the_gain_exceeds_their_cost(gained: float, pays: bool) -> None:
    made = measured(plain=0.1, staged=0.12, gained=gained)
    decisions = [made.decide() for _ in range(32)]
    assert decisions.count(pays) == 30, "one question in 16 is searched the other way"


def test_break_even_by_hand() -> None:
    made = measured(plain=0.1, staged=0.12, gained=0.04)
    # 40 % of a 100 ms search is gained and 20 ms are lost: a 50 ms search gains as much as it loses
    assert made.break_even_seconds == pytest.approx(0.05)
    assert BreakEven().break_even_seconds is None
    assert measured(plain=0.1, staged=0.1, gained=0.0).break_even_seconds is None


def test_stalls_by_wrong_prompts_are_a_cost() -> None:
    made = BreakEven()
    overlap = Overlap(0.1, 0.05)
    for _ in range(3):
        made.note_plain(0.1)
        made.note_staged(overlap, [])
    made.note_stall(overlap, 0.06)
    assert made.break_even_seconds == pytest.approx(0.12), "half of a 100 ms search is gained, a stall takes 60 ms"


def test_stage_that_is_seldom_right_is_skipped() -> None:
    made = BreakEven()
    assert made.is_promising(0) and made.is_promising(7), "nothing is measured yet"
    for _ in range(30):
        overlap = Overlap(0.1, 0.0)
        made.note_staged(overlap, [Stage(False, 0.09), Stage(True, 0.03)])
        made.note_stall(overlap, 0.01)
    assert [made.is_promising(stage) for stage in range(2)] == [False, True]


def test_old_measurements_are_forgotten() -> None:
    made = measured(plain=0.1, staged=0.3, gained=0.0, num=40)
    for _ in range(40):
        made.note_plain(0.1)
        made.note_staged(Overlap(0.1, 0.05), [Stage(True, 0.05)])
    assert made.break_even_seconds == 0, "the later searches cost nothing"
