"""Tests the commands of `python -m training` that need no training, and their errors."""

from pathlib import Path

import pytest

from training.__main__ import run_command


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run_command(list(arguments))
    output = capsys.readouterr()
    return int(end.value.code or 0), output.out, output.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "--recipe", "huge"], "smoke, 12m, 30m"),
        (["train", "--recipe", "smoke", "--data", "nowhere", "--out", "nowhere/run"], "nowhere"),
        (["export", "--run", "nowhere"], "train first"),
        (["bundle", "--name", "x", "--model", "nowhere"], "lacks README.md"),
        (["data", "--shared", "nowhere"], "nowhere"),
        (["evaluate", "--model", "bundled:nothing", "--data", "nowhere"], "python -m training data"),
        (["reader", "bundle", "--checkpoint", "nowhere/checkpoint.pt"], "python -m training reader train"),
        (["reader", "evaluate", "--dtype", "int8"], "use bfloat16 or float32"),
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
