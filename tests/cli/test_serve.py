"""`stillroom serve` in its own process, with a fake Stillroom."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from stillroom.errors import EngineUnavailableError
from stillroom.server.loading import Loading
from stillroom.server.run import HttpServer
from tests import forked
from tests.cli.harness import Opened, Run
from tests.server.fakes import FakeStillroom, as_stillroom, until
from tests.server.harness import serving
from tests.server.test_disconnects import streaming

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("stillroom.cli.serve", "stillroom.server.app", "stillroom.server.run", "tests.server.fakes", "pydantic")
"""What the programs of these tests import."""
PROGRAM = """
import sys
import threading
from stillroom.cli import main, opening
from stillroom.config.settings import ServerConfig, StillroomConfig
from tests.server.fakes import FakeStillroom

class Closing(FakeStillroom):
    def upload(self, files, progress, metadata, stop):
        while True:
            stop.check()
    def warm_up(self):
        print("warming up", file=sys.stderr, flush=True)
    def close(self):
        print("knowledge base closed", file=sys.stderr, flush=True)

def open_stillroom(*_, **__):
    opened = Closing(config=StillroomConfig(server=ServerConfig(grace_s=60.0)))
    opened.gate.clear()
    return opened

opening.open_stillroom = open_stillroom
sys.argv = ["stillroom", "serve", *sys.argv[1:]]
main.main()
"""


@contextmanager
def launched(*args: str, program: str = PROGRAM) -> Iterator["subprocess.Popen[str]"]:
    command = [*forked.command(*MODULES), program, *args]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


ENDLESS = PROGRAM.replace("file=sys.stderr, flush=True)", "file=sys.stderr, flush=True); threading.Event().wait()", 1)
"""Loads for ever."""


def test_front_without_an_engine_says_what_it_waits_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with launched("--port", str(port), "--engines", f"file://{tmp_path}/engines", program=ENDLESS) as process:
        assert process.stderr
        assert [process.stderr.readline() for _ in range(2)] == ["loading fake-model ...\n", "warming up\n"]
        (reason,) = httpx.get(f"http://127.0.0.1:{port}/readyz").json()["reasons"]
        process.kill()
    assert "waiting for an engine at the addresses in engine.urls; the log names them" in reason
    assert str(tmp_path) not in reason, "it is told without a key"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_stops_a_loading_server_at_once(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with launched("--port", str(port), program=ENDLESS) as process:
        assert process.stderr
        assert [process.stderr.readline() for _ in range(2)] == ["loading fake-model ...\n", "warming up\n"]
        ready = httpx.get(f"http://127.0.0.1:{port}/readyz")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["loading: loading the model and the indexes"])

        process.send_signal(number)

        assert process.wait(20) == 0
        assert process.stderr.read().endswith("stopped while loading\n")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_server_announces_readiness_and_stops_on_a_signal(number: signal.Signals) -> None:
    with launched("--port", "0") as process:
        assert process.stderr and process.stdout
        lines = [process.stderr.readline() for _ in range(3)]
        assert lines[:2] == ["loading fake-model ...\n", "warming up\n"]
        assert lines[2].startswith("Stillroom listens on http://127.0.0.1:")
        url = lines[2].split()[3]
        assert httpx.get(f"{url}/healthz").json()["status"] == "ok"

        process.send_signal(number)

        assert process.wait(20) == 0
        assert process.stderr.read() == "knowledge base closed\nstopped\n"
        assert process.stdout.read() == ""


def test_log_of_a_server_tells_of_its_own_work() -> None:
    working = PROGRAM.replace(
        'print("knowledge base closed", file=sys.stderr, flush=True)',
        "import logging; from stillroom.retrieval import reembedding; reembedding.logger.info('changing'); "
        'logging.getLogger("stillroom.rag.preparing").info("prepared 3 chunks")',
    )
    with launched("--port", "0", program=working) as process:
        assert process.stderr
        lines = [process.stderr.readline() for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and lines[2].startswith("Stillroom listens on ")
        log = process.stderr.read()
        assert " INFO stillroom.rag.preparing: prepared 3 chunks\n" in log
        assert " INFO stillroom.retrieval.reembedding: changing\n" in log


def test_a_second_signal_ends_the_grace_period() -> None:
    with launched("--port", "0", "--json") as process:
        assert process.stdout
        url = json.loads(process.stdout.readline())["url"]
        with streaming(url) as lines:
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/readyz").status_code == 503)
            process.send_signal(signal.SIGINT)
            assert "shutting_down" in [line for line in lines if line][-1]
        assert process.wait(20) == 0


def test_signals_stop_a_server_during_an_upload() -> None:
    with launched("--port", "0", "--json") as process:
        assert process.stdout and process.stderr
        url = json.loads(process.stdout.readline())["url"]
        document = {"documents": [{"name": "a.md", "text": "a"}]}
        assert httpx.post(f"{url}/v1/documents", json=document, params={"wait": 0}).status_code == 202
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/readyz").status_code == 503)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read().endswith("knowledge base closed\n")


def test_json_prints_one_object_when_ready() -> None:
    with launched("--port", "0", "--json") as process:
        assert process.stdout and process.stderr
        ready = json.loads(process.stdout.readline())
        assert httpx.get(f"{ready['url']}/healthz").json()["model"] == ready["model"]
        assert str(ready["port"]) in ready["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_taken_port_is_an_error_before_loading(run: Run, opened: Opened) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("serve", "--port", other.getsockname()[1])

    assert result.code == 1
    assert "is taken; choose another with --port" in result.err
    assert opened.calls == []


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_host_of_another_machine_exits_2(run: Run, opened: Opened, host: str) -> None:
    result = run("serve", "--host", host, "--port", "0")

    assert result.code == 2
    assert host in result.err


def test_port_is_released_when_opening_fails(
    run: Run, opened: Opened, fake: FakeStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "warm_up", fail)

    assert run("serve", "--port", "0").code == 130
    assert fake.is_closed


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]")])
def test_url_can_be_used_by_local_clients(host: str, shown: str) -> None:
    try:
        server = HttpServer(host, 0)
    except Exception:
        pytest.skip(f"no {host} on this machine")
    try:
        assert server.url == f"http://{shown}:{server.port}"
    finally:
        server.close()


def test_serving_other_machines_without_keys_prints_a_warning(
    run: Run, opened: Opened, fake: FakeStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpServer, "run", lambda _, load, *__: load(Loading()))

    assert "no key is asked for" in run("serve", "--host", "0.0.0.0", "--port", "0", "--insecure").err
    assert "no key is asked for" not in run("serve", "--host", "127.0.0.1", "--port", "0").err


def test_serve_creates_a_missing_knowledge_base(
    run: Run, opened: Opened, fake: FakeStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new container has no knowledge base."""
    monkeypatch.setattr(HttpServer, "run", lambda _, load, *__: load(Loading()))
    monkeypatch.setattr(FakeStillroom, "num_documents", 0)

    found = run("serve", "--kb", "new", "--port", "0")

    assert found.code == 0 and "new has no documents yet: stillroom add PATH --kb new" in found.err
    assert [create for _, _, create in opened.calls] == [True]


