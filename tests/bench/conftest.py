"""Fixtures of the benchmarks' tests."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from stillroom_bench.instrument import harness


@pytest.fixture(scope="session", autouse=True)
def garbage_is_left_alone() -> Iterator[None]:
    """A benchmark collects garbage before each run, so that none is measured. Tests measure nothing, and have the
    objects of thousands of tests."""
    with pytest.MonkeyPatch.context() as patch:
        nothing = dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: None)
        patch.setattr(harness, "gc", SimpleNamespace(**nothing))
        yield
