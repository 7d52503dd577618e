"""`make gpu-check` without a GPU: its steps, its limits of time and its report, with other commands."""

import json
from pathlib import Path

import pytest
import torch

from stillroom_bench.quality.runtime import Shape
from tests import gpu_check
from tests.gpu_check import Outcome, Step

TINY = Shape(
    vocab_size=1000, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)


def code(title: str, text: str, max_seconds: float = 60) -> Step:
    return Step(title, ("python", "-c", text), max_seconds)


def test_steps_run_on_after_a_failure_and_the_report_shows_it() -> None:
    written: list[str] = []
    todo = [code("fails", "print('why'); raise SystemExit(3)"), code("works", "print('fine')")]
    outcomes = gpu_check.run(todo, lambda outcomes: written.append(gpu_check.report(outcomes, "a machine", "")))

    assert [one.result for one in outcomes] == ["failed", "passed"]
    assert "| fails | failed |" in written[0] and "works" not in written[0]
    assert "## fails: failed\n\n```\nwhy\n```" in written[1] and "fine" not in written[1]


def test_a_step_that_hangs_is_ended_and_none_begins_after_the_budget() -> None:
    times = iter([0.0, 0.0, 0.0, 1.0, gpu_check.BUDGET_SECONDS + 1])
    todo = [code("hangs", "import sys, threading; print('so far', flush=True); threading.Event().wait()", 1.0)]
    outcomes = gpu_check.run([*todo, code("late", "")], lambda _: None, lambda: next(times))
    assert [one.result for one in outcomes] == ["took too long", "left out"]
    assert outcomes[0].output == "so far\n"


def test_every_step_names_files_that_exist(tmp_path: Path) -> None:
    todo = gpu_check.steps(tmp_path, tmp_path)
    for step in todo:
        for part in step.command:
            assert not part.startswith("tests") or (gpu_check.ROOT / part).exists(), part
    assert sum(step.max_seconds for step in todo) > gpu_check.BUDGET_SECONDS / 2


@pytest.mark.slow
def test_speed_is_measured_with_the_products_own_command(tmp_path: Path) -> None:
    step = gpu_check.steps(gpu_check.checkpoint_of(TINY, tmp_path), tmp_path / "kb")[-1]
    (outcome,) = gpu_check.run([step], lambda _: None)
    assert outcome.result == "passed", outcome.output

    found = json.loads(outcome.output[outcome.output.index("{") :])
    table = gpu_check.speed_table(outcome.output, TINY, (1e12, 1e10))
    assert table.count("\n| ") == 1 + sum(map(len, found["seconds"]))
    assert "host to device: " in table
    flops = TINY.prefill_flops(found["new"][-1])
    share = flops / found["seconds"][0][-1] / 1e12
    assert f"| 0 | {found['new'][-1]:,} | {1000 * found['seconds'][0][-1]:.2f} | {share:.2f} |" in table


def test_output_that_is_no_measurement_gives_no_table() -> None:
    for output in ("", "error", '{"error": {}}'):
        assert gpu_check.speed_table(output, TINY, (1.0, 1.0)) == ""


def test_limits_are_positive() -> None:
    assert min(gpu_check.limits("cpu")) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["-o", str(tmp_path / "report.md")]) == 2
    assert "no CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_report_does_not_name_folders_of_this_machine() -> None:
    failed = Outcome(code("fails", ""), "failed", 1.0, f"{gpu_check.ROOT}/tests/x.py: wrong")
    assert "./tests/x.py: wrong" in gpu_check.report([failed], "a machine", "")
