"""Several child processes: listed while they are ready, started again when they end, ended together."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stillroom.core.clock import VirtualClock
from stillroom.errors import EngineError
from stillroom.supervision import restarts
from stillroom.supervision.child_process import ChildProcess
from stillroom.supervision.replicas import Replicas
from stillroom.supervision.restarts import MAX_ENDS
from tests.server.fakes import until
from tests.supervision.children import child, url_of


class Launches:
    """Starts children of the kinds that a test sets, and keeps them."""

    def __init__(self) -> None:
        self.kind = "ready"
        self.kinds: dict[int, str] = {}
        self.started: list[ChildProcess] = []
        self.is_failing = False

    def __call__(self, number: int) -> ChildProcess:
        if self.is_failing:
            raise OSError(11, "Resource temporarily unavailable")
        process = child(self.kinds.get(number, self.kind))
        self.started.append(process)
        return process


@pytest.fixture
def launches() -> Iterator[Launches]:
    made = Launches()
    yield made
    for one in made.started:
        assert not one.is_running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 0.001)


def engines(launches: Launches, num_engines: int = 2) -> Replicas:
    return Replicas(launches, num_engines, VirtualClock(), stop_seconds=20.0)


def listed(replicas: Replicas) -> set[str]:
    return set(Path(urlsplit(replicas.address).path).read_text().split())


def test_all_engines_are_ready_and_listed_and_end_together(launches: Launches) -> None:
    shown: list[str] = []
    with engines(launches, 3) as replicas:
        assert listed(replicas) == set()
        replicas.start(shown.append)
        assert listed(replicas) == {url_of(one) for one in launches.started}
        assert len(launches.started) == 3 == replicas.num_ready
        file = Path(urlsplit(replicas.address).path)
        assert file.parent.stat().st_mode & 0o777 == 0o700
    assert not file.parent.exists()
    assert shown[0] == "starting engines: 0 of 3 are ready" and shown == sorted(shown)
    assert [one.wait() for one in launches.started] == [0, 0, 0]
    replicas.close()


def test_killed_engine_is_started_again(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), engines(launches) as replicas:
        replicas.start()
        killed, other = launches.started
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: len(launches.started) == 3 and replicas.num_ready == 2)
        until(lambda: listed(replicas) == {url_of(other), url_of(launches.started[2])})  # the list is written next
    assert f"(process {killed.pid}) ended with signal SIGKILL; it is started again in 0.001 s" in caplog.text
    assert f"is ready at {url_of(launches.started[2])} (process {launches.started[2].pid})" in caplog.text


def test_engine_that_ends_again_and_again_is_given_up(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    with engines(launches) as replicas:
        replicas.start()
        launches.kind = "fails"
        first, other = launches.started
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: "it is not started again" in caplog.text)
        assert listed(replicas) == {url_of(other)} and len(launches.started) == 2 + MAX_ENDS
    assert "ended with exit code 2 before it was ready; after more than 5 ends within 10 minutes" in caplog.text
    assert "1 of 2 engines are ready" in caplog.text


def test_engine_counts_as_starting_until_it_is_ready_or_given_up(launches: Launches) -> None:
    with engines(launches) as replicas:
        assert replicas.num_starting == 0
        replicas.start()
        assert replicas.num_starting == 0
        launches.kind = "loading"
        os.kill(launches.started[0].pid, signal.SIGKILL)
        until(lambda: replicas.num_starting == 1)
        until(lambda: len(launches.started) == 3)
        assert replicas.num_starting == 1 and replicas.num_ready == 1
        launches.kind = "fails"
        os.kill(launches.started[2].pid, signal.SIGKILL)
        until(lambda: replicas.num_starting == 0)
        assert replicas.num_ready == 1, "the other one is given up"


def test_first_engine_starts_alone(launches: Launches) -> None:
    launches.kinds = {0: "fails"}
    with pytest.raises(EngineError, match=r"engine 1 \(process \d+\) ended with exit code 2 before it was ready"):
        engines(launches, 3).start()
    assert len(launches.started) == 1


def test_engine_that_is_not_ready_at_first_fails_the_start(launches: Launches) -> None:
    launches.kinds = {1: "fails", 2: "loading"}
    with pytest.raises(EngineError, match=r"engine 2 \(process \d+\) ended with exit code 2 before it was ready"):
        engines(launches, 3).start()


def test_engine_that_cannot_be_started_fails_the_start_and_is_tried_again_later(launches: Launches) -> None:
    launches.is_failing = True
    with pytest.raises(EngineError, match=r"engine \d could not be started \(Resource temporarily unavailable\)"):
        engines(launches).start()
    launches.is_failing = False
    with engines(launches, 1) as replicas:
        replicas.start()
        launches.is_failing = True
        os.kill(launches.started[0].pid, signal.SIGKILL)
        until(lambda: replicas.num_ready == 0)
        launches.is_failing = False
        until(lambda: replicas.num_ready == 1)


def test_closing_ends_engines_that_load_and_starts_none_again(launches: Launches) -> None:
    launches.kinds = {1: "loading"}
    replicas = engines(launches)
    starting = threading.Thread(target=lambda: pytest.raises(EngineError, replicas.start), daemon=True)
    starting.start()
    until(lambda: len(launches.started) == 2 and replicas.num_ready == 1)
    replicas.close()
    assert len(launches.started) == 2
    starting.join(20)
    assert not starting.is_alive()


def test_deaf_engine_is_killed_at_the_end(launches: Launches) -> None:
    launches.kinds = {0: "deaf"}
    replicas = Replicas(launches, 2, VirtualClock(), stop_seconds=0.05)
    replicas.start()
    replicas.close()
    assert sorted(one.wait() for one in launches.started) == [-signal.SIGKILL, 0]
