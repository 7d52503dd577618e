"""The console in Chromium, with a fake Stillroom."""

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from stillroom.errors import QueueFullError
from stillroom.server.auth.key_ring import KeyRing, edit_keys, new_key
from stillroom.server.console.routes import SECURITY_HEADERS
from tests.server.console.scripted import wait_for_text
from tests.server.fakes import NUM_BLOCKS, FakeStillroom, as_stillroom, until
from tests.server.harness import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script><b>bold</b> &amp; {{7*7}}'

browser_test = pytest.mark.browser


def ask(page: "Page", question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def await_answer(page: "Page") -> None:
    page.wait_for_selector("#account summary")


def test_page_and_files_have_a_strict_content_policy(any_client: httpx.Client) -> None:
    page = any_client.get("/")
    names = [part.split('"')[0] for part in page.text.split('"console/')[1:]]

    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert {"console.css", "main.js", "theme.js", "icon.svg"} <= set(names)
    for response in (page, *(any_client.get(f"/console/{name}") for name in names)):
        assert response.status_code == 200
        assert {name: response.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "style=" not in page.text and "<script>" not in page.text and "//" not in page.text.split("<body>")[0]


def test_wheel_contains_every_file_of_the_page() -> None:
    root = Path(__file__).resolve().parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["stillroom"]
    files = [
        entry.relative_to(root / "src/stillroom") for entry in (root / "src/stillroom/server/console").rglob("*.*")
    ]
    page = [file for file in files if file.suffix not in (".py", ".pyc")]

    assert len(page) > 10
    assert all(any(file.match(pattern) for pattern in patterns) for file in page)


def test_unchanged_file_is_304(any_client: httpx.Client) -> None:
    etag = any_client.get("/console/main.js").headers["etag"]

    again = any_client.get("/console/main.js", headers={"If-None-Match": etag})

    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["index.html", "routes.py", "../routes.py", "..%2froutes.py", "%2e%2e/routes.py", ""])
def test_other_files_are_404(any_client: httpx.Client, name: str) -> None:
    assert any_client.get(f"/console/{name}").status_code == 404


@browser_test
def test_answer_streams_with_its_sources(page: "Page", url: str, stillroom: FakeStillroom) -> None:
    stillroom.gate.clear()
    page.goto(url)
    ask(page, "How do I rotate keys?")

    page.wait_for_selector(".source")  # shown before the first token
    assert page.get_attribute("#answer", "aria-busy") == "true" and page.inner_text("#answer") == ""
    stillroom.gate.set()
    await_answer(page)

    assert page.inner_text("#answer") == "How do I rotate keys?"
    assert page.get_attribute("#answer", "aria-busy") == "false"
    assert page.text_content("#spoken") == "How do I rotate keys?"
    source = page.inner_text(".source")
    assert "keys.md" in source and "Keys > Rotation" in source and "lines 3\u20134" in source and "score 1" in source
    assert not page.is_visible(".passage")
    page.click(".source summary")
    assert page.inner_text(".passage") == "Rotate keys with care.\nTwice a year."
    assert page.inner_text("#account summary") == "20 ms to the first word, 40 of 100 tokens reused"
    assert not page.is_visible("#account .legend")
    page.click("#account summary")
    account = page.inner_text("#account")
    assert "First token after 20 ms, then 1 ms per token; 50 ms in all for 5 tokens." in account
    assert "40 of 100 tokens (40 %) were kept from earlier questions." in account


@browser_test
def test_documents_and_answers_are_shown_as_text(page: "Page", url: str, stillroom: FakeStillroom) -> None:
    stillroom.texts = {f"docs/{HOSTILE.replace('/', '')}.md": HOSTILE}
    page.goto(url)
    ask(page, HOSTILE)
    await_answer(page)
    page.click(".source summary")

    assert page.inner_text(".passage") == page.inner_text("#answer") == HOSTILE
    assert page.inner_text(".source-name .open").startswith("<img src=x")
    assert page.title() == "Stillroom"
    assert page.locator("#desk :is(img, script, .passage b, .answer b)").count() == 0


@browser_test
def test_browser_runs_only_the_pages_own_scripts(browser: "Browser", url: str) -> None:
    page = browser.new_page()
    page.goto(url)
    blocked = page.evaluate(
        """async () => {
            const seen = [];
            document.addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
            const script = document.createElement("script");
            try { document.body.innerHTML = "<b>made of text</b>"; } catch (error) { seen.push(error.name); }
            const style = document.createElement("style");
            style.append("body { color: red }");
            document.head.append(style);
            await fetch("http://127.0.0.1:9/").catch(() => {});
            await new Promise((resolve) => setTimeout(resolve));
            return seen;
        }"""
    )

    page.close()
    assert {"TypeError", "require-trusted-types-for", "style-src-elem", "connect-src"} <= set(blocked)


@browser_test
def test_stop_button_frees_the_answers_blocks(page: "Page", url: str, stillroom: FakeStillroom) -> None:
    stillroom.gate.clear()
    page.goto(url)
    ask(page, "How do I rotate keys?")
    page.wait_for_selector(".source")
    assert stillroom.num_free_blocks < NUM_BLOCKS

    page.click("#stop")

    page.wait_for_selector("text=Stopped.")
    until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)
    assert not page.is_visible("#stop")


