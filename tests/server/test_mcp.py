"""MCP: the SDK's own client, in process, over HTTP with keys, and over the pipes of `stillroom mcp`."""

import asyncio
import io
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from stillroom.config.settings import RuntimeConfig, ServerConfig, StillroomConfig
from stillroom.rag.stillroom import Stillroom
from stillroom.server import mcp as server_module
from stillroom.server import mcp_reading
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import Tenants
from stillroom.server.mcp import mcp_server
from tests.server.fakes import FakeStillroom, as_stillroom, until
from tests.server.harness import QUESTION as ASKED
from tests.server.harness import serving
from tests.server.knowledge import ANSWER, PEOPLE, QUESTION, write_knowledge
from tests.server.test_keys import add, bearer

pytestmark = pytest.mark.microworld

TOOLS = ["ask", "list_documents", "read_document", "search"]


@pytest.fixture(scope="module")
def stillroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder = tmp_path_factory.mktemp("mcp")
    config = StillroomConfig(server=ServerConfig(mcp=True))
    with Stillroom.open(folder / "kb", config=config) as opened:
        opened.add(write_knowledge(folder / "docs"))
        yield opened


def use(server: Any, work: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with Client(server) as client:
            return await work(client)

    return asyncio.run(run())


def call(stillroom: Stillroom, name: str, **arguments: Any) -> dict[str, Any]:
    found = use(mcp_server(lambda _: stillroom), lambda client: client.call_tool(name, arguments))
    assert not found.is_error, found.content
    return dict(found.structured_content)


def refused(stillroom: Stillroom, name: str, **arguments: Any) -> str:
    found = use(mcp_server(lambda _: stillroom), lambda client: client.call_tool(name, arguments))
    assert found.is_error
    return str(found.content[0].text)


def test_tools_say_what_they_do_and_that_they_only_read(stillroom: Stillroom) -> None:
    tools = use(mcp_server(lambda _: stillroom), lambda client: client.list_tools()).tools
    assert sorted(tool.name for tool in tools) == TOOLS
    for tool in tools:
        assert tool.description and tool.annotations.read_only_hint and "context" not in tool.input_schema["properties"]


def test_making_a_server_changes_no_log(stillroom: Stillroom, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    mcp_server(lambda _: stillroom)
    assert root.handlers == []


def test_search_and_ask_give_what_the_library_gives(stillroom: Stillroom) -> None:
    passages = call(stillroom, "search", query=QUESTION, top_k=2)["passages"]
    expected = stillroom.search(QUESTION, top_k=2).results
    assert [(one["text"], one["score"]) for one in passages] == [(one.chunk.text, one.score) for one in expected]
    found = call(stillroom, "ask", question=QUESTION)
    assert found["answer"] == stillroom.ask(QUESTION).text == ANSWER
    assert found["quotes"][0]["sentence"] == ANSWER and ANSWER in found["quotes"][0]["quote"]
    assert (found["quotes"][0]["document"], found["quotes"][0]["start_line"]) == (passages[0]["document"], 5)


def test_documents_are_listed_in_pages_and_read_by_lines(stillroom: Stillroom, monkeypatch: pytest.MonkeyPatch) -> None:
    first = call(stillroom, "list_documents", limit=1)
    second = call(stillroom, "list_documents", limit=1, after=first["next_after"])
    names = [first["documents"][0]["document"], second["documents"][0]["document"]]
    assert [Path(name).name for name in names] == ["notes.txt", "people.md"] and not second["next_after"]
    whole = call(stillroom, "read_document", document=names[1])
    assert "Jatha Jurlow later moved to Wunwick." in whole["text"] and not (whole["next_line"] or whole["is_cut"])
    part = call(stillroom, "read_document", document=names[1], start_line=9, end_line=9)
    assert part["text"] == "The birthplace of Cirik Prurs was Tunstead. As a student Cirik Prurs chose chemistry."
    headed = call(stillroom, "read_document", document=names[1], start_line=6, end_line=9)
    assert headed["text"] == f"## Cirik Prurs\n\n{part['text']}"
    headings = [line for line in whole["text"].splitlines() if line.startswith("#")]
    assert headings == ["## Dola Kenric", "## Cirik Prurs", "## Jatha Jurlow"] and whole["title"] == "People"
    monkeypatch.setattr(mcp_reading, "MAX_TEXT", 140)
    pieces: list[str] = []
    at = 0
    while not pieces or at:
        piece = call(stillroom, "read_document", document=names[1], start_line=at)
        pieces.append(piece["text"])
        assert piece["is_cut"] == bool(piece["next_line"])
        at = piece["next_line"]
    assert "\n\n".join(pieces) == whole["text"] and len(pieces) > 2
    monkeypatch.setattr(mcp_reading, "MAX_TEXT", 10)
    assert call(stillroom, "read_document", document=names[0])["is_cut"], "one paragraph is longer than a reply"


def test_resource_is_the_text_of_a_document(stillroom: Stillroom) -> None:
    server = mcp_server(lambda _: stillroom)
    name = call(stillroom, "list_documents")["documents"][1]["document"]
    (template,) = use(server, lambda client: client.list_resource_templates()).resource_templates
    assert template.uri_template == "stillroom://documents/{+document}"
    found = use(server, lambda client: client.read_resource(f"stillroom://documents/{name}"))
    assert found.contents[0].text == call(stillroom, "read_document", document=name)["text"]

    async def of_nothing(client: Client) -> None:
        with pytest.raises(MCPError, match=r"nothing\.md"):
            await client.read_resource("stillroom://documents/nothing.md")

    use(server, of_nothing)

    async def of_no_cursor(client: Client) -> None:
        with pytest.raises(MCPError, match="there is no cursor 'zzz'"):
            await client.list_resources(cursor="zzz")

    use(server, of_no_cursor)


def test_errors_reach_the_model_with_their_remedy(stillroom: Stillroom) -> None:
    assert "the question is empty" in refused(stillroom, "ask", question=" ")
    assert "nothing.md" in refused(stillroom, "read_document", document="nothing.md")
    assert refused(stillroom, "read_document", document="p") == "there is no document 'p'; list_documents has the names"
    assert "filter" in refused(stillroom, "search", query="keys", where="year >=")
    assert "line" in refused(stillroom, "read_document", document="people.md", start_line=999)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("search", {"query": "keys", "top_k": 0}, "top_k=0 does not fit; send a whole number from 1 to 100."),
        ("search", {"query": "keys", "top_k": "many"}, "top_k='many' does not fit; send a whole number from 1 to 100."),
        ("search", {}, "The argument 'query' is missing; send a text. It means: Words or a question."),
        ("search", {"query": "x", "limit": 3}, "search has no argument 'limit'; it has query, top_k, where"),
        ("ask", {"question": 7}, "question=7 does not fit; send a text."),
        ("read_document", {"document": "a", "start_line": -1}, "send a whole number of at least 0."),
        ("find", {}, "there is no tool 'find'; the tools are search, ask, list_documents, read_document"),
    ],
)
def test_wrong_calls_are_explained_in_plain_sentences(
    stillroom: Stillroom, name: str, arguments: dict[str, Any], said: str
) -> None:
    found = refused(stillroom, name, **arguments)
    assert said in found
    assert not any(word in found for word in ("validation", "pydantic", "Error", "type="))


