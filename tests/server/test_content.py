"""`/v1/documents/{document}/content` and `/pages/{page}.png` with a real knowledge base and two tenants."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import Tenants
from tests.retrieval.loaders import make
from tests.server.harness import serving
from tests.server.test_keys import add, bearer

GUIDE = "# Guide\n\nRead <b>this</b> & that.\n\n## Keys\n\n<script>alert(1)</script>\n\n```\nif x:\n\treturn\n```\n"
LINES = "".join(f"line {number}\n" for number in range(1, 41))
PDF = make.pdf([[(20, "Report"), (10, "Rotate the keys.")], [(10, "Lock the vault.")]])
RECORDS = '{"_id": "x", "text": "First."}\n{"_id": "x/content", "text": "Second."}\n{"_id": "y/content", "text": "3"}\n'
AS_HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@dataclass(frozen=True)
class Server:
    client: httpx.Client
    """Of the tenant with the documents."""
    other: httpx.Client
    """Of a tenant without documents."""
    folder: Path
    ids: dict[str, str]
    """Public id of each file that was added from the folder."""

    def get(self, document: str, **query: Any) -> httpx.Response:
        return self.client.get(f"/v1/documents/{document.replace('#', '%23')}/content", params=query)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("content")
    folder = root / "docs"
    folder.mkdir()
    files: dict[str, str | bytes] = {
        "guide.md": GUIDE,
        "lines.txt": LINES,
        "gone.txt": "It was here.",
        "report.pdf": PDF,
        'd\u00e9j\u00e0 "vu".txt': "Again.",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    keys = {tenant: add(root / "keys.json", tenant, tenant) for tenant in ("default", "other")}
    with Stillroom.open(root / "kb") as stillroom:
        stillroom.add(folder)
        (folder / "gone.txt").unlink()
        tenants = Tenants(stillroom, root / "tenants")
        with serving(stillroom, tenants=tenants, keys=KeyRing(root / "keys.json")) as url:
            clients = [httpx.Client(base_url=url, headers=bearer(key), timeout=60) for key in keys.values()]
            upload = [("file", ("notes/a.jsonl", RECORDS.encode()))]
            assert clients[0].post("/v1/documents?wait=60", files=upload).status_code == 200
            listed = clients[0].get("/v1/documents").json()["data"]
            ids = {one["id"].rpartition("/")[2]: one["id"] for one in listed if one["name"] is None}
            yield Server(clients[0], clients[1], folder, ids)
            for client in clients:
                client.close()
        tenants.close()


class _Page(HTMLParser):
    """Collects tags, ids and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_of_a_file_with_headings_and_lines(server: Server) -> None:
    response = server.get(server.ids["guide.md"])

    found = response.json()
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert (found["document"], found["title"], found["source"], found["notice"]) == (
        server.ids["guide.md"], "Guide", "file", "",
    )  # fmt: skip
    assert (found["num_lines"], found["num_pages"], found["has_file"], found["has_page_images"]) == (11, 0, True, False)
    assert [(one["heading_path"], one["start_line"]) for one in found["paragraphs"]] == [([], 3), (["Keys"], 10)]
    assert found["paragraphs"][1]["text"] == "if x:\n\treturn"
    assert str(server.folder) not in response.text


def test_parts_by_lines_pages_and_paragraphs(server: Server) -> None:
    lines = server.get(server.ids["lines.txt"], start_line=10, end_line=12).json()
    page = server.get(server.ids["report.pdf"], page=2).json()
    second = server.get(server.ids["report.pdf"], offset=1, limit=1).json()

    assert [(one["text"], one["start_line"], one["end_line"]) for one in lines["paragraphs"]] == [
        ("line 10\nline 11\nline 12", 10, 12)
    ]
    assert lines["num_lines"] == 40
    assert (
        [one["text"] for one in page["paragraphs"]]
        == ["Lock the vault."]
        == [one["text"] for one in second["paragraphs"]]
    )
    assert (second["num_paragraphs"], second["has_more"]) == (2, False)
    assert server.get(server.ids["report.pdf"], limit=1).json()["has_more"]


@pytest.mark.parametrize("query", [{"start_line": 41}, {"start_line": 5, "end_line": 4}, {"page": 1}, {"page": -1}])
def test_places_that_do_not_exist_get_400(server: Server, query: dict[str, int]) -> None:
    response = server.get(server.ids["lines.txt"], **query)

    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")


def test_page_is_plain_html_with_an_anchor_for_each_line(server: Server) -> None:
    address = f"/v1/documents/{server.ids['lines.txt']}/content"
    response = server.client.get(address, headers=AS_HTML)
    page = _Page(response.text)

    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert page.ids == [f"L{number}" for number in range(1, 41)]
    policy = response.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none'; style-src 'sha256-")
    assert response.headers["x-content-type-options"] == "nosniff"
    marked = server.client.get(address, headers=AS_HTML, params={"highlight": "L10-L12"}).text
    assert re.findall("<mark>(.*?)</mark>", marked) == ["line 10", "line 11", "line 12"]
    assert 'id="L10-L12"' in marked