@browser_test
@pytest.mark.parametrize("is_begun", [False, True])
def test_error_message_of_the_server_is_shown(page: "Page", url: str, stillroom: FakeStillroom, is_begun: bool) -> None:
    if is_begun:
        stillroom.fails_at, stillroom.failure = "rotate", QueueFullError("<b>as many</b> wait as may", 3.0)
    else:
        stillroom.texts = {}
    page.goto(url)
    ask(page, "How do I rotate keys?")

    page.wait_for_selector("#ask-error:visible")
    message = "<b>as many</b> wait as may" if is_begun else "the knowledge base is empty"
    assert message in page.inner_text("#ask-error")
    assert page.inner_text("#answer") == ("How do I" if is_begun else "")


@browser_test
def test_form_options_reach_the_server(page: "Page", url: str, stillroom: FakeStillroom) -> None:
    page.goto(url)
    page.click("text=Options")
    page.fill("#top-k", "3")
    page.select_option("#mode", "sparse")
    page.fill("#max-tokens", "2")
    page.fill("#temperature", "0.75")
    ask(page, "How do I rotate keys?")
    page.wait_for_selector("text=The answer was cut at the longest allowed length.")

    _, options = stillroom.asked[-1]
    assert (options.top_k, options.mode, options.max_tokens, options.temperature) == (3, "sparse", 2, 0.75)


@browser_test
def test_invalid_option_opens_the_closed_options(page: "Page", url: str, stillroom: FakeStillroom) -> None:
    page.goto(url)
    page.click("text=Options")
    page.fill("#top-k", "200")
    page.click("text=Options")
    ask(page, "How do I rotate keys?")

    page.wait_for_selector("#top-k:visible")
    assert page.evaluate("document.activeElement.id") == "top-k" and not stillroom.asked


@browser_test
def test_conversation_continues_only_if_chosen(page: "Page", url: str) -> None:
    sent: list[list[dict[str, str]]] = []

    def note(request: "Request") -> None:
        if request.post_data:
            sent.append(json.loads(request.post_data)["messages"])

    page.on("request", note)
    page.goto(url)
    assert not page.is_visible("#follow")
    for number, question in enumerate(("first?", "second?", "third?")):
        ask(page, question)
        page.wait_for_selector("#ask-status >> text=Answer complete", state="attached")
        wait_for_text(page.locator("#answer"), question)
        await_answer(page)
        if number == 1:
            page.check("#follow")

    user, assistant = ({"role": role} for role in ("user", "assistant"))
    assert sent[1] == [user | {"content": "second?"}]
    assert sent[2] == [user | {"content": "second?"}, assistant | {"content": "second?"}, user | {"content": "third?"}]
    assert page.locator("#turns li").all_inner_texts() == ["second?\n\nsecond?"]


@browser_test
def test_all_functions_work_with_the_keyboard(page: "Page", url: str) -> None:
    page.goto(url)
    page.keyboard.type("keys?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    await_answer(page)
    page.goto(url)
    page.wait_for_selector("#thread-list li")
    order: list[str] = []
    while "question" not in order and len(order) < 20:  # from the question field around to itself
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.getAttribute('id') || document.activeElement.textContent"))

    first = order.index("Skip to the content")
    assert order[first:] == [
        "Skip to the content",
        *("Stillroom", "Ask", "Requests", "Documents", "Live"),
        *("theme-button", "Conversations", "New question", "thread-query", "keys?", "\u00d7", "threads-delete"),
        "question",
    ]
    assert order[:3] == ["limit-button", "Options", "ask-button"]


@browser_test
def test_theme_follows_the_system_until_chosen(page: "Page", url: str) -> None:
    page.goto(url)

    def paper() -> str:
        found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    light = paper()
    page.emulate_media(color_scheme="dark")
    dark = paper()
    page.click("#theme-button")
    chosen = paper()
    page.reload()

    assert light != dark and light == chosen == paper()
    assert page.get_attribute("#theme-button", "aria-label") == "Switch to the dark theme"


@browser_test
def test_key_is_requested_sent_and_dropped_with_the_tab(page: "Page", stillroom: FakeStillroom, tmp_path: Path) -> None:
    key, row = new_key("reader", "default")
    with edit_keys(tmp_path / "keys.json") as rows:
        rows["reader"] = row
    with serving(as_stillroom(stillroom), keys=KeyRing(tmp_path / "keys.json")) as url:
        page.goto(url)
        page.wait_for_selector("#key-dialog[open]")
        assert not page.is_visible("#key-error")
        page.fill("#key", "sk-stillroom-wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-dialog[open] [role=alert] >> text=there is no such API key")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#serving >> text=fake-model")
        ask(page, "How do I rotate keys?")
        await_answer(page)
        page.click("nav >> text=Live")
        page.wait_for_selector("text=Figures of the whole server need an operator's key.")

    assert page.evaluate("Object.keys(sessionStorage)") == ["stillroom-key"]
    assert page.evaluate("localStorage.length") == 1  # the conversation
    assert key not in page.evaluate("JSON.stringify(localStorage)") and key not in page.content()


@browser_test
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), pytest.param(1280, "light", marks=pytest.mark.slow)])
def test_page_is_accessible_and_does_not_scroll_sideways(page: "Page", url: str, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(url)
    ask(page, "How do I rotate keys? " + "x" * 200)
    await_answer(page)
    page.click("#account summary")
    page.click(".source summary")
    for view in ("ask", "requests", "documents", "live"):
        page.click(f'nav a[href="#{view}"]')
        page.wait_for_selector(f"#view-{view}:visible")
        page.wait_for_load_state("networkidle")
        results = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
        assert not results.response["violations"], results.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
