"""`stillroom engine` in its own processes, with a small real model: start, stop, and fronts and engines that die."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from stillroom.core.request import FinishReason
from stillroom.rag.stillroom import Stillroom
from tests.cli.harness import Run
from tests.server.engines import EOS, EngineClient, asking, collected, resumed, sample, small_model
from tests.server.fakes import until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from stillroom.cli.main import main; main()"
FRONT = """
import sys, httpx
with httpx.stream("POST", sys.argv[1], content=sys.argv[2], timeout=60) as response:
    for line in response.iter_lines():
        print(line, flush=True)
"""
ENDLESS = sample("long", max_tokens=3000, temperature=1.0, top_k=8, seed=4, logit_bias={EOS: -50.0})


def test_other_machines_need_the_secret(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("engine", "--host", "0.0.0.0", "--model", "bundled:microworld")
    assert result.code == 2
    assert "other machines can reach 0.0.0.0" in result.err and "STILLROOM_CLUSTER__SECRET" in result.err


def test_a_model_that_generates_nothing_is_refused(run: Run) -> None:
    result = run("engine", "--json")
    assert result.code == 2
    assert "--model bundled:microworld" in json.loads(result.err)["error"]["message"]


def test_a_missing_knowledge_base_is_not_made(run: Run, tmp_path: Path) -> None:
    result = run("engine", "--kb", tmp_path / "none", "--model", "bundled:microworld", "--port", 0)
    assert result.code == 2 and "none" in result.err
    assert not (tmp_path / "none").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "kb"
    Stillroom.open(folder).close()
    return folder


@contextmanager
def launched(kb: Path, model: Path) -> Iterator[tuple["subprocess.Popen[str]", EngineClient]]:
    """Yield the process of an engine that is ready, and a client of it."""
    settings = {
        "STILLROOM_RUNTIME__DTYPE": "float32",
        "STILLROOM_RUNTIME__KV_BYTES": "8MiB",
        "STILLROOM_RUNTIME__NUM_THREADS": "1",
        "STILLROOM_SERVER__GRACE_S": "60",
    }
    command = [sys.executable, "-c", PROGRAM, "engine", "--kb", str(kb), "--model", str(model), "--port", "0", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env={**os.environ, **settings}
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            with httpx.Client(base_url=told["url"], timeout=60) as http:
                client = EngineClient(http)
                assert client.info().run == told["run"]
                yield process, client
        finally:
            process.kill()


@pytest.mark.slow
def test_an_answer_goes_on_at_another_engine_when_its_engine_is_killed(kb: Path, model: Path) -> None:
    request = asking(sample(max_tokens=400, temperature=1.0, top_k=8, seed=4, logit_bias={EOS: -50.0}))
    with launched(kb, model) as (_, other):
        [expected] = other.ask(request)
        with launched(kb, model) as (first, client):
            received: list[str] = []
            with (
                pytest.raises(httpx.RemoteProtocolError),
                client.http.stream("POST", "/engine/v1/answers", json=request.to_json()) as response,
            ):
                for line in response.iter_lines():
                    received.append(line)
                    if len(received) == 3:
                        first.kill()
            [begun] = collected([line for line in received if line], 1)
            assert not begun.ends and 0 < len(begun.tokens) < 400
            assert client.http.base_url != other.http.base_url
        [rest] = other.ask(resumed(request, [begun], [len(begun.tokens)]))
    assert begun.tokens + rest.tokens == expected.tokens and rest.ends == expected.ends


@pytest.mark.slow
def test_requests_of_a_front_that_is_killed_end(kb: Path, model: Path) -> None:
    with launched(kb, model) as (_, client):
        address = f"{str(client.http.base_url).rstrip('/')}/engine/v1/answers"
        body = json.dumps(asking(ENDLESS).to_json())
        with subprocess.Popen([sys.executable, "-c", FRONT, address, body], stdout=subprocess.PIPE, text=True) as dying:
            assert dying.stdout is not None and dying.stdout.readline()
            assert client.state().num_outstanding == 1
            dying.kill()
        until(lambda: client.state().num_running == client.state().num_outstanding == 0)
        state = client.state()
        assert state.num_free_blocks == state.num_blocks


@pytest.mark.slow
def test_sigterm_completes_what_runs_and_a_second_one_ends_it(kb: Path, model: Path) -> None:
    for num_signals in (1, 2):
        with launched(kb, model) as (process, client):
            request = asking(sample(max_tokens=500 if num_signals == 1 else 4000, logit_bias={EOS: -50.0}))
            with client.http.stream("POST", "/engine/v1/answers", json=request.to_json()) as response:
                lines = response.iter_lines()
                received = [next(lines)]
                process.send_signal(signal.SIGTERM)
                until(lambda: client.http.get("/readyz").status_code == 503)
                if num_signals == 2:
                    process.send_signal(signal.SIGTERM)
                received += [line for line in lines if line]
            [one] = collected(received, 1)
            if num_signals == 1:
                assert (len(one.tokens), one.ends) == (500, [FinishReason.LENGTH])
            else:
                assert one.ends == [FinishReason.ABORTED] and one.failure is not None and one.failure.may_move
            assert process.wait(30) == 0


@pytest.mark.slow
def test_engines_of_one_folder_keep_their_kv_each_and_find_it_again(kb: Path, model: Path) -> None:
    request = asking(chunks=[[40 + index % 50 for index in range(64)]], seed=3)
    held = []
    for _ in range(2):
        with launched(kb, model) as (first, one), launched(kb, model) as (second, other):
            held.append([len(one.state().changes), len(other.state().changes)])
            for client in (one, other):
                client.ask(request)
            for process in (second, first):
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
    assert held[0] == [0, 0]
    assert min(held[1]) > 0, "each found what it had stored"
