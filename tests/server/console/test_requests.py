"""Past questions: routes and views, with a real answer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from stillroom.rag.stillroom import Stillroom
from tests.server.harness import serving
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.microworld


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the bundled model that was asked one question twice."""
    folder = tmp_path_factory.mktemp("console")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        for _ in range(2):
            stillroom.ask(QUESTION)
        with serving(stillroom) as url:
            yield url


def test_list_and_record_of_past_questions(real_url: str) -> None:
    listed = httpx.get(f"{real_url}/v1/requests", params={"limit": 1}).json()
    (latest,) = listed

    assert (latest["question"], latest["finish_reason"]) == (QUESTION, "stop")
    assert 0 < latest["num_cached_tokens"] < latest["num_prompt_tokens"]
    one = httpx.get(f"{real_url}/v1/requests/{latest['request_id']}").json()
    assert one["text"] == ANSWER and one["timing"] == latest["timing"]
    assert one["sources"][0]["text"].startswith("The mentor of Dola Kenric")
    timing = one["timing"]
    phases = [timing[f"{name}_seconds"] for name in ("retrieval", "queue", "load", "prefill")]
    assert sum(phases) == pytest.approx(timing["ttft_seconds"])


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("requests/req-unknown", 404, "request_not_found"),
        ("requests?limit=0", 400, "invalid_value"),
        ("requests?limit=9999", 400, "invalid_value"),
    ],
)
def test_unknown_requests_are_404(any_client: httpx.Client, path: str, status: int, code: str) -> None:
    response = any_client.get(f"/v1/{path}")

    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.browser
def test_timeline_and_prompt_parts_are_shown(page: "Page", real_url: str) -> None:
    page.goto(f"{real_url}/#requests")
    page.click("#requests .rows tbody tr:first-child a")
    page.wait_for_selector("#request .legend")

    names = page.locator("#request .legend dt").all_inner_texts()
    assert names == ["Search", "Queue", "Load", "Prefill", "Decode"]
    assert ANSWER in page.inner_text("#request .answer")
    parts = page.locator("#request .parts tbody tr")
    kept = [row.split("\t")[2:] for row in parts.all_inner_texts()]
    assert kept[0] == ["device", "kept from an earlier question"]
    assert kept[-1] == ["computed", "always computed"]
    assert "people.md" in parts.nth(1).inner_text()
    assert page.title() == "Request \u2013 Stillroom"


@pytest.mark.browser
def test_searches_of_a_question_in_several_hops_are_listed(page: "Page", real_url: str) -> None:
    hops = [
        {"question": "Who?", "sources": [{}], "answer": "Dola"},
        {"question": "Where?", "sources": [], "answer": None},
    ]

    def with_hops(route: "Route") -> None:
        response = route.fetch()
        route.fulfill(response=response, json=response.json() | {"hops": hops})

    page.route("**/v1/requests/req-*", with_hops)
    page.goto(f"{real_url}/#requests")
    page.click("#requests .rows tbody tr:first-child a")
    page.wait_for_selector("#request .hops")
    assert page.locator(".hops li").all_inner_texts() == ["Who? 1 new passage; so far: Dola", "Where? 0 new passages"]


@pytest.mark.browser
def test_map_shows_the_origin_of_each_passage(page: "Page", real_url: str) -> None:
    page.goto(f"{real_url}/#requests")
    page.wait_for_selector(".map tbody tr")

    rows = page.locator(".map tbody tr").all_inner_texts()
    cells = {row.split("\t")[0]: [cell.split() for cell in row.split("\t")[1:]] for row in rows}
    assert cells["people.md \u203a Dola Kenric"][:2] == [["\u00b7", "computed"], ["D", "device"]]
    saved = page.inner_text(".map tfoot").split("\t")
    assert saved[:2] == ["Saved", "\u2013"] and "ms" in saved[2]
    page.click(".map thead a >> nth=1")
    page.wait_for_selector("#request .legend")


@pytest.mark.browser
def test_recent_question_can_be_asked_again_and_live_figures_change(page: "Page", real_url: str) -> None:
    page.goto(real_url)
    page.click(f"#earlier-list >> text={QUESTION}")
    page.wait_for_selector("#account summary")
    assert page.inner_text("#answer").startswith(ANSWER)

    page.click("nav >> text=Live")
    page.wait_for_selector(".tile")
    tiles = {name: value for name, value, *_ in (t.split("\n\n") for t in page.locator(".tile").all_inner_texts())}
    assert tiles["REQUESTS"] == "0 running" and tiles["KV MEMORY"] == "0 %"
    assert float(tiles["KEPT"].removesuffix(" %")) > 10


@pytest.mark.browser
def test_live_figures_of_an_unreachable_server_are_marked_old(page: "Page", real_url: str) -> None:
    page.clock.install(time=0)
    page.clock.pause_at(1000)  # only this test advances the clock
    page.goto(f"{real_url}/#live")
    page.wait_for_selector(".tile")
    before = page.inner_text("#live")
    page.route("**/metrics", lambda route: route.abort())
    page.clock.run_for(2000)
    page.wait_for_selector("#live-error:visible")
    assert "cannot be reached" in page.inner_text("#live-error") and page.inner_text("#live") == before
    page.unroute("**/metrics")
    page.clock.run_for(2000)
    page.wait_for_selector("#live-error", state="hidden")


@pytest.mark.browser
def test_live_figures_cover_the_last_ten_minutes(page: "Page", real_url: str) -> None:
    page.clock.install(time=0)
    page.clock.pause_at(1000)  # only this test advances the clock
    page.goto(f"{real_url}/#live")
    page.wait_for_selector("text=measured from now on")
    page.clock.run_for(2000)
    page.wait_for_selector("text=no answers in 2 seconds")
    httpx.post(f"{real_url}/v1/chat/completions", json={"messages": [{"role": "user", "content": QUESTION}]})
    page.clock.run_for(2000)
    page.wait_for_selector("text=mean of 1 in 4 seconds")
    page.click("nav >> text=Requests")
    page.wait_for_selector("#requests tbody")
    page.clock.run_for(190_000)  # figures are read while another view is open
    page.click("nav >> text=Live")
    page.wait_for_selector("text=mean of 1 in 3 minutes")
    page.clock.fast_forward(700_000)  # as in a hidden tab
    page.wait_for_selector("text=measured from now on")


@pytest.mark.browser
def test_unknown_request_shows_an_error(page: "Page", real_url: str) -> None:
    page.goto(f"{real_url}/#requests/req-<b>unknown")
    page.wait_for_selector("#request [role=alert]")

    assert "'req-<b>unknown' is not among the questions remembered" in page.inner_text("#request")
