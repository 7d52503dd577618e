"""Answers in the console: Markdown, citations, the document beside the answer. The server's replies are scripted."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.server.console.scripted import PARAGRAPHS, citation, serve_answer
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

TEXT = "\U0001f511 Thirty of them are enough. [1] The rest\nis kept. Cheese is made of keys."
QUOTE = "30 of them are enough"
CITED = {
    "citations": [
        citation(TEXT, "\U0001f511 Thirty of them are enough.", 1, 30, QUOTE),
        citation(TEXT, "The rest\nis kept.", 2, 2, "about keys, and says", is_explicit=False, support="partly"),
        citation(TEXT, "Cheese is made of keys.", 0, 2, "", is_explicit=False, support="unsupported"),
    ],
    "highlight": [2, 8],
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(as_stillroom(FakeStillroom())) as url:
        yield url


def ask(page: "Page", url: str, question: str = "How many keys?") -> None:
    page.goto(url)
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("#account summary")


def test_answer_is_safe_markdown(page: "Page", url: str) -> None:
    text = (
        "# Title\n\nA **bold** and *slanted* word, `code_with_*stars*`,\n[a link](https://example.org/a) and "
        "[none](javascript:alert(1)).\n\n- one\n  continued\n  1. inner\n- two\n\n| a | b |\n|---|:-:|\n| 1 | `x` |\n\n"
        "> quoted\n\n```html\n<b>**raw**</b>\n```\nhttps://example.org/b. <i>text</i> snake_case_name 2 * 3 * 4 [9]"
    )
    serve_answer(page, text)
    ask(page, url)

    found = {
        name: page.locator(f"#answer {name}").all_inner_texts() for name in ("b", "i", "code", "li", "td", "th", "pre")
    }
    assert found["b"] == ["bold"] and found["i"] == ["slanted"]
    assert found["code"] == ["code_with_*stars*", "x", "<b>**raw**</b>"] and found["pre"] == ["<b>**raw**</b>"]
    assert found["li"] == ["one continued\ninner", "inner", "two"]
    assert (found["th"], found["td"]) == (["a", "b"], ["1", "x"])
    links = page.locator("#answer a").evaluate_all("all => all.map((one) => [one.textContent, one.href, one.rel])")
    assert [link[:2] for link in links] == [
        ["a link", "https://example.org/a"],
        ["https://example.org/b", "https://example.org/b"],
    ]
    assert all("noopener" in rel for _, _, rel in links)
    assert "[none](javascript:alert(1))" in page.inner_text("#answer")
    assert page.inner_text("#answer").endswith("<i>text</i> snake_case_name 2 * 3 * 4 [9]")


def test_cited_sources_come_first_and_confidence_is_shown(page: "Page", url: str) -> None:
    cited = citation("Only two are. [2]", "Only two are. [2]", 2, 2, "about keys")
    serve_answer(page, "Only two are. [2]", citations=[cited], confidence=0.874)
    ask(page, url)

    assert page.locator("#sources .position").all_inner_texts() == ["2", "1"]
    assert page.inner_text("#account summary") == "210 ms to the first word, confidence 87 %"


def test_citation_opens_the_document_at_the_quote(page: "Page", url: str) -> None:
    serve_answer(page, TEXT, **CITED)
    ask(page, url)

    cites = page.locator("#answer .cite")
    labels = cites.evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert labels == ["Source 1: keys.md, lines 91\u201392", "Source 2: keys.md, lines 7\u20138"]
    assert page.inner_text("#answer mark") == "Thirty"
    cites.first.click()
    page.wait_for_selector("#reading .cited")

    assert page.inner_text("#reading mark") == QUOTE and page.locator("#reading .cited").count() == 1
    assert page.evaluate("document.querySelector('#reading mark').checkVisibility()")
    box, pane = page.locator("#reading mark").bounding_box(), page.locator("#pane").bounding_box()
    assert box and pane and pane["y"] < box["y"] < pane["y"] + pane["height"]
    assert page.inner_text("#reading h2") == "The <keys> page"
    assert "Keys > Rotation, lines 91" in page.inner_text(".reading-head")
    assert cites.first.get_attribute("aria-current") == "true"
    page.click("[aria-label='Next citation']")
    page.wait_for_selector("#reading mark >> text=about keys, and says")  # across a line break of the file
    assert cites.nth(1).get_attribute("aria-current") == "true" and page.is_disabled("[aria-label='Next citation']")
    page.keyboard.press("Escape")
    assert page.is_hidden("#reading") and page.is_visible("#sources .source")
    assert page.evaluate("document.activeElement === document.querySelector('#answer .cite')")


def test_unsupported_sentences_are_marked_in_words(page: "Page", url: str) -> None:
    serve_answer(page, TEXT, **CITED)
    ask(page, url)

    assert page.inner_text("#answer") == (
        "\U0001f511 Thirty of them are enough.\u00a0[1] The rest is kept. partly supported[2] "
        "Cheese is made of keys. not supported by the documents"
    )
    forms = page.locator("#answer .sentence").evaluate_all(
        "all => all.map((one) => [one.textContent, getComputedStyle(one).textDecorationStyle])"
    )
    assert forms == [["The rest\nis kept.", "dotted"], ["Cheese is made of keys.", "wavy"]]


def test_abstention_offers_the_nearest_passages(page: "Page", url: str) -> None:
    serve_answer(page, "The documents do not say.", citations=[], warnings=["The index is <old>."])
    ask(page, url)

    assert page.inner_text("#sources-title").lower() == "nearest passages"
    assert page.locator("#sources .passage:visible").count() == 2
    assert page.inner_text("#account .notice") == "The index is <old>."


def test_document_covers_a_narrow_page_until_back(page: "Page", url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    serve_answer(page, TEXT, **CITED)
    ask(page, url)
    answer, sources = (page.locator(name).bounding_box() for name in ("#account", "#sources"))
    assert answer and sources and 0 < sources["y"] - answer["y"] - answer["height"] < 120
    page.locator("#answer .cite").first.click()
    page.wait_for_selector("#reading .cited")

    sheet, mark = page.locator("#pane").bounding_box(), page.locator("#reading mark").first.bounding_box()
    assert sheet == {"x": 0, "y": 0, "width": 390, "height": 800} and mark and 0 < mark["y"] < 800
    assert page.locator("#talk[inert]").count() == 1
    page.go_back()
    page.wait_for_selector("#reading", state="hidden")
    assert page.locator("#talk[inert]").count() == 0 and "#ask/" in page.url


def test_document_has_a_page_of_its_own(page: "Page", url: str) -> None:
    serve_answer(page, TEXT, **CITED)
    ask(page, url)
    page.locator("#answer .cite").first.click()
    with page.expect_popup() as opened:
        page.route("**/content", lambda route: route.continue_())
        page.context.route(
            "**/content", lambda route: route.fulfill(status=200, json={"title": "T", "paragraphs": PARAGRAPHS})
        )
        page.click("text=Open on its own page")
    own = opened.value
    own.wait_for_selector("#read .cited")

    assert "#read/files%2F517e2f0c9a1b%2Fkeys.md/L91-L92" in own.url
    assert own.locator("#read .cited").inner_text().startswith("Paragraph 30")
    assert own.locator("#read .passage-text").count() == len(PARAGRAPHS) and own.title() == "T \u2013 Stillroom"


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), pytest.param(1280, "light", marks=pytest.mark.slow)])
def test_answer_and_document_are_accessible(page: "Page", url: str, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 800})
    serve_answer(page, TEXT + "\n\n| a |\n|---|\n| 1 |", **CITED)
    ask(page, url)
    page.wait_for_selector("#thread-list li", state="attached")
    options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
    for selector in ("#answer .cite", "#limit-button"):
        results = Axe().run(page, options=options)
        assert not results.response["violations"], results.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator(selector).first.click()
        page.wait_for_load_state("networkidle")
        results = Axe().run(page, options=options)
        assert not results.response["violations"], results.generate_report()
        page.keyboard.press("Escape")
        page.wait_for_selector("#reading", state="hidden")
