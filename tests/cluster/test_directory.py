"""A front's list of engines follows names, files and servers, and survives their outages."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from stillroom.cluster import directory
from stillroom.cluster.directory import EngineDirectory, engines_of_list
from stillroom.config.engine_address import parse_engine_addresses
from stillroom.errors import ConfigError

Addresses = Sequence[str] | OSError


class Names:
    """A resolver whose replies a test sets."""

    def __init__(self) -> None:
        self.reply: Addresses = ()
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("engines", 9100)
        self.num_asked += 1
        await self.gate.wait()
        if isinstance(self.reply, OSError):
            raise self.reply
        return self.reply


def looking(text: str, names: Names | None = None) -> EngineDirectory:
    return EngineDirectory(parse_engine_addresses("engine.urls", text), names)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def test_fixed_addresses_are_the_engines() -> None:
    async def test() -> None:
        engines = looking("http://a:1,http://b:2")
        assert await engines.look() == {"http://a:1", "http://b:2"}
        await engines.close()

    run(test)


def test_engines_of_a_name_appear_and_vanish() -> None:
    async def test() -> None:
        names = Names()
        engines = looking("dns://engines,http://fixed:1", names)
        for found in (["10.0.0.1"], ["10.0.0.2", "10.0.0.1"], ["10.0.0.2"]):
            names.reply = found
            assert await engines.look() == {"http://fixed:1", *(f"http://{one}:9100" for one in found)}

    run(test)


def test_engine_with_two_kinds_of_addresses_counts_once() -> None:
    async def test() -> None:
        names = Names()
        engines = looking("dns://engines", names)
        names.reply = ["fd00::1", "10.0.0.1", "10.0.0.1"]
        assert await engines.look() == {"http://10.0.0.1:9100"}
        names.reply = ["fd00::1"]
        assert await engines.look() == {"http://[fd00::1]:9100"}

    run(test)


def test_outage_of_dns_keeps_the_engines_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        names = Names()
        engines = looking("dns://engines", names)
        names.reply = ["10.0.0.1"]
        await engines.look()
        names.reply = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        for _ in range(3):
            assert await engines.look() == {"http://10.0.0.1:9100"}
        names.reply = ["10.0.0.2"]
        assert await engines.look() == {"http://10.0.0.2:9100"}

    with caplog.at_level(logging.WARNING):
        run(test)
    assert ["Temporary failure" in line for line in caplog.messages] == [True, False]
    assert "replies again" in caplog.messages[1]


def test_name_that_no_longer_exists_has_no_engines(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        names = Names()
        engines = looking("dns://engines", names)
        names.reply = ["10.0.0.1"]
        await engines.look()
        names.reply = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        assert await engines.look() == frozenset()

    run(test)
    assert "the name does not exist" in caplog.text


def test_hanging_name_delays_no_other_place_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_LOOK_SECONDS", 0.01)

    async def test() -> None:
        names = Names()
        names.gate.clear()
        names.reply = ["10.0.0.1"]
        engines = looking("dns://engines,http://fixed:1", names)
        assert await engines.look() == {"http://fixed:1"}
        assert await engines.look() == {"http://fixed:1"}
        assert names.num_asked == 1, "a question was sent while another one had no reply"
        names.gate.set()
        await asyncio.sleep(0)
        assert await engines.look() == {"http://fixed:1", "http://10.0.0.1:9100"}
        names.gate.clear()
        await engines.look()
        await engines.close()

    run(test)


def test_system_resolver_finds_this_machine() -> None:
    async def test() -> None:
        assert await looking("dns://localhost:9100").look() == {"http://127.0.0.1:9100"}

    run(test)


def test_file_is_read_again_and_its_absence_or_damage_keeps_the_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "my engines"

    def write(text: str) -> None:
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)

    async def test() -> None:
        engines = looking(f"file://{path}".replace(" ", "%20"))
        assert await engines.look() == frozenset()
        write("# two engines\nhttp://a:1\n\n  http://b:2/  # the second\n")
        assert await engines.look() == {"http://a:1", "http://b:2"}
        write("http://c:3\n")
        assert await engines.look() == {"http://c:3"}
        write("http://d:4\nnonsense\n")
        assert await engines.look() == {"http://d:4"}
        write("nonsense\n")
        assert await engines.look() == {"http://d:4"}
        path.unlink()
        assert await engines.look() == {"http://d:4"}
        write("")
        assert await engines.look() == frozenset()

    run(test)
    assert "1 of 2 lines are skipped: line 2='nonsense' is not the address of an engine" in caplog.text
    assert "line 1='nonsense' is not the address of an engine" in caplog.text
    assert "No such file" in caplog.text


def test_list_holds_engines_only() -> None:
    assert engines_of_list("\n# none\n") == (frozenset(), "")
    found, problem = engines_of_list("http://a:1\ndns://engines\nnonsense")
    assert found == {"http://a:1"}
    assert problem.startswith("2 of 3 lines are skipped: line 2: a list has addresses of engines only")
    with pytest.raises(ConfigError, match="line 2: a list has addresses of engines only"):
        engines_of_list("\ndns://engines\n")


def test_place_without_an_engine_is_logged_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        empty, missing = tmp_path / "empty", tmp_path / "missing"
        empty.write_text("# none yet\n")
        engines = looking(f"file://{empty},file://{missing}")
        for _ in range(2):
            assert await engines.look() == frozenset()
        empty.write_text("http://a:1\n")
        assert await engines.look() == {"http://a:1"}

    run(test)
    first, second, third = caplog.messages
    assert f"{tmp_path}/empty" in first and first.endswith("it names no engine now")
    assert f"{tmp_path}/missing" in second and second.endswith("no engine is known from there")
    assert third.endswith("it names engines now")


class Lists(BaseHTTPRequestHandler):
    status, text = 200, ""

    def do_GET(self) -> None:
        content = type(self).text.encode()
        self.send_response(type(self).status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Lists) as listening:
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def test_server_lists_engines_and_its_errors_keep_them(server: ThreadingHTTPServer) -> None:
    port = server.server_address[1]

    async def test() -> None:
        engines = looking(f"list+http://127.0.0.1:{port}/engines")
        Lists.text = "http://a:1\nhttp://b:2\n"
        assert await engines.look() == {"http://a:1", "http://b:2"}
        for status in (302, 404, 503):
            Lists.status = status
            assert await engines.look() == {"http://a:1", "http://b:2"}
        Lists.status, Lists.text = 200, "<html>"
        assert await engines.look() == {"http://a:1", "http://b:2"}
        Lists.text = ""
        assert await engines.look() == frozenset()
        server.server_close()
        assert await engines.look() == frozenset()

    run(test)
