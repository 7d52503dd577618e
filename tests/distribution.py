"""Which tests `make test` runs first, and which stay in one worker of pytest-xdist.

A worker takes the next file when it has run one, so a long file must begin early: the other workers wait for the last.
"""

from typing import Any

import pytest

LONG = (
    "tests/training/",
    "tests/crash/test_kill.py",
    "tests/server/console/",
    "tests/models/test_oracle.py",
    "tests/cli/test_plan.py",
    "tests/server/test_openapi.py",
    "tests/models/",
    "tests/crash/",
    "tests/cli/",
    "tests/server/",
    "tests/engine/",
    "tests/rag/",
    "tests/retrieval/",
)
"""Files and folders of long tests, the longest first. All others are short."""
TOGETHER = ("tests/server/console/", "tests/training/", "tests/retrieval/store/postgresql/")
"""Folders whose tests share what is slow to start or to make: a browser, a data set, a PostgreSQL server."""


def order(items: list[pytest.Item]) -> None:
    """Put files of long tests first; the order within a file stays."""
    items.sort(key=lambda item: next((at for at, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG)))


def unit_of(nodeid: str) -> str:
    """Return the file of a test, or the folder whose tests one worker runs."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker whole files, in the order of the tests (`--dist loadfile --no-loadscope-reorder`)."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "loadfile":
        return None

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Scheduling(config, log)
