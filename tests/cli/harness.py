"""Runs commands inside the test process, with a fake Stillroom."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stillroom.cli import main, opening
from stillroom.config.settings import StillroomConfig
from tests.server.fakes import FakeStillroom


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


class Opened:
    """Replacement of `open_stillroom` that records its calls."""

    def __init__(self, fake: FakeStillroom) -> None:
        self.fake = fake
        self.calls: list[tuple[Path, StillroomConfig, bool]] = []

    def __call__(self, kb: Path, config: StillroomConfig, *, create: bool = False) -> FakeStillroom:
        self.calls.append((kb, config, create))
        self.fake.config = config
        return self.fake


def runner(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*args: object) -> Result:
        capfd.readouterr()
        code = main.run([str(arg) for arg in args])
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def use_fake(monkeypatch: pytest.MonkeyPatch, fake: FakeStillroom) -> Opened:
    opened = Opened(fake)
    monkeypatch.setattr(opening, "open_stillroom", opened)
    return opened