def test_documents_are_resources_in_pages(stillroom: Stillroom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_RESOURCES", 1)
    names = [one["document"] for one in call(stillroom, "list_documents")["documents"]]

    async def walk(client: Client) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        cursor = None
        while not found or cursor:
            page = await client.list_resources(cursor=cursor)
            (one,) = page.resources
            contents: Any = (await client.read_resource(one.uri)).contents
            found.append((one.name, contents[0].text))
            cursor = page.next_cursor
        return found

    found = use(mcp_server(lambda _: stillroom), walk)
    assert [name for name, _ in found] == names and len(names) == 2
    for name, text in found:
        assert text == call(stillroom, "read_document", document=name)["text"]


def test_resource_of_a_name_with_odd_characters_opens(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as opened:
        opened.upload([("notes/50%20 of a b?.md", io.BytesIO(b"Keys rotate."))])
        server = mcp_server(lambda _: opened)
        (one,) = use(server, lambda client: client.list_resources()).resources
        assert one.name == "uploads/notes/50%20 of a b?.md"
        assert use(server, lambda client: client.read_resource(one.uri)).contents[0].text == "Keys rotate."


def test_short_names_of_documents_reveal_no_folder(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as opened:
        opened.add(write_knowledge(tmp_path / "handbook"))
        opened.hide_folders()  # as the server does
        assert "Wunwick" in call(opened, "read_document", document="people.md")["text"]
        for name in ("handbook", str(tmp_path), str(tmp_path / "handbook/people.md")):
            said = refused(opened, "read_document", document=name)
            assert said == f"there is no document {name!r}; list_documents has the names"


def test_over_http_a_key_sees_its_tenants_documents_only(stillroom: Stillroom, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    own, other = add(path, "anna"), add(path, "ben", "legal")

    def asked(url: str, key: str) -> Any:
        async def run() -> Any:
            async with (
                httpx2.AsyncClient(headers=bearer(key), timeout=60) as http,
                Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
            ):
                names = [tool.name for tool in (await client.list_tools()).tools]
                num_resources = len((await client.list_resources()).resources)
                return sorted(names), num_resources, await client.call_tool("ask", {"question": QUESTION})

        return asyncio.run(run())

    with serving(stillroom, tenants=Tenants(stillroom, tmp_path / "tenants"), keys=KeyRing(path)) as url:
        names, num_resources, found = asked(url, own)
        assert names == TOOLS and num_resources == 2 and found.structured_content["answer"] == ANSWER
        _, num_resources, nothing = asked(url, other)
        assert num_resources == 0 and nothing.is_error and "the knowledge base is empty" in nothing.content[0].text
        assert httpx2.post(f"{url}/mcp", json={}).status_code == 401
        assert httpx2.post(f"{url}/mcp", json={}, headers=bearer(own)).status_code == 400


PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"requests_per_minute": 2}, "rate_limit_exceeded"), ({"max_concurrent": 2}, "concurrency_limit_exceeded")],
)
def test_messages_over_http_count_for_the_limits_of_their_caller(settings: dict[str, Any], code: str) -> None:
    fake = FakeStillroom(config=StillroomConfig(server=ServerConfig(mcp=True, **settings)))
    accept = {"accept": "application/json, text/event-stream"}
    with (
        serving(as_stillroom(fake)) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):
        fake.gate.clear()
        running = [
            pool.submit(client.post, "/v1/chat/completions", json=ASKED)
            for _ in range(2 if "max_concurrent" in settings else 1)
        ]
        until(lambda: len(fake.asked) == len(running))
        replies = [client.post("/mcp", json=PING, headers=accept) for _ in range(3 - len(running))]
        fake.gate.set()
        assert [one.result().status_code for one in running] == [200] * len(running)
    assert [one.status_code for one in replies] == [200] * (len(replies) - 1) + [429]
    assert replies[-1].json()["error"]["code"] == code


