"""One house, and one process to be killed, for all tests."""

from collections.abc import Iterator

import pytest

from tests.crash.house import House


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    found = House(tmp_path_factory.mktemp("house"))
    yield found
    found.close()
