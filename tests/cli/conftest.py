"""Fixtures of command tests."""

from pathlib import Path

import pytest

from tests.cli.harness import Opened, Run, runner, use_fake
from tests.server.fakes import FakeStillroom


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use an empty current folder and no settings of this machine."""
    monkeypatch.chdir(tmp_path)
    for name in ("STILLROOM_KB", "STILLROOM_CONFIG", "STILLROOM_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process."""
    return runner(capfd)


@pytest.fixture
def fake() -> FakeStillroom:
    return FakeStillroom()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, fake: FakeStillroom) -> Opened:
    """Makes commands open the fake; records their arguments."""
    return use_fake(monkeypatch, fake)
