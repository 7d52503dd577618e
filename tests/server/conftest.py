"""Fixtures: a fake Stillroom behind a real server."""

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
    """A client of a shared server, for requests that change nothing."""
    with serving(as_stillroom(FakeStillroom())) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def client(stillroom: FakeStillroom) -> Iterator[httpx.Client]:
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client
