"""The table of a front's engines in the view Live, from metrics as a front sends them."""

from typing import TYPE_CHECKING

import pytest

from stillroom.backends.engine_readings import cluster_readings, engine_readings
from stillroom.cluster.front_engine import EngineCounts
from stillroom.cluster.front_engines import engine_name
from stillroom.cluster.wire_state import EngineState
from stillroom.core.kv import Tier
from stillroom.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from playwright.sync_api import Page

A, B = "http://10.0.0.11:9100", "http://10.0.0.12:9100"


def metrics_of_a_front() -> str:
    """Metrics of a front of two engines, the second of which was lost."""
    counts = {
        A: EngineCounts(
            num_predicted=2,
            predicted_seconds=0.5,
            first_token_seconds=0.75,
            num_runs=3,
            num_prompt_tokens=90,
            num_reused_tokens=60,
        ),
        B: EngineCounts(num_losses=1, num_runs=1),
    }
    report = EngineState(
        run="r",
        sequence=1,
        queue_seconds=1.5,
        num_outstanding=4,
        num_blocks=10,
        num_free_blocks=7,
        kept_bytes={Tier.DEVICE: 2048, Tier.DISK: 3 * 2**20},
    )
    metrics = Metrics()
    metrics.watch(lambda: engine_readings(counts, {A: True, B: False}))
    metrics.watch(lambda: cluster_readings(counts, {A: report}))
    return metrics.render().decode()


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
def test_engines_of_a_front_are_one_table(page: "Page", url: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.route("**/metrics", lambda route: route.fulfill(status=200, body=metrics_of_a_front()))
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{url}/#live")
    page.wait_for_selector("#live-engines tbody")
    rows = page.locator("#live-engines tbody tr")
    cells = [rows.nth(at).locator("th, td").all_text_contents() for at in range(rows.count())]
    assert cells == [
        [
            f"{A} {engine_name(A)}",
            "gets requests",
            "3",
            "4",
            "1.5 s",
            "67 %",
            "2 KiB device, 3 MiB disk",
            "30 %",
            "375 ms",
            "250 ms",
        ],
        [f"{B} {engine_name(B)}", "no requests; the log says why", "1", *["\u2013"] * 7],
    ]
    results = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
    assert not results.response["violations"], results.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
def test_server_without_engines_elsewhere_has_no_table(page: "Page", url: str) -> None:
    page.goto(f"{url}/#live")
    page.wait_for_selector(".tile")
    assert page.locator("#live-engines").inner_html() == ""
