"""Conversations that the console keeps, and limits of a question to documents and tags."""

import json
from typing import TYPE_CHECKING

import pytest

from stillroom.retrieval.filters.language import parse_filter
from tests.server.console.scripted import serve_answer, wait_for_text
from tests.server.fakes import FakeStillroom

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

pytestmark = pytest.mark.browser


def ask(page: "Page", question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    wait_for_text(page.locator("#thread-list a").first, question)


def titles(page: "Page") -> list[str]:
    return page.locator("#thread-list a").all_inner_texts()


def test_conversations_are_restored_found_and_deleted(page: "Page", url: str, stillroom: FakeStillroom) -> None:
    page.goto(url)
    for question in ("Where are the keys?", "Who keeps the <b>wine</b>?"):
        ask(page, question)
    page.reload()
    page.wait_for_selector("#sources .source")
    assert page.inner_text("#asked") == page.inner_text("#answer") == "Who keeps the <b>wine</b>?"
    page.click("#thread-list >> text=Where are the keys?")
    wait_for_text(page.locator("#answer"), "Where are the keys?")
    assert titles(page) == ["Who keeps the <b>wine</b>?", "Where are the keys?"]
    assert len(stillroom.asked) == 2  # nothing was asked again

    page.fill("#thread-query", "keys ARE")
    assert titles(page) == ["Where are the keys?"]
    page.click("#thread-list .cross")
    page.keyboard.press("Enter")  # Enter keeps it
    page.click("#thread-list .cross")
    page.click("#delete-form [value=delete]")
    assert page.inner_text("#thread-none") == "No conversation has these words."
    page.wait_for_selector("#desk.empty")  # the open one was deleted
    page.fill("#thread-query", "")
    assert titles(page) == ["Who keeps the <b>wine</b>?"]
    page.click("#threads-delete")
    page.click("#delete-form [value=delete]")
    page.wait_for_selector("#threads", state="hidden")
    assert page.evaluate("localStorage.length") == 0


def test_another_key_has_other_conversations(page: "Page", url: str) -> None:
    page.goto(url)
    ask(page, "Where are the keys?")
    page.evaluate("sessionStorage.setItem('stillroom-key', 'sk-other')")
    page.goto(f"{url}/#ask")
    page.reload()
    page.wait_for_selector("#earlier-list, #desk.empty")

    assert titles(page) == []
    page.evaluate("sessionStorage.clear()")
    page.reload()
    page.wait_for_selector("#thread-list li")


def test_oldest_conversation_makes_room_when_space_is_used_up(page: "Page", url: str) -> None:
    page.goto(url)
    ask(page, "first?")
    page.evaluate(
        """() => {
            const set = Storage.prototype.setItem;
            Storage.prototype.setItem = function (name, value) {
                const others = Object.keys(this).filter((one) => one !== name);
                if (others.length >= 2) throw new DOMException("full", "QuotaExceededError");
                set.call(this, name, value);
            };
        }"""
    )
    ask(page, "second?")
    ask(page, "third?")

    assert titles(page) == ["third?", "second?"]
    page.reload()
    page.wait_for_selector("#thread-list li")
    assert titles(page) == ["third?", "second?"]


def test_question_is_limited_to_chosen_documents_and_tags(page: "Page", url: str) -> None:
    sent: list[str] = []

    def note(request: "Request") -> None:
        if request.post_data:
            sent.append(json.loads(request.post_data)["stillroom"].get("where"))

    document = {"status": "indexed", "num_chunks": 1, "num_bytes": 1, "added_at": 0.0}
    listed = [
        {
            "id": 'uploads/a"b.md',
            "name": 'a"b.md',
            "title": "Lease",
            "metadata": {"team": "legal", "year": 2021},
            **document,
        },
        {"id": "uploads/c.md", "name": "c.md", "title": "Wine", "metadata": {"team": "cellar", "or": True}, **document},
    ]
    page.route("**/v1/documents?**", lambda route: route.fulfill(json={"data": listed, "has_more": False}))
    serve_answer(page, "Yes.")
    page.on("request", note)
    page.goto(url)
    page.click("#limit-button")
    page.click("#limit-tags >> text=legal")
    page.click("#limit-tags >> text=2021")
    page.click("#limit-tags >> text=true")
    page.fill("#limit-query", "lease")
    assert page.inner_text("#limit-count") == "1 document"
    page.check("#limit-list input")
    page.click("#limit-dialog >> text=Done")
    page.wait_for_selector("#limits li:nth-child(4)")
    page.click("[aria-label='Remove the limit or: true']")
    page.click("text=Options")
    page.fill("#where", "year > 1 or x = y")
    ask(page, "first?")
    page.click("#limit-button")
    page.click("#limit-clear")
    page.click("#limit-dialog >> text=Done")
    page.fill("#where", "")
    ask(page, "second?")

    where = 'team in ("legal") and year in (2021) and path in ("uploads/a\\"b.md") and (year > 1 or x = y)'
    assert sent == [where, None] and parse_filter(where)
    page.click("#thread-list >> text=first?")
    page.wait_for_selector(f"#account >> text=Limited to {where}")
