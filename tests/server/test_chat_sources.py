"""Sources and citations of `/v1/chat/completions`: in the extension, as annotations, and as events of open-webui."""

from dataclasses import replace

import httpx
import pytest

from stillroom.config.settings import ServerConfig
from stillroom.core.ids import public_id
from stillroom.rag.answer import Citation, Source, Support
from stillroom.server.routes.chat import events_link_to
from stillroom.server.routes.source_events import source_event
from stillroom.server.schemas.requests import ChatCompletionRequest
from tests.server.fakes import FakeStillroom
from tests.server.harness import QUESTION, events


def _cited(source: int, support: Support, lines: tuple[int, int], pages: tuple[int, int]) -> Citation:
    document = "/srv/hand book/keys.md" if source else ""
    return Citation(source, document, "c1", "Keys", *lines, *pages, "Keys", 0, 4, 0, 6, True, support)


def test_citations_are_in_the_extension_and_annotations_in_openais_form(
    client: httpx.Client, stillroom: FakeStillroom
) -> None:
    stillroom.citations = (
        _cited(1, Support.SUPPORTED, (10, 14), (0, 0)),
        _cited(1, Support.PARTLY, (0, 0), (3, 4)),
        _cited(1, Support.UNSUPPORTED, (3, 3), (0, 0)),
        _cited(0, Support.UNSUPPORTED, (0, 0), (0, 0)),
    )
    body = client.post("/v1/chat/completions", json=QUESTION).json()

    shown = public_id("/srv/hand book/keys.md")
    assert [one["document"] for one in body["stillroom"]["citations"]] == [shown, shown, shown, ""]
    path = f"/v1/documents/{shown.replace(' ', '%20')}/content"
    assert body["choices"][0]["message"]["annotations"] == [
        {
            "type": "url_citation",
            "url_citation": {"start_index": 0, "end_index": 6, "title": "Keys", "url": f"{path}{place}"},
        }
        for place in ("?highlight=L10-L14#L10-L14", "#page=3")
    ]
    *_, last, _ = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True}))
    assert last["choices"][0]["delta"] == {"annotations": body["choices"][0]["message"]["annotations"]}
    assert last["stillroom"]["citations"] == body["stillroom"]["citations"]


def test_sources_are_sent_as_events_that_open_webui_shows(client: httpx.Client, stillroom: FakeStillroom) -> None:
    """Before the text, in order, instead of annotations; ids are no links, and no name begins with http."""
    stillroom.citations = (_cited(1, Support.SUPPORTED, (10, 14), (0, 0)),)
    asked = QUESTION | {"stream": True, "n": 2, "stillroom": {"source_events": True}}
    first, second, *chunks = events(client.post("/v1/chat/completions", json=asked))[:-1]

    assert "event" not in first and "event" not in second
    sources = first["stillroom"]["sources"]
    assert sources and len([one for one in chunks if "event" in one]) == len(sources)
    for source, chunk in zip(sources, chunks, strict=False):
        assert chunk["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
        event = chunk["event"]
        assert event["type"] == "source"
        found = event["data"]
        identity = f"{source['document']}#{source['chunk_id']}"
        assert found["document"] == [source["text"]] and found["source"]["id"] == identity
        assert found["metadata"][0]["source"] == identity
        assert found["source"]["url"].startswith(f"{client.base_url}/v1/documents/")
    assert not any("annotations" in one["choices"][0]["delta"] for one in chunks)
    plain = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True}))[:-1]
    assert not any("event" in one for one in plain) and "annotations" in plain[-1]["choices"][0]["delta"]


def test_source_events_name_lines_and_pages() -> None:
    source = Source("docs/http.md", "c1", "text", 1.0, {}, 1, "HTTP", 3, 9)
    event = source_event(source, "https://answers.example.org/")["data"]
    link = "https://answers.example.org/v1/documents/docs/http.md/content?highlight=L3-L9#L3-L9"
    assert event["source"] == {"id": "docs/http.md#c1", "name": "./http.md:3-9", "url": link}
    page = source_event(replace(source, document="a b.pdf", start_line=0, end_line=0, start_page=3), "http://x")["data"]
    assert page["source"]["url"] == "http://x/v1/documents/a%20b.pdf/content#page=3"
    assert page["metadata"] == [{"source": "a b.pdf#c1", "name": "a b.pdf", "page": 2}]


@pytest.mark.parametrize(("setting", "wanted"), [(True, None), (False, True), (True, False)])
def test_a_request_overrides_the_setting_of_source_events(setting: bool, wanted: bool | None) -> None:
    body = ChatCompletionRequest.model_validate({**QUESTION, "stillroom": {"source_events": wanted}})
    config = ServerConfig(source_events=setting, public_url="https://answers.example.org")
    found = [events_link_to(body, one, "http://127.0.0.1:1/") for one in (config, replace(config, public_url=""))]
    assert found == ([None, None] if wanted is False else [config.public_url, "http://127.0.0.1:1/"])
