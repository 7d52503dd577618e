"""A front with engines in real processes, which are killed, stopped, restarted and misconfigured."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stillroom.backends.cluster_backend import ClusterBackend
from stillroom.cluster.front_engines import engine_name
from stillroom.config.settings import EngineConfig, StillroomConfig
from stillroom.core.request import FinishReason
from stillroom.errors import EngineUnavailableError
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.rag.stream import AnswerStream
from tests.fakes import byte_tokenizer, random_checkpoint
from tests.server.fakes import until

pytestmark = pytest.mark.slow

NUM_TOKENS = 200
NUM_KILLS = int(os.environ.get("STILLROOM_TEST_KILLS", "20"))
"""Each needs the start of an engine."""
QUESTION = "How are keys rotated?"
WAYS = {
    "greedy": AskOptions(min_tokens=NUM_TOKENS, max_tokens=NUM_TOKENS),
    "sampled": AskOptions(temperature=1.2, seed=3, min_tokens=NUM_TOKENS, max_tokens=NUM_TOKENS, logprobs=1),
}
SETTINGS = {
    "STILLROOM_RUNTIME__DTYPE": "float32",
    "STILLROOM_RUNTIME__NUM_THREADS": "1",
    "STILLROOM_RUNTIME__KV_BYTES": "64MiB",
    "STILLROOM_REUSE__LOAD": "always",
    "STILLROOM_SERVER__GRACE_S": "5",
}


class EngineProcess:
    """`stillroom engine` on a port of its own, which a restart keeps."""

    def __init__(self, kb: Path, model: str, **environment: str) -> None:
        self._command = [sys.executable, "-m", "stillroom.cli.main", "engine", "--kb", str(kb), "--model", model]
        self._environment = {**os.environ, **SETTINGS, **environment}
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        command = [*self._command, "--port", str(self.port), "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self._environment
        )
        assert self.process.stdout
        self.port = json.loads(self.process.stdout.readline())["port"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> None:
        """Wait for its end."""
        self.process.wait(120)
        if self.process.stdout:
            self.process.stdout.close()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.send(signal.SIGCONT)
        self.kill()


@dataclass
class Processes:
    kb: Path
    model: str
    config: StillroomConfig
    engines: list[EngineProcess]
    expected: dict[str, Answer]
    """Of one process."""

    @contextlib.contextmanager
    def front(self, *engines: EngineProcess, **settings: Any) -> Iterator[Stillroom]:
        for one in self.engines:
            if not one.is_running:
                one.start()
        urls = ",".join(one.url for one in engines or self.engines)
        engine = EngineConfig(kind="cluster", urls=urls, **settings)
        with Stillroom.open(self.kb, config=replace(self.config, engine=engine)) as front:
            front.warm_up()
            backend = front._loader.backend
            assert isinstance(backend, ClusterBackend)
            until(lambda: all(backend.engine.alive.get(one.url) for one in engines or self.engines))
            yield front

    def engine_of(self, stream: AnswerStream) -> EngineProcess:
        """Return the engine that generates an answer now."""
        route = stream._collector._progress.route
        assert route is not None
        return next(one for one in self.engines if engine_name(one.url) == route.engine)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("processes")
    model = folder / "model"
    random_checkpoint(model, "Llama", num_hidden_layers=2, eos_token_id=1, max_position_embeddings=4096)
    byte_tokenizer().save_pretrained(model)
    (folder / "keys.md").write_text("# Keys\n\nKeys are rotated every 90 days, by the operator.\n")
    runtime = replace(StillroomConfig().runtime, model=str(model), dtype="float32", num_threads=1, kv_bytes=2**26)
    config = replace(StillroomConfig(), runtime=runtime)
    kb = folder / "kb"
    with Stillroom.open(kb, config=config) as single:
        single.add(folder / "keys.md")
        expected = {name: single.ask(QUESTION, way) for name, way in WAYS.items()}
    with contextlib.ExitStack() as opened:
        engines = []
        for _ in range(2):
            engines.append(EngineProcess(kb, str(model)))
            opened.callback(engines[-1].close)
        yield Processes(kb, str(model), config, engines, expected)


def check(answer: Answer, expected: Answer) -> None:
    assert (answer.text, answer.token_ids, answer.finish_reason) == (
        expected.text,
        expected.token_ids,
        expected.finish_reason,
    )
    assert answer.sources == expected.sources and answer.num_generated_tokens == NUM_TOKENS
    # behind a broken stream, tokens are computed again as a prompt, whose sums have another order
    found, wanted = ([one.logprob for one in of.logprobs or ()] for of in (answer, expected))
    assert found == pytest.approx(wanted, abs=1e-4)


def test_killed_engines_change_no_answer(processes: Processes) -> None:
    """Two answers run while the engine of one is killed, at another token each time."""
    with processes.front(max_migrations=5) as front:
        for number in range(NUM_KILLS):
            name = ("greedy", "sampled")[number % 2]
            stream, beside = front.stream(QUESTION, WAYS[name]), front.stream(QUESTION, WAYS["greedy"])
            pieces = iter(stream)
            for _ in range(1 + number * NUM_TOKENS // (3 * NUM_KILLS)):
                next(pieces, "")
            killed = processes.engine_of(stream)
            killed.kill()
            for _ in pieces:
                pass
            check(stream.answer, processes.expected[name])
            check(beside.read_to_end(), processes.expected["greedy"])
            assert stream.answer.route is not None and stream.answer.route.engine != engine_name(killed.url)
            assert stream.answer.route.num_migrations == 1 and stream.answer.route.is_resumed
            killed.start()
            backend = front._loader.backend
            assert isinstance(backend, ClusterBackend)
            until(lambda alive=backend.engine, url=killed.url: alive.alive[url])  # type: ignore[misc]


def test_stopped_engine_is_left_after_its_silence(processes: Processes) -> None:
    with processes.front(silence_s=6.0) as front:
        stream = front.stream(QUESTION, WAYS["sampled"])
        pieces = iter(stream)
        next(pieces)
        stopped = processes.engine_of(stream)
        stopped.send(signal.SIGSTOP)
        try:
            for _ in pieces:
                pass
            check(stream.answer, processes.expected["sampled"])
            again = front.ask(QUESTION, WAYS["greedy"])
            check(again, processes.expected["greedy"])
            assert again.route is not None and again.route.engine != engine_name(stopped.url)
        finally:
            stopped.send(signal.SIGCONT)


def test_engine_that_drains_ends_its_answers_and_gets_no_others(processes: Processes) -> None:
    with processes.front() as front:
        stream = front.stream(QUESTION, WAYS["greedy"])
        pieces = iter(stream)
        next(pieces)
        drained = processes.engine_of(stream)
        drained.send(signal.SIGTERM)
        for _ in pieces:
            pass
        check(stream.answer, processes.expected["greedy"])
        other = front.ask(QUESTION, WAYS["sampled"])
        check(other, processes.expected["sampled"])
        assert other.route is not None and other.route.engine != engine_name(drained.url)
        drained.wait()


def test_engine_of_another_model_or_secret_gets_nothing(processes: Processes, tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1, eos_token_id=1, max_position_embeddings=4096)
    byte_tokenizer().save_pretrained(tmp_path)
    with contextlib.ExitStack() as opened:
        other = EngineProcess(processes.kb, str(tmp_path))
        opened.callback(other.close)
        locked = EngineProcess(processes.kb, processes.model, STILLROOM_CLUSTER__SECRET="a-secret")
        opened.callback(locked.close)
        urls = ",".join((processes.engines[0].url, other.url, locked.url))
        engine = EngineConfig(kind="cluster", urls=urls)
        front = opened.enter_context(Stillroom.open(processes.kb, config=replace(processes.config, engine=engine)))
        front.warm_up()
        backend = front._loader.backend
        assert isinstance(backend, ClusterBackend)
        until(lambda: {other.url, locked.url} <= {url for url, alive in backend.engine.alive.items() if not alive})
        for way in WAYS.values():
            answer = front.ask(QUESTION, way)
            assert answer.route is not None and answer.route.engine == engine_name(processes.engines[0].url)
        problems = backend.engine._engines.problems
        assert "fingerprint" in problems[other.url] and "STILLROOM_CLUSTER__SECRET" in problems[locked.url]


def test_without_an_engine_requests_wait_and_fail_and_the_front_is_not_ready(processes: Processes) -> None:
    engine = EngineProcess(processes.kb, processes.model)
    try:
        with processes.front(engine, wait_s=2.0) as front:
            assert front.is_ready
            engine.kill()
            until(lambda: not front.is_ready)
            assert front.device_problem == "no engine takes requests now"
            with pytest.raises(EngineUnavailableError, match="no engine takes requests|cannot be reached"):
                front.ask(QUESTION)
            assert front.search(QUESTION).results, "search needs no engine"
            engine.start()
            until(lambda: front.is_ready)
            assert front.ask(QUESTION, WAYS["greedy"]).finish_reason == FinishReason.LENGTH
    finally:
        engine.close()


def test_front_that_dies_leaves_nothing_running(processes: Processes) -> None:
    program = (
        "import sys, time; from pathlib import Path; from stillroom.config.load import load_config\n"
        "from stillroom.rag.answer import AskOptions; from stillroom.rag.stillroom import Stillroom\n"
        "front = Stillroom.open(Path(sys.argv[1]), config=load_config())\n"
        "stream = front.stream(sys.argv[2], AskOptions(min_tokens=3000, max_tokens=3000))\n"
        "next(iter(stream)); print('begun', flush=True); time.sleep(600)\n"
    )
    engine = processes.engines[0]
    environment = {
        **os.environ,
        **SETTINGS,
        "STILLROOM_RUNTIME__MODEL": processes.model,
        "STILLROOM_ENGINE__KIND": "cluster",
        "STILLROOM_ENGINE__URLS": engine.url,
    }
    command = [sys.executable, "-c", program, str(processes.kb), QUESTION]
    with (
        processes.front(engine) as watcher,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front,
    ):
        backend = watcher._loader.backend
        assert isinstance(backend, ClusterBackend) and front.stdout
        assert front.stdout.readline() == "begun\n"
        until(lambda: backend.load.num_running == 1)
        front.kill()
        until(lambda: backend.load.num_running == 0)
