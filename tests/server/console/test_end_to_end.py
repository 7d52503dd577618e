"""From a question to the passage in its document: the console with a real server, model and knowledge base."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from stillroom.rag.stillroom import Stillroom
from tests.server.harness import serving
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

SENTENCE = "Dola Kenric was employed by Yunder Bank."


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("reading")
    with Stillroom.open(folder / "kb", model="bundled:microworld") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        stillroom.ask(QUESTION)  # loads the model
        with serving(stillroom) as url:
            yield url


def test_answer_is_read_in_its_document(page: "Page", real_url: str) -> None:
    page.goto(real_url)
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    page.wait_for_selector("#account summary")
    assert page.inner_text("#answer").startswith(ANSWER)
    assert page.locator("#answer .cite, #answer .support").count() > 0  # the server's support check
    source = page.locator("#sources .source", has_text="Dola Kenric").first
    source.locator(".open").click()
    page.wait_for_selector("#reading mark")

    assert SENTENCE in page.inner_text("#reading .cited") and page.inner_text("#reading h2") == "People"
    with page.expect_download() as downloaded:
        page.click("#reading .links button")
    assert SENTENCE in downloaded.value.path().read_text()
    assert downloaded.value.suggested_filename == "people.md"


def test_document_of_the_list_opens_at_lines(page: "Page", real_url: str) -> None:
    page.goto(f"{real_url}/#documents")
    page.click("#documents tbody >> text=people.md")
    page.wait_for_selector("#read .passage-text")
    assert page.locator("#read .cited").count() == 0 and page.inner_text("#read-title") == "People"

    page.goto(f"{page.url}/L5-L5")
    page.wait_for_selector("#read .cited")
    assert SENTENCE in page.inner_text("#read .cited")
    page.goto(f"{real_url}/#read/no%2Fsuch.md")
    page.wait_for_selector("#read [role=alert]")
    assert "no/such.md" in page.inner_text("#read")
