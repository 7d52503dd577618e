"""The Documents view: uploads with failures, confirmed deletion, paging; with a real knowledge base."""

import io
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from stillroom.core.cancellation import Cancellation
from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.ingest import AddProgress
from stillroom.retrieval.uploads import UploadResult
from tests.server.harness import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def real_stillroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    with Stillroom.open(tmp_path_factory.mktemp("documents") / "kb") as stillroom:
        stillroom.upload(
            [("first.txt", io.BytesIO(b"Loads the embedder."))]
        )  # longer than a page waits, on a busy machine
        stillroom.discard("first.txt")
        yield stillroom


@pytest.fixture
def real_url(real_stillroom: Stillroom) -> Iterator[str]:
    with serving(real_stillroom) as url:
        yield f"{url}/#documents"


def file(name: str, content: str) -> dict[str, object]:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": content.encode()}


def test_upload_is_found_and_deleted_after_confirmation(page: "Page", real_url: str, real_stillroom: Stillroom) -> None:
    page.goto(real_url)
    page.wait_for_selector("#documents >> text=There are no documents yet.")
    files = [file("keys <b>.md", "# Keys\n\nRotate them twice a year.\n"), file("broken.jsonl", "{no record")]
    page.set_input_files("#files", files)  # type: ignore[arg-type]  # playwright has a type of its own for these

    page.wait_for_selector("#documents tbody tr")
    page.wait_for_selector("text=1 added, 1 failed.")
    assert page.inner_text("#upload-failures").startswith("broken.jsonl: ")
    assert page.inner_text("#documents tbody th a") == "keys <b>.md"
    assert page.inner_text("#documents-lead") == "1 document in this knowledge base."
    assert real_stillroom.search("rotate keys").results
    assert page.inner_text("#serving").endswith(", 1 document")

    page.click("#documents .act button")
    assert page.inner_text("#delete-text").startswith("keys <b>.md will no longer be found")
    page.keyboard.press("Enter")  # Enter keeps the document
    assert real_stillroom.num_documents == 1
    page.click("#documents .act button")
    page.click("#delete-form [value=delete]")
    page.wait_for_selector("text=keys <b>.md was deleted.")
    assert real_stillroom.num_documents == 0


def test_documents_are_searched_sorted_and_deleted_together(
    page: "Page", real_url: str, real_stillroom: Stillroom
) -> None:
    page.goto(real_url)
    files = [
        file("a.md", "# Wine\n\nOf red grapes, kept for years.\n"),
        file("b.txt", "Salt."),
        file("c.txt", "Sugar is."),
    ]
    page.set_input_files("#files", files)  # type: ignore[arg-type]
    page.wait_for_selector("text=3 added.")
    names = page.locator("#documents tbody th a")
    assert names.all_inner_texts() == ["a.md", "b.txt", "c.txt"]
    page.click("thead >> text=Size")
    assert names.all_inner_texts() == ["b.txt", "c.txt", "a.md"]
    page.click("thead >> text=Size")
    assert names.all_inner_texts() == ["a.md", "c.txt", "b.txt"]
    assert page.get_attribute("thead th:nth-child(5)", "aria-sort") == "descending"

    page.fill("#document-query", "WINE")
    assert names.all_inner_texts() == ["a.md"] and page.inner_text("#document-count") == "1 document found"
    page.fill("#document-query", ".txt")
    page.check("[aria-label='Select all documents shown']")
    page.fill("#document-query", "")
    page.click("#delete-chosen")
    assert page.inner_text("#delete-title").lower() == "delete 2 documents?"
    assert page.inner_text("#delete-text").startswith("b.txt, c.txt: they will no longer be found.")
    page.click("#delete-form [value=delete]")
    page.wait_for_selector("text=2 documents deleted.")
    assert names.all_inner_texts() == ["a.md"] and not page.is_visible("#delete-chosen")
    page.click("#documents .act button")
    page.click("#delete-form [value=delete]")
    page.wait_for_selector("text=a.md was deleted.")
    assert real_stillroom.num_documents == 0


def test_upload_shows_progress_and_can_be_cancelled(
    page: "Page", real_url: str, real_stillroom: Stillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = threading.Event()

    def upload(
        files: object, progress: Callable[[AddProgress], None], metadata: object, stop: Cancellation
    ) -> list[UploadResult]:
        progress(AddProgress(0, 2, 3, 4, 5, "a.txt"))
        is_read.wait(20)
        stop.check()
        raise AssertionError("the upload was not cancelled")

    monkeypatch.setattr(real_stillroom, "upload", upload)
    page.goto(real_url)
    page.set_input_files("#files", [file("a.txt", "Salt.")])  # type: ignore[arg-type]
    page.wait_for_selector("#documents-status >> text=Indexing, 75 %: 5 passages")
    assert page.eval_on_selector("#upload-progress", "bar => bar.value") == 0.75
    page.click("#upload-cancel")

    page.wait_for_selector("#upload-failures >> text=The upload was cancelled.")
    is_read.set()
    assert page.is_hidden("#upload-running") and page.is_enabled("#files")


@pytest.mark.slow
def test_document_list_loads_page_by_page(page: "Page", real_url: str) -> None:
    page.route("**/v1/documents?limit=1000*", lambda route: route.continue_(url=route.request.url.replace("1000", "2")))
    page.goto(real_url)
    page.set_input_files("#files", [file(f"{name}.txt", f"About {name}.") for name in "abcde"])  # type: ignore[arg-type]
    page.wait_for_selector("text=5 added.")

    assert page.locator("#documents tbody th a").all_inner_texts() == [f"{name}.txt" for name in "abcde"]
    assert not page.is_visible("text=Show more")
