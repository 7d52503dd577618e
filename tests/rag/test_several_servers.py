"""Two Stillroom servers as engines of a third: equal answers, the same server for the same question, and its loss."""

import io
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from stillroom.cluster.front_engines import engine_name
from stillroom.config.settings import EngineConfig, StillroomConfig
from stillroom.core.kv import cache_salt_of, salt_of
from stillroom.errors import EngineRefusedError
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.server.run import HttpServer
from tests.engine.scripted import GOOD, Reply, ScriptedServer, error, reply
from tests.server.harness import running, serving
from tests.server.knowledge import PEOPLE, QUESTION, write_knowledge

pytestmark = pytest.mark.microworld

BUSY = error(429, "busy", "retry-after: 600\r\n")
QUESTIONS = [QUESTION, "In which year was Jatha Jurlow born ?", "What did Cirik Prurs study ?"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    """Generates with the built-in engine, for both servers."""
    folder = tmp_path_factory.mktemp("several")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        stillroom.warm_up()
        yield stillroom


@pytest.fixture
def servers(here: Stillroom) -> Iterator[dict[str, HttpServer]]:
    """Two running servers, by their names in answers."""
    with ExitStack() as stack:
        found = [stack.enter_context(running(here)) for _ in range(2)]
        yield {engine_name(f"{server.url}/v1"): server for server in found}


def urls_of(servers: dict[str, HttpServer]) -> list[str]:
    return [f"{server.url}/v1" for server in servers.values()]


def server_of(answer: Answer) -> str:
    """Return the name of the server that answered."""
    assert answer.route is not None
    return answer.route.engine


def away(here: Stillroom, *urls: str, **engine: object) -> Stillroom:
    """The same knowledge base with these servers as engine."""
    settings = EngineConfig(kind="openai", base_url=",".join(urls), **engine)  # type: ignore[arg-type]
    return Stillroom.open(here._kb.path, config=StillroomConfig(engine=settings))


def test_equal_questions_go_to_one_server_and_answers_are_those_of_one_engine(
    here: Stillroom, servers: dict[str, HttpServer]
) -> None:
    with away(here, *urls_of(servers), prompt="tokens", document_order="rank") as stillroom:
        asked = {question: stillroom.ask(question) for question in QUESTIONS}
        for question, answer in asked.items():
            assert answer.text == here.ask(question).text
            assert server_of(answer) in servers
            assert server_of(stillroom.ask(question)) == server_of(answer)


def test_answer_is_the_same_after_its_server_was_stopped(here: Stillroom, servers: dict[str, HttpServer]) -> None:
    with away(here, *urls_of(servers), prompt="tokens") as stillroom:
        before = stillroom.ask(QUESTION)
        name = server_of(before)
        servers[name].stop()
        after = stillroom.ask(QUESTION)

        [other] = set(servers) - {name}
        assert (after.text, server_of(after)) == (before.text, other)
        shown = stillroom.metrics.render().decode()
        stopped, running = (f"{servers[one].url}/v1" for one in (name, other))
        assert f'stillroom_engine_alive{{engine="{stopped}",name="{name}"}} 0.0' in shown
        assert f'stillroom_engine_alive{{engine="{running}",name="{other}"}} 1.0' in shown
        assert f'stillroom_engine_refused_streams_total{{engine="{stopped}"}} 1.0' in shown
        assert f'stillroom_engine_streams_total{{engine="{running}"}} 1.0' in shown
        assert stillroom.records.get(after.request_id)["route"]["engine"] == other


def test_server_that_answered_is_named_over_http(here: Stillroom, servers: dict[str, HttpServer]) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}]}
    with away(here, *urls_of(servers), prompt="tokens") as stillroom, serving(stillroom) as front:
        whole = httpx.post(f"{front}/v1/chat/completions", json=body, timeout=60).json()
        streamed = httpx.post(f"{front}/v1/chat/completions", json=body | {"stream": True}, timeout=60).text
        raw = httpx.post(f"{front}/v1/completions", json={"prompt": "<q> Who ? <a>", "model": "stillroom"}, timeout=60)

    name = whole["stillroom"]["route"]["engine"]
    assert name in servers
    assert f'"route":{{"engine":"{name}"' in streamed
    assert raw.json()["stillroom"]["route"]["engine"] in servers


