"""When an engine that ended is started again."""

from stillroom.supervision.restarts import MAX_ENDS, MAX_PAUSE_SECONDS, WINDOW_SECONDS, Restarts


def test_pauses_double_and_a_row_of_ends_is_given_up() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_after_end(10.0 * number) for number in range(MAX_ENDS + 1)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_rare_ends_are_forgiven() -> None:
    restarts = Restarts()
    assert {restarts.pause_after_end(WINDOW_SECONDS * number) for number in range(20)} == {1.0}


def test_slow_row_of_ends_is_neither_given_up_nor_hurried() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_after_end(WINDOW_SECONDS / MAX_ENDS * number) for number in range(20)]
    assert pauses[-1] == 16.0 <= MAX_PAUSE_SECONDS
