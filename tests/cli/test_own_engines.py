"""`stillroom serve --replicas N`: what its engines and their front get; nothing outlives the server."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillroom.cli.own_engines import NoEngines, engines_of
from stillroom.config.settings import ClusterConfig, EngineConfig, ReuseConfig, RuntimeConfig, StillroomConfig
from stillroom.errors import UsageError
from stillroom.supervision.replicas import Replicas
from tests.cli.harness import Opened, Run
from tests.server.fakes import until

ROOT = Path(__file__).resolve().parents[2]
GAZETTEER = ROOT / "examples" / "gazetteer"
MODEL = "bundled:microworld"
ASKED = StillroomConfig(runtime=RuntimeConfig(model=MODEL, device="cpu"))


def test_front_of_own_engines_reads_their_list_and_knows_their_secret() -> None:
    engines, front = engines_of(Path("kb"), ASKED, 2)
    assert isinstance(engines, Replicas)
    assert (front.engine.kind, front.engine.urls) == ("cluster", engines.address)
    assert len(front.cluster.secret) > 30
    assert replace(front, engine=ASKED.engine, cluster=ASKED.cluster) == ASKED
    other, again = engines_of(Path("kb"), ASKED, 2)
    assert again.cluster.secret != front.cluster.secret
    given = replace(ASKED, cluster=ClusterConfig(secret="given"))
    third, known = engines_of(Path("kb"), given, 2)
    assert known.cluster.secret == "given"
    for one in (engines, other, third):
        one.close()


def test_server_without_replicas_keeps_its_settings() -> None:
    engines, settings = engines_of(Path("kb"), ASKED, None)
    assert isinstance(engines, NoEngines) and settings is ASKED


def test_engines_get_their_share_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Started:
        def __init__(self, arguments: list[str], environment: dict[str, str], **_: Any) -> None:
            started.append((arguments, environment))
            raise OSError(0, "no process")

    monkeypatch.setattr("stillroom.cli.own_engines.ChildProcess", Started)
    config = replace(ASKED, reuse=ReuseConfig(host_bytes=900), server=replace(ASKED.server, keys_file="/keys.json"))
    engines, _ = engines_of(Path("my kb"), config, 3)
    with pytest.raises(Exception, match="no process"):
        engines.start(lambda text: None)
    arguments, environment = started[0]
    assert arguments[0] == "engine" and "--json" in arguments and arguments[arguments.index("--kb") + 1] == "my kb"
    assert environment["STILLROOM_REUSE__HOST_BYTES"] == "300"
    assert environment["STILLROOM_RUNTIME__MODEL"] == MODEL
    assert environment["STILLROOM_CLUSTER__SECRET"]
    assert not {"STILLROOM_SERVER__KEYS_FILE", "STILLROOM_ENGINE__KIND", "STILLROOM_SERVER__HOST"} & environment.keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(ASKED, engine=EngineConfig(kind="openai", base_url="http://a/v1")), "engine.kind = 'openai'"),
        (replace(ASKED, engine=EngineConfig(kind="cluster", urls="http://a:1")), "engine.kind = 'cluster'"),
        (
            StillroomConfig(),
            "bundled:reader quotes documents; name one that generates, such as --model bundled:microworld",
        ),
    ],
)
def test_settings_without_engines_to_start_are_refused(config: StillroomConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engines_of(Path("kb"), config, 2)


def test_wrong_use_of_the_flag_exits_2(run: Run, opened: Opened) -> None:
    assert run("serve", "--port", "0", "--replicas", "2").code == 2
    assert run("serve", "--port", "0", "--replicas", "0", "--model", MODEL).code == 2
    assert opened.calls == []


class Server:
    """A running `stillroom serve --replicas 2`."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process, self._log = process, log
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, self.log
        self.url: str = json.loads(ready)["url"]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def engines(self) -> list[int]:
        """Process numbers of all engines that were ever ready."""
        return [int(number) for number in re.findall(r"is ready at http://\S+ \(process (\d+)\)", self.log)]

    def ask(self, question: str, **options: object) -> dict[str, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], **options}
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


@contextmanager
def serving(kb: Path, *arguments: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "stillroom.cli.main", "serve", "--kb", str(kb), "--model", MODEL, "--port", "0"]
    log = kb.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, "STILLROOM_RUNTIME__DTYPE": "float32", "STILLROOM_RUNTIME__KV_BYTES": "64MiB"},
        )
    with process:
        try:
            yield Server(process, log)
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_real_engines_answer_as_one_process_and_nothing_outlives_their_server(tmp_path: Path) -> None:
    kb = tmp_path / "kb"
    add = [sys.executable, "-m", "stillroom.cli.main", "add", str(GAZETTEER), "--kb", str(kb), "--quiet"]
    subprocess.run(add, check=True, cwd=ROOT)
    questions = (ROOT / "examples" / "gazetteer_questions.txt").read_text().splitlines()[:4]

    with serving(kb) as alone:
        expected = [alone.ask(question)["choices"][0]["message"]["content"] for question in questions]

    with serving(kb, "--replicas", "2") as server:
        assert len(server.engines) == 2
        assert [server.ask(question)["choices"][0]["message"]["content"] for question in questions] == expected
        os.kill(server.engines[0], signal.SIGKILL)
        assert [server.ask(question)["choices"][0]["message"]["content"] for question in questions] == expected
        until(lambda: len(server.engines) == 3, 120)
        assert "ended with signal SIGKILL; it is started again in 1 s" in server.log
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert not any(is_running(pid) for pid in server.engines)

    with serving(kb, "--replicas", "1") as killed:
        killed.process.kill()
        until(lambda: not is_running(killed.engines[0]), 60)
