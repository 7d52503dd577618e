"""`/docs`: every route and type of the OpenAPI document is on the page, which has no scripts and loads nothing."""

import re
import shlex
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from stillroom.config.settings import SearchConfig, ServerConfig, StillroomConfig
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.routes.api_page import api_page
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving
from tests.server.test_keys import add

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Collects ids, links and tags, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        found = dict(attrs)
        self.ids += [str(found["id"])] if "id" in found else []
        self.links += [str(found["href"])] if "href" in found else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and len(set(reader.ids)) == len(reader.ids)
    return reader


def test_page_has_every_route_and_type_with_links_that_lead_somewhere(any_client: httpx.Client) -> None:
    response = any_client.get("/docs")
    document = any_client.get("/openapi.json").json()
    found = read(response.text)

    for path, item in document["paths"].items():
        for method in item:
            assert response.text.count(f"<code>{method.upper()} {path}</code>") == 2, "in the list and as a heading"
    assert {f"type-{name}" for name in document["components"]["schemas"]} <= set(found.ids)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert [link for link in found.links if not link.startswith("#")] == ["openapi.json", "./"]


def test_page_loads_nothing(any_client: httpx.Client) -> None:
    response = any_client.get("/docs")
    assert response.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert not {"script", "img", "link", "iframe", "form"} & read(response.text).tags
    assert "light dark" in response.text and "style=" not in response.text


def test_examples_of_the_page_run() -> None:
    config = StillroomConfig(search=SearchConfig(reranker="a-cross-encoder"))
    with serving(as_stillroom(FakeStillroom(config=config))) as url:
        text = httpx.get(f"{url}/docs").text
        commands = [unescape(one) for one in re.findall(r"<pre><code>(.*?)</code></pre>", text, re.DOTALL)]
        sent = 0
        for words in map(shlex.split, commands):
            if "-d" not in words:
                continue
            address = next(word for word in words if word.startswith(url))
            content = words[words.index("-d") + 1]
            response = httpx.post(address, content=content, headers={"content-type": "application/json"}, timeout=120)
            assert response.status_code == 200, words
            sent += 1
    assert sent >= 14


def test_fields_have_types_limits_and_meanings(any_client: httpx.Client) -> None:
    text = any_client.get("/docs").text
    row = re.search(r"<tr><td><code>max_output_tokens</code></td>(.*?)</tr>", text)
    assert row and "integer" in row[1] and "or null" in row[1] and "at least -1" in row[1]
    assert "Responses are not stored." in text and "The first numbers of each vector" in text


def test_limits_of_the_type_alone_are_not_shown(any_client: httpx.Client) -> None:
    text = any_client.get("/docs").text
    assert "e+09" not in text and "2147483648" not in text


def test_headings_descend_one_level_at_a_time(any_client: httpx.Client) -> None:
    text = any_client.get("/docs").text
    levels = [int(one) for one in re.findall(r"<h([1-6])[ >]", text)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in pairwise(levels))
    assert '<a class="top" href="#top">' in text


@pytest.mark.parametrize("has_mcp", [True, False])
def test_page_names_mcp_where_the_server_has_it(has_mcp: bool) -> None:
    config = StillroomConfig(server=ServerConfig(mcp=has_mcp))
    with serving(as_stillroom(FakeStillroom(config=config))) as url:
        assert ("POST /mcp" in httpx.get(f"{url}/docs").text) == has_mcp


def test_texts_are_escaped() -> None:
    operation = {"tags": ["<b>"], "description": "<script>`<i>`", "responses": {}}
    page = api_page(
        {
            "info": {"title": "<u>", "description": "a < b"},
            "security": [{}],
            "tags": [{"name": "<b>", "description": "<s>"}],
            "paths": {"/<p>": {"get": operation}},
            "components": {"schemas": {"<q>": {"type": "string", "pattern": "<x>"}}},
        }
    )
    assert not {"script", "b", "u", "i", "s", "p>", "q", "x"} & read(page).tags


def test_page_needs_no_key_and_shows_how_to_send_one(tmp_path: Path) -> None:
    add(tmp_path / "keys.json", "anna")
    with serving(as_stillroom(FakeStillroom()), keys=KeyRing(tmp_path / "keys.json")) as url:
        response = httpx.get(f"{url}/docs")
        assert httpx.head(f"{url}/docs").status_code == 200
        assert httpx.get(f"{url}/openapi.json").status_code == 401
    assert "openapi.json" not in read(response.text).links and "which needs a key too" in response.text
    assert "$STILLROOM_KEY" in response.text and f"curl -s {url}/v1/search" in response.text
