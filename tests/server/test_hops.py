"""Several hops over HTTP: events of a stream, a whole reply, refused numbers, and clients that leave."""

import asyncio
from typing import Any

import httpx
import pytest

from stillroom.core.ids import RequestId, public_id
from stillroom.rag.answer import AskOptions
from stillroom.rag.hops import Hop, HopEnd, HopSource
from tests.server.fake_stream import FakeStream
from tests.server.fakes import FakeStillroom, as_stillroom, until
from tests.server.harness import QUESTION, events, serving

SOURCE = HopSource("/srv/secret/keys.md", "c1", 0.5, "Keys", 3, 4, 0, 0)
HOPS = (
    Hop(RequestId("req-1"), "How do I rotate keys?", (SOURCE,), "yearly", None, 10, 4, 1),
    Hop(RequestId("req-1"), "Who does it?", (), None, HopEnd.LIMIT),
)


class HoppingStillroom(FakeStillroom):
    """Reports hops before it answers. Waits after each hop while it may not go on."""

    def __init__(self) -> None:
        super().__init__()
        self.hops: tuple[Hop, ...] = HOPS
        self.may_go_on = True
        self.may_report = True
        """False: the first search does not end before `may_go_on`."""
        self.was_cancelled = False

    async def astreams(self, question: str, options: AskOptions | None = None, *, n: int = 1) -> list[FakeStream]:
        assert options is not None
        for hop in self.hops:
            if options.on_hop is not None and self.may_report:
                options.on_hop(hop)
            try:
                while not self.may_go_on:
                    await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        return await super().astreams(question, options, n=n)


@pytest.fixture
def stillroom() -> FakeStillroom:
    return HoppingStillroom()


def body(**more: Any) -> dict[str, Any]:
    return QUESTION | {"stillroom": {"hops": 2}} | more


def test_stream_sends_each_hop_before_the_sources(client: httpx.Client, stillroom: HoppingStillroom) -> None:
    first, second, start, *_, last, done = events(client.post("/v1/chat/completions", json=body(stream=True)))
    assert first["stillroom"]["hop"]["question"] == "How do I rotate keys?"
    assert first["stillroom"]["hop"]["sources"][0]["document"] == public_id(SOURCE.document)
    assert "secret" not in str(first)
    assert (first["stillroom"]["hop"]["answer"], second["stillroom"]["hop"]["end"]) == ("yearly", "limit")
    assert first["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
    assert first["id"] == second["id"] == "chatcmpl-req-1" and first["stillroom"]["request_id"] == "req-1"
    assert start["stillroom"]["sources"] and last["stillroom"]["hops"] == [] and done == "[DONE]"
    assert stillroom.asked[0][1].hops == 2


def test_whole_reply_reports_hops_of_the_answer(client: httpx.Client, stillroom: HoppingStillroom) -> None:
    stillroom.answered_hops = HOPS
    reply = client.post("/v1/chat/completions", json=body()).json()
    assert [hop["question"] for hop in reply["stillroom"]["hops"]] == [hop.question for hop in HOPS]
    assert reply["stillroom"]["hops"][0]["sources"][0]["document"] == public_id(SOURCE.document)


@pytest.mark.parametrize("hops", [0, 6, "2", 1.5])
def test_invalid_number_of_hops_is_refused(any_client: httpx.Client, hops: Any) -> None:
    reply = any_client.post("/v1/chat/completions", json=QUESTION | {"stillroom": {"hops": hops}})
    assert reply.status_code == 400 and "hops" in reply.json()["error"]["message"]


def test_hops_without_a_search_are_refused(any_client: httpx.Client) -> None:
    reply = any_client.post("/v1/chat/completions", json=QUESTION | {"stillroom": {"hops": 2, "search": False}})
    assert reply.status_code == 400 and "hops" in reply.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_client_that_leaves_between_hops_cancels_the_search(is_stream: bool) -> None:
    stillroom = HoppingStillroom()
    stillroom.may_go_on = False
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url) as client:
        if is_stream:
            with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as reply:
                assert next(reply.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body(), timeout=0.3)
        until(lambda: stillroom.was_cancelled)


def test_client_that_leaves_a_stream_before_its_first_hop_cancels_the_search() -> None:
    stillroom = HoppingStillroom()
    stillroom.may_go_on = stillroom.may_report = False
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body(stream=True), timeout=0.3)
        until(lambda: stillroom.was_cancelled)


def test_client_that_leaves_a_response_cancels_its_search() -> None:
    stillroom = HoppingStillroom()
    stillroom.may_go_on = False
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/responses", json={"input": "How do I rotate keys?", "stillroom": {"hops": 2}}, timeout=0.3)
        until(lambda: stillroom.was_cancelled)


def test_error_before_the_first_hop_has_its_own_status() -> None:
    stillroom = HoppingStillroom()
    stillroom.hops, stillroom.texts = (), {}
    with serving(as_stillroom(stillroom)) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=body(stream=True))
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "knowledge_base_empty")


def test_error_after_a_hop_is_an_event() -> None:
    stillroom = HoppingStillroom()
    stillroom.texts = {}
    with serving(as_stillroom(stillroom)) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=body(stream=True))
    *hops, last = events(reply)
    assert reply.status_code == 200 and len(hops) == 2
    assert last["error"]["code"] == "knowledge_base_empty"