def test_front_is_not_ready_while_every_server_is_avoided(here: Stillroom) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    replies = [reply(200, {"data": [{"id": "m"}]}), BUSY]
    with ExitStack() as stack:
        scripted = [stack.enter_context(ScriptedServer(replies)) for _ in range(2)]
        stillroom = stack.enter_context(away(here, *(one.url for one in scripted)))
        stillroom.warm_up()
        front = stack.enter_context(serving(stillroom))
        assert httpx.get(f"{front}/readyz").status_code == 200
        for _ in range(2):  # the second is not sent
            refused = httpx.post(f"{front}/v1/chat/completions", json=asked)
            assert refused.status_code == 503 and 500 < int(refused.headers["retry-after"]) <= 600
        ready, shown = httpx.get(f"{front}/readyz"), httpx.get(f"{front}/metrics").text
    assert ready.status_code == 503 and "no server takes requests now" in ready.json()["reasons"]
    for one in scripted:
        assert f'stillroom_engine_alive{{engine="{one.url}",name="{engine_name(one.url)}"}} 0.0' in shown


def test_server_of_another_model_is_an_error_that_names_it(here: Stillroom, servers: dict[str, HttpServer]) -> None:
    with (
        away(here, *urls_of(servers), model="other") as stillroom,
        pytest.raises(EngineRefusedError, match=f"({'|'.join(urls_of(servers))}) does not serve the model 'other'"),
    ):
        stillroom.warm_up()


def test_each_server_gets_documents_in_its_own_order(here: Stillroom) -> None:
    """The same documents stand in the order of the question that a server got first."""
    options, busy = AskOptions(mode="sparse", top_k=2), set[str]()
    first, second = "Dola Kenric Cirik Prurs", "Cirik Prurs Dola Kenric birthplace Tunstead"

    def answer(connection: socket.socket) -> None:
        port = connection.getsockname()[1]
        connection.sendall(BUSY if engine_name(f"http://127.0.0.1:{port}/v1") in busy else GOOD)

    replies: list[Reply] = [reply(200, {"data": [{"id": "m"}]}), *[answer] * 8]
    with ScriptedServer(replies) as one, ScriptedServer(replies) as two, away(here, one.url, two.url) as stillroom:
        by_rank = stillroom.ask(first, options)
        again = stillroom.ask(second, options)
        assert (server_of(again), order_of(again)) == (server_of(by_rank), order_of(by_rank))

        busy.add(server_of(by_rank))
        moved = stillroom.ask(first, options)
        assert server_of(moved) != server_of(by_rank)
        assert order_of(moved) == order_of(by_rank), "the sources were known before it was sent"
        elsewhere = stillroom.ask(second, options)
        assert (server_of(elsewhere), order_of(elsewhere)) == (server_of(moved), order_of(by_rank)[::-1])
        assert order_of(stillroom.ask(first, options)) == order_of(elsewhere)


def order_of(answer: Answer) -> list[str]:
    return [source.chunk_id for source in answer.sources]


def test_salts_differ_between_tenants_and_cannot_be_guessed(here: Stillroom, tmp_path: Path) -> None:
    with ScriptedServer([GOOD] * 4) as server:
        with away(here, server.url, model="m", cache_salt=True) as stillroom:
            for tenant in ("legal", "sales", "legal"):
                with stillroom.for_tenant(tmp_path / tenant, tenant) as own:
                    own.upload([("people.md", io.BytesIO(PEOPLE.encode()))])
                    assert own.ask(QUESTION).text == "Twice a year."
                    identity = own._kb.identity
            stillroom.ask(QUESTION)
        legal, sales, again, default = (asked.body["cache_salt"] for asked in server.asked)

    assert legal == again == cache_salt_of(salt_of("legal", identity))
    assert len({legal, sales, default}) == 3
    assert all(len(salt) == 64 for salt in (legal, sales, default))
    assert identity not in legal and "legal" not in legal
