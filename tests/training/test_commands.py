"""Tests the commands of `python -m training` that need no training, and their errors."""

import json
from pathlib import Path

import pytest

from training.__main__ import run_command
from training.recipe import RECIPES


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run_command(list(arguments))
    output = capsys.readouterr()
    return int(end.value.code or 0), output.out, output.err


def test_reckon_prints_the_size_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "reckon", "--recipe", "12m", "--tflops", "50")
    assert code == 0
    assert json.loads(out)["parameters"] == RECIPES["12m"].shape.num_parameters


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["reckon", "--recipe", "huge"], "early, smoke, 12m, 30m"),
        (["train", "--recipe", "early", "--data", "nowhere", "--out", "nowhere/run"], "nowhere"),
        (["export", "--run", "nowhere"], "train first"),
        (["bundle", "--name", "x", "--model", "nowhere"], "lacks README.md"),
        (["data", "--shared", "nowhere"], "nowhere"),
        (["evaluate", "--model", "bundled:nothing", "--data", "nowhere"], "python -m training data"),
    ],
)
def test_error_is_printed_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = ran(capsys, *arguments)
    assert code == 2 and hint in err and "Traceback" not in err
