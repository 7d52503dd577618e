"""A front with engines in real processes, which are killed, stopped, restarted and misconfigured."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
from tests.server import fakes

pytestmark = pytest.mark.slow

DEADLINE_S = 240.0
"""For the start, the end or a report of an engine, on a machine that has other work."""
NUM_TOKENS = 200
NUM_LONG_TOKENS = 50_000
"""Of an answer that outlasts the start of a front."""
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
until = functools.partial(fakes.until, deadline_s=DEADLINE_S)


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
        self.process.wait(DEADLINE_S)
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
    def front(
        self, *engines: EngineProcess, others: Sequence[EngineProcess] = (), **settings: Any
    ) -> Iterator[Stillroom]:
        """Open a front once its engines take requests, whatever tests before have done to them.

        Args:
            engines: of the front; by default both.
            others: engines that take no requests of this front.
        """
        used = engines or self.engines
        for one in used:
            if not one.is_running:
                one.start()
        urls = ",".join(one.url for one in (*used, *others))
        config = replace(self.config, engine=EngineConfig(kind="cluster", urls=urls, **settings))
        with Stillroom.open(self.kb, config=config) as front:
            front.warm_up()
            engine = backend_of(front).engine
            until(lambda: all(engine.alive.get(one.url) for one in used))
            yield front

    def engine_of(self, stream: AnswerStream) -> EngineProcess:
        """Return the engine that generates an answer now."""
        route = stream._collector._progress.route
        assert route is not None
        return next(one for one in self.engines if engine_name(one.url) == route.engine)


def backend_of(front: Stillroom) -> ClusterBackend:
    backend = front._loader.backend
    assert isinstance(backend, ClusterBackend)
    return backend


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("processes")
    model = folder / "model"
    random_checkpoint(model, "Llama", num_hidden_layers=2, eos_token_id=1, max_position_embeddings=2**16)
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
        engine = backend_of(front).engine
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
            until(lambda url=killed.url: engine.alive[url])  # type: ignore[misc]


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
        used = processes.engines[0]
        front = opened.enter_context(processes.front(used, others=(other, locked)))
        for way in WAYS.values():
            answer = front.ask(QUESTION, way)
            assert answer.route is not None and answer.route.engine == engine_name(used.url)
        engines = backend_of(front).engine._engines
        until(lambda: "fingerprint" in engines.problems.get(other.url, ""))
        until(lambda: "STILLROOM_CLUSTER__SECRET" in engines.problems.get(locked.url, ""))
        assert used.url not in engines.problems


def test_without_an_engine_requests_wait_and_fail_and_the_front_is_not_ready(processes: Processes) -> None:
    engine = EngineProcess(processes.kb, processes.model)
    try:
        with processes.front(engine, wait_s=10.0) as front:
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
        "num_tokens = int(sys.argv[3])\n"
        "pieces = iter(front.stream(sys.argv[2], AskOptions(min_tokens=num_tokens, max_tokens=num_tokens)))\n"
        "next(pieces); print('begun', flush=True); time.sleep(3600)\n"
    )
    engine = processes.engines[0]
    environment = {
        **os.environ,
        **SETTINGS,
        "STILLROOM_RUNTIME__MODEL": processes.model,
        "STILLROOM_ENGINE__KIND": "cluster",
        "STILLROOM_ENGINE__URLS": engine.url,
    }
    command = [sys.executable, "-c", program, str(processes.kb), QUESTION, str(NUM_LONG_TOKENS)]
    with processes.front(engine) as watcher:
        backend = backend_of(watcher)
        before = watcher.stream(QUESTION, AskOptions(min_tokens=NUM_LONG_TOKENS, max_tokens=NUM_LONG_TOKENS))
        pieces = iter(before)
        next(pieces)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
            try:
                assert front.stdout and front.stdout.readline() == "begun\n"
                until(lambda: backend.load.num_running == 2)
            finally:
                front.kill()
        until(lambda: backend.load.num_running == 1)
        assert before.request_id in backend.engine._requests, "what has ended is the later one of equal length"
        before.cancel()
        until(lambda: backend.load.num_running == 0)