def test_markup_in_documents_is_only_text(server: Server) -> None:
    response = server.get(server.ids["guide.md"], format="html")
    page = _Page(response.text)

    assert set(page.tags) <= {"html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "span"}
    assert len(page.ids) == len(set(page.ids)) and {"L3", "L5", "L10", "L11"} <= set(page.ids)
    assert "if x:\n\treturn" in page.text and "Read this & that." in page.text


def test_pages_of_a_pdf_have_anchors_and_pictures(server: Server) -> None:
    page = _Page(server.get(server.ids["report.pdf"], format="html").text)
    picture = f"/v1/documents/{server.ids['report.pdf']}/pages/2.png"
    drawn = server.client.get(picture, params={"width": 200})

    assert page.ids == ["page-1", "page=1", "page-2", "page=2"]
    assert drawn.headers["content-type"] == "image/png" and int.from_bytes(drawn.content[16:20], "big") == 200
    cached = {"if-none-match": drawn.headers["etag"]}
    assert server.client.get(picture, params={"width": 200}, headers=cached).status_code == 304
    assert server.client.get(picture.replace("2.png", "3.png")).status_code == 404
    assert server.client.get(picture, params={"width": 9999}).status_code == 400
    assert server.client.get(f"/v1/documents/{server.ids['guide.md']}/pages/1.png").status_code == 404


def test_original_file_is_an_attachment_and_is_sent_in_ranges(server: Server) -> None:
    whole = server.get(server.ids["report.pdf"], download=1)
    part = server.client.get(
        f"/v1/documents/{server.ids['report.pdf']}/content?download=1", headers={"range": "bytes=5-9"}
    )
    other = server.get(server.ids['d\u00e9j\u00e0 "vu".txt'], download=1)

    for header in ("bytes=999999-", "bytes=9-5", "bytes=-0", "bytes=0-1,3-4", "lines=1-2", "bytes=-"):
        ignored = server.client.get(
            f"/v1/documents/{server.ids['report.pdf']}/content?download=1", headers={"range": header}
        )
        assert (ignored.status_code, ignored.content) == (200, PDF), header
    assert whole.content == PDF and (part.status_code, part.content) == (206, PDF[5:10])
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.headers["content-disposition"] == 'attachment; filename="report.pdf"'
    assert whole.headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert other.headers["content-disposition"] == "attachment; filename*=utf-8''d%C3%A9j%C3%A0%20%22vu%22.txt"


@pytest.mark.parametrize("query", [{}, {"format": "html"}, {"download": "1"}])
def test_known_version_is_not_sent_again(server: Server, query: dict[str, str]) -> None:
    address = f"/v1/documents/{server.ids['guide.md']}/content"
    first = server.client.get(address, params=query)
    head = server.client.head(address, params=query)
    again = server.client.get(address, params=query, headers={"if-none-match": first.headers["etag"]})

    assert (head.status_code, head.content) == (200, b"") and head.headers["etag"] == first.headers["etag"]
    assert head.headers["content-length"] == str(len(first.content))
    assert (again.status_code, again.content) == (304, b"")
    assert "Authorization" in first.headers["vary"] and "private" in first.headers["cache-control"]


def test_removed_file_is_read_from_the_index_and_cannot_be_downloaded(server: Server) -> None:
    found = server.get(server.ids["gone.txt"]).json()
    refused = server.get(server.ids["gone.txt"], download=1)

    assert (found["source"], found["has_file"]) == ("index", False)
    assert "no longer there" in found["notice"] and str(server.folder) not in found["notice"]
    assert [one["text"] for one in found["paragraphs"]] == ["It was here."]
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "file_gone")


def test_names_that_end_as_the_routes_are_documents_still(server: Server) -> None:
    first = server.get("notes/a.jsonl#x").json()
    described = server.client.get("/v1/documents/notes/a.jsonl%23y/content").json()

    assert [one["text"] for one in first["paragraphs"]] == ["First."]
    assert [one["text"] for one in described["chunks"]] == ["3"]
    assert server.get("notes/a.jsonl#y/content").json()["paragraphs"][0]["text"] == "3"
    assert server.get("notes/a.jsonl").json()["error"]["code"] == "several_documents"


@pytest.mark.parametrize(
    "document", ["../../etc/passwd", "/etc/passwd", "%2Fetc%2Fpasswd", "uploads/../corpus.sqlite3", "nowhere.md", "%00"]
)
def test_other_paths_are_unknown(server: Server, document: str) -> None:
    for query in ({}, {"download": "1"}):
        assert server.client.get(f"/v1/documents/{document}/content", params=query).status_code in (400, 404)


def test_documents_of_another_tenant_are_unknown(server: Server) -> None:
    for document in (server.ids["report.pdf"], "notes/a.jsonl%23x", str(server.folder / "guide.md")):
        for route in ("content", "content?download=1", "content?format=html", "pages/1.png"):
            response = server.other.get(f"/v1/documents/{document}/{route}")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "document_not_found")
    with httpx.Client(base_url=server.client.base_url) as without_key:
        assert without_key.get(f"/v1/documents/{server.ids['report.pdf']}/content").status_code == 401


def test_json_and_the_command_line_have_the_same_fields(server: Server) -> None:
    from stillroom.core.document_content import DocumentContent
    from stillroom.core.ids import DocumentId
    from stillroom.rag.as_json import content_as_json

    shown = content_as_json(DocumentContent(DocumentId("a"), "", (), "file"), ())

    assert set(json.loads(server.get(server.ids["guide.md"]).text)) - set(shown) == {
        "object",
        "num_paragraphs",
        "has_more",
    }
