"""A fake room behind a real server."""

from collections.abc import Iterator

import httpx
import pytest

from tests.server.fakes import FakeRoom, as_room
from tests.server.harness import serving


@pytest.fixture
def room() -> FakeRoom:
    return FakeRoom()


@pytest.fixture(scope="session")
def any_client() -> Iterator[httpx.Client]:
    """For requests that leave nothing behind: one server for all of them."""
    with serving(as_room(FakeRoom())) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def client(room: FakeRoom) -> Iterator[httpx.Client]:
    with serving(as_room(room)) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client
