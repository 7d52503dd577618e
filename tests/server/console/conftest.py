"""A browser for all tests, and a page of a server with a fake Stillroom."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import chromium
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="package")  # a session-wide event loop would disturb other tests
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox does not work as root
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def url(stillroom: FakeStillroom) -> Iterator[str]:
    with serving(as_stillroom(stillroom)) as url:
        yield url


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A page that must log no errors and use no other server."""
    with browser.new_context(color_scheme="light", reduced_motion="reduce") as context:
        page = context.new_page()
        page.set_default_timeout(20_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        hosts: set[str] = set()
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        yield page
        expected = [
            text for text in complaints if "Failed to load resource" not in text
        ]  # tests check statuses themselves
        assert not expected
        assert len(hosts) <= 1, "the page must use no other server"
