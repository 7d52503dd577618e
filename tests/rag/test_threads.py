"""The number of threads is that of the least time."""

import pytest

from stillroom.rag.threads import candidates, choose


def test_all_of_them_and_halves() -> None:
    assert [candidates(most) for most in (1, 2, 6, 16)] == [[1], [2, 1], [6, 3, 1], [16, 8, 4, 2, 1]]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({4: [1.0, 4.0], 2: [2.0, 8.0], 1: [4.0, 16.0]}, 4),
        ({4: [8.0, 9.0], 2: [2.0, 8.0], 1: [4.0, 16.0]}, 2),
        ({4: [100.0, 100.0], 2: [100.0, 90.0], 1: [1.0, 20.0]}, 1),
        ({4: [1.0, 1.0], 2: [0.99, 0.98], 1: [2.0, 2.0]}, 4),
        ({4: [0.0], 2: [0.0], 1: [0.0]}, 4),
    ],
)
def test_the_fastest_on_average_and_all_unless_another_is_clearly_so(
    times: dict[int, list[float]], chosen: int
) -> None:
    assert choose(list(times), times.__getitem__) == chosen
