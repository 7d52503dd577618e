"""Runs all that waits for a GPU, most telling first, in 25 minutes at most, and writes one report: `make gpu-check`.

A step that fails or takes too long does not stop the others. The report is written again after each step, so that a
killed run leaves what it found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stillroom.models import bundled_models
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.quality.runtime import Shape, write_checkpoint

ROOT = Path(__file__).resolve().parents[1]
BUDGET_SECONDS = 25 * 60.0
SHOWN = ("speed of prefill and decoding beside transformers", "first tokens from prepared KV")
"""Steps whose tables the report shows."""
SHOWN_LINES = 40
"""Last lines of a step's output that the report shows if it failed."""


@dataclass(frozen=True)
class Step:
    title: str
    command: tuple[str, ...]
    """Of which `python` is this interpreter."""
    max_seconds: float


@dataclass(frozen=True)
class Outcome:
    step: Step
    result: str
    """`passed`, `failed`, `took too long` or `left out`."""
    seconds: float
    output: str


def _tests(title: str, max_seconds: float, *files: str, marker: str = "not slow") -> Step:
    """Four at a time: most of the time is compiling and Python."""
    options = ("-q", "-n", "4", "--maxfail=5", "-m", marker)
    return Step(title, ("python", "-m", "pytest", *options, *files), max_seconds)


def steps(checkpoint: Path, folder: Path) -> list[Step]:
    """Return the steps; tests run on the GPU (`tests/devices.py`). The last one measures a checkpoint, prints JSON."""
    bench = ("python", "-m", "stillroom.cli.main", "bench")
    on_gpu = ("--device", "cuda", "--size", "1.5b", "--dtype", "bfloat16", "--work-dir", str(folder.parent))
    calibrate = ("python", "-m", "stillroom.cli.main", "calibrate", "--json", "--model", str(checkpoint))
    return [
        _tests("tokens and logits equal transformers'", 240, "tests/models/test_oracle.py"),
        _tests("attention, rotation, experts and sampling equal their references", 300,
               "tests/ops/test_device_attention.py", "tests/ops/test_device_rows.py",
               "tests/models/test_mixture_of_experts.py", "tests/ops/test_sampling.py"),
        _tests("a replayed CUDA graph computes the same", 180, "tests/runner/test_decode_graphs.py"),
        _tests("KV is copied, placed and loaded exactly", 180, "tests/kvstore/test_device.py",
               "tests/kvstore/test_tiered.py", "tests/kvstore/test_narrow_copies.py"),
        _tests("index lists on the device give the same results", 120, "tests/retrieval/tiers/test_device_shard.py"),
        _tests("answers with reuse, placed, prepared and narrow KV", 300, "tests/engine/test_engine.py",
               "tests/engine/test_prepared.py", "tests/engine/test_anywhere.py",
               "tests/engine/test_anywhere_soak.py", "tests/engine/test_narrow_kv.py",
               "tests/engine/test_attention_masses.py"),
        Step(SHOWN[0], (*bench, "runtime", *on_gpu), 120),
        Step(SHOWN[1], (*bench, "prepared", *on_gpu, "--beside", "0"), 120),
        _tests("every other test that needs a GPU", 120, "tests", marker="gpu"),
        Step("speed of steps and loads", (*calibrate, "--kb", str(folder)), 240),
    ]  # fmt: skip


def checkpoint_of(shape: Shape, folder: Path) -> Path:
    """Write a checkpoint of random weights, with the bundled decoder's tokenizer."""
    checkpoint = write_checkpoint(folder, shape, "bfloat16", 0)
    for file in (bundled_models.FOLDER / "microworld").glob("tokenizer*"):
        shutil.copy(file, checkpoint)
    return checkpoint


def run(
    todo: Sequence[Step], write: Callable[[list[Outcome]], None], now: Callable[[], float] = time.monotonic
) -> list[Outcome]:
    """Run the steps one after the other; call `write` with all outcomes so far after each."""
    began, outcomes = now(), list[Outcome]()
    for step in todo:
        left = BUDGET_SECONDS - (now() - began)
        outcomes.append(
            _outcome(step, min(step.max_seconds, left), now) if left > 0 else Outcome(step, "left out", 0, "")
        )
        write(outcomes)
    return outcomes