def test_ask_takes_an_admission_slot_and_other_tools_do_not() -> None:
    runtime = RuntimeConfig(max_num_seqs=1, max_waiting=1)
    fake = FakeStillroom(config=StillroomConfig(server=ServerConfig(mcp=True), runtime=runtime))
    accept = {"accept": "application/json, text/event-stream"}

    def call(name: str, **arguments: str) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
        return dict(client.post("/mcp", json=message, headers=accept).json()["result"])

    with (
        serving(as_stillroom(fake)) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):
        fake.gate.clear()
        running = [pool.submit(call, "ask", question="Which keys?") for _ in range(2)]
        until(lambda: len(fake.asked) == 2)
        refused, found = call("ask", question="Which keys?"), call("search", query="keys")
        fake.gate.set()
        answers = [one.result()["structuredContent"]["answer"] for one in running]
        again = call("ask", question="Which keys?")
        metrics = client.get("/metrics").text
    assert refused["isError"] and "1 requests wait already" in refused["content"][0]["text"]
    assert found["structuredContent"]["passages"] and answers == ["Which keys?"] * 2
    assert again["structuredContent"]["answer"] == "Which keys?", "the slots were given back"
    assert 'stillroom_refused_requests_total{reason="queue"} 1.0' in metrics and len(fake.asked) == 3


@pytest.mark.parametrize("accept", ["text/event-stream", "*/*", "application/json"])
@pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD"])
def test_server_opens_no_stream_of_its_own(method: str, accept: str) -> None:
    fake = FakeStillroom(config=StillroomConfig(server=ServerConfig(mcp=True)))
    with serving(as_stillroom(fake)) as url:
        reply = httpx2.request(method, f"{url}/mcp", headers={"accept": accept}, timeout=60)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


def test_server_without_the_setting_has_no_route(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as plain, serving(plain) as url:
        assert httpx2.post(f"{url}/mcp", json={}).status_code == 404


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("read_document", {"document": "people.md"}, "Jatha Jurlow later moved to Wunwick."),
        pytest.param("ask", {"question": QUESTION}, ANSWER, marks=pytest.mark.slow),
    ],
)
def test_command_speaks_over_its_pipes(tmp_path: Path, tool: str, arguments: dict[str, str], said: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/people.md").write_text(PEOPLE, encoding="utf-8")
    with Stillroom.open(tmp_path / "kb") as opened:
        opened.add(tmp_path / "docs")
    command = ["-m", "stillroom.cli.main", "mcp", "--kb", str(tmp_path / "kb"), "--model", "bundled:reader"]
    found = use(
        StdioServerParameters(command=sys.executable, args=command),
        lambda client: client.call_tool(tool, arguments),
    )
    assert said in str(found.structured_content)
