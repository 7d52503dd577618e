"""Parallel pieces of work: order, errors, and thread settings of other threads."""

import threading
from collections.abc import Iterator

import pytest
import torch

from stillroom.ops.side_by_side import side_by_side


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3, "the caller keeps its threads"
    torch.set_num_threads(before)


def test_every_piece_is_computed_on_one_thread_of_its_own() -> None:
    meeting = threading.Barrier(3, timeout=20)

    def compute(piece: int) -> tuple[int, int]:
        meeting.wait()  # passes only if three run at the same time
        return piece * piece, torch.get_num_threads()

    results = dict(side_by_side(compute, [2, 3, 4, 5, 6, 7]))
    assert results == {position: (piece**2, 1) for position, piece in enumerate([2, 3, 4, 5, 6, 7])}


def test_later_threads_have_the_usual_number_of_torch_threads() -> None:
    assert len(list(side_by_side(lambda piece: piece, [1, 2, 3, 4]))) == 4
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [3]


def test_an_error_is_raised_and_the_rest_is_dropped() -> None:
    computed: list[int] = []

    def compute(piece: int) -> int:
        if piece == 0:
            raise ValueError("no")
        computed.append(piece)
        return piece

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="no"):
        list(side_by_side(compute, range(1000)))
    assert len(computed) < 1000 and set(threading.enumerate()) <= before


def test_stopping_early_drops_the_rest() -> None:
    computed: list[int] = []
    permits = threading.Semaphore(0)

    def compute(piece: int) -> None:
        if piece > 0:
            assert permits.acquire(timeout=20)
        computed.append(piece)

    results = side_by_side(compute, range(1000))
    next(results)
    closing = threading.Thread(target=results.close)
    closing.start()
    while closing.is_alive():  # the pieces in progress may finish, one at a time
        permits.release()
        closing.join(0.01)
    assert len(computed) < 500


def test_the_caller_computes_nothing() -> None:
    """Otherwise it would get an OpenMP team."""
    caller = threading.get_ident()
    assert list(side_by_side(lambda _: threading.get_ident(), [])) == []
    ((position, computed_in),) = side_by_side(lambda _: threading.get_ident(), [5])
    assert position == 0 and computed_in != caller
