"""A fake room behind a real server."""

from collections.abc import Iterator

import httpx
import pytest

from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving


@pytest.fixture
def stillroom() -> FakeStillroom:
    return FakeStillroom()


@pytest.fixture(scope="session")
def any_client() -> Iterator[httpx.Client]:
    """For requests that leave nothing behind: one server for all of them."""
    with serving(as_stillroom(FakeStillroom())) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def client(stillroom: FakeStillroom) -> Iterator[httpx.Client]:
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client
