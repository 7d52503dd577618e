"""The crash fixture, shared by all tests of the session."""

from collections.abc import Iterator

import pytest

from tests.crash.fixture import CrashFixture


@pytest.fixture(scope="session")
def crash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashFixture]:
    found = CrashFixture(tmp_path_factory.mktemp("crash"))
    yield found
    found.close()