def _outcome(step: Step, max_seconds: float, now: Callable[[], float]) -> Outcome:
    began = now()
    command = [sys.executable if part == "python" else part for part in step.command]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=max_seconds,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "STILLROOM_TEST_DEVICE": "cuda"}, check=False,
        )  # fmt: skip
        result, output = "passed" if done.returncode == 0 else "failed", done.stdout
    except subprocess.TimeoutExpired as error:
        result, output = "took too long", _text(error.stdout)
    return Outcome(step, result, now() - began, output)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def limits(device: str) -> tuple[float, float]:
    """Return a device's bfloat16 products per second, as floating-point operations, and bytes copied per second."""
    size = 8192 if device == "cuda" else 512
    x = torch.randn((size, size), device=device).to(torch.bfloat16)
    source = torch.empty(2**28 if device == "cuda" else 2**22, dtype=torch.uint8, device=device)

    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(10):
            began = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    return 2 * size**3 / seconds(lambda: x @ x), 2 * source.numel() / seconds(source.clone)


def speed_table(output: str, shape: Shape, most: tuple[float, float]) -> str:
    """Return the measured steps, beside the device's limits, as a table; empty if the output is not `calibrate`'s."""
    try:
        found = json.loads(output[output.index("{") :])
        grid = list(zip(found["cached"], found["seconds"], strict=True))
    except (ValueError, KeyError):
        return ""
    rows = ["| kept tokens | new tokens | ms | of the most products/s | of the most bytes/s |", "|---|---|---|---|---|"]
    for cached, times in grid:
        for new, seconds in zip(found["new"], times, strict=True):
            products = shape.prefill_flops(cached + new) - (shape.prefill_flops(cached) if cached else 0.0)
            share = products / seconds / most[0], shape.decode_bytes(cached, 2) / seconds / most[1]
            rows.append(f"| {cached:,} | {new:,} | {1000 * seconds:.2f} | {share[0]:.2f} | {share[1]:.2f} |")
    links = [
        f"- {tier} to device: {one['bytes_per_second'] / 1e9:.1f} GB/s, {1e6 * one['latency_seconds']:.0f} µs before it"
        for tier, one in found["links"].items()
    ]
    head = f"Limits measured by torch: {most[0] / 1e12:.2f} Tflop/s in bfloat16, {most[1] / 1e9:.0f} GB/s."
    return "\n".join([head, "", *rows, "", *links, ""])


def report(outcomes: Sequence[Outcome], about: str, speed: str) -> str:
    """Return the page."""
    lines = ["# GPU check", "", about, "", "| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {one.step.title} | {one.result} | {one.seconds:.0f} |" for one in outcomes]
    if speed:
        lines += ["", "## Speed, 135 million random weights in bfloat16", "", speed]
    for one in outcomes:
        if one.step.title in SHOWN and one.result == "passed":
            lines += ["", f"## {one.step.title}", "", *(row for row in one.output.splitlines() if row.startswith("|"))]
        if one.result in ("failed", "took too long"):
            shown = one.output.replace(str(ROOT), ".").splitlines()[-SHOWN_LINES:]
            lines += ["", f"## {one.step.title}: {one.result}", "", "```", *shown, "```"]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "benchmarks" / f"{time.strftime('%F')}-gpu-check.md"
    )
    output: Path = parser.parse_args(arguments).output
    if not torch.cuda.is_available():
        print("error: torch finds no CUDA device; this command checks what needs one", file=sys.stderr)
        return 2
    environment, shape = record_environment(["make", "gpu-check"]), Shape()
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    about = (
        f"`{environment.command}` at commit `{environment.commit}`; {torch.cuda.get_device_name()}, "
        f"CUDA {torch.version.cuda}, {environment.processor}, {environment.num_cpus} CPUs; "
        f"Python {environment.python}, {versions}"
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(shape, Path(folder))
        most = limits("cuda")

        def write(outcomes: list[Outcome]) -> None:
            print(f"{outcomes[-1].result:>14}  {outcomes[-1].seconds:5.0f} s  {outcomes[-1].step.title}", flush=True)
            is_measured = outcomes[-1].step.title.startswith("speed") and outcomes[-1].result == "passed"
            output.write_text(
                report(outcomes, about, speed_table(outcomes[-1].output, shape, most) if is_measured else ""),
                encoding="utf-8",
            )

        outcomes = run(steps(checkpoint, Path(folder) / "kb"), write)
    print(f"report: {output}")
    return 0 if all(one.result == "passed" for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