def test_front_waits_for_its_first_engine(
    run: Run,
    opened: Opened,
    fake: FakeStillroom,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fronts and engines of a cluster start in any order."""
    monkeypatch.setattr(HttpServer, "run", lambda _, load, *__: load(Loading()))
    outcomes: list[str | None] = []

    def warm_up() -> None:
        if outcome := outcomes.pop(0):
            raise EngineUnavailableError(outcome)

    monkeypatch.setattr(fake, "warm_up", warm_up)
    outcomes += ["no engine took requests within 30 s", "no engine took requests within 30 s", None]
    assert run("serve", "--port", "0", "--engines", "http://127.0.0.1:9").code == 0 and not outcomes
    assert caplog.text.count("the server waits for an engine") == 2

    outcomes += ["the server is away"]
    assert run("serve", "--port", "0", "--base-url", "http://127.0.0.1:9/v1").code == 1


def test_thread_switch_interval_is_short_while_serving() -> None:
    before = sys.getswitchinterval()
    with serving(as_stillroom(FakeStillroom())) as url:
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.05)  # it counts microseconds
    assert sys.getswitchinterval() == pytest.approx(before, rel=0.05)


def test_stop_before_run_makes_run_return_at_once() -> None:
    from stillroom.server.app import create_app

    server = HttpServer("127.0.0.1", 0)
    server.stop()
    app = create_app(as_stillroom(FakeStillroom()))
    thread = threading.Thread(target=server.run, args=(lambda _: app, lambda: None))
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
