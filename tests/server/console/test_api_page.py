"""`/docs` in a browser: accessible, and readable on a narrow screen."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_page_is_accessible_on_a_narrow_screen_and_leads_back_to_its_top(page: "Page", url: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{url}/docs#type-ResponsesRequest")
    results = Axe().run(page)
    assert not results.response["violations"], results.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    names = page.locator("td:first-child code").evaluate_all("names => names.map(one => one.getClientRects().length)")
    assert set(names) == {1}, "names of fields must not be broken"
    page.get_by_role("link", name="All routes").click()
    assert page.locator("h1").evaluate("heading => heading.getBoundingClientRect().top") >= 0
