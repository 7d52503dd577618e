"""`stillroom bench simulate --validate`: compares a simulated workload with the real runtime.

Both use the same engine settings and a cost profile measured before on this machine. The model is the Llama of
`bench runtime` with 135 million random weights. Both get the same prompts at the same times; the mean times to first
token are compared.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stillroom.backends.assembly import kv_shape
from stillroom.backends.calibration import CalibrationTarget, calibrate
from stillroom.core.clock import SystemClock
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvstore.device import DeviceStore
from stillroom.models.loader import load_own_decoder
from stillroom.planner.simulation.arrivals import arrivals
from stillroom.planner.simulation.driving import drive
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom.runner.torch_runner import TorchRunner
from stillroom_bench.experiments.reuse_engine import OurRuntime, reuse_config
from stillroom_bench.experiments.reuse_figures import METRIC
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.loads.reuse_traffic import MAX_SEQS, ReuseTraffic, budget_for, made_pool
from stillroom_bench.quality.runtime import Shape, write_checkpoint

ARMS = ("off", "tiers")
LOADS = (0.0, 0.5, 1.0)
"""Multiples of the sequential throughput of `off`; 0: sequential requests."""
GOAL = 0.15
_STEP_TOKENS, _DOCUMENTS, _VOCABULARY, _BLOCK = 512, 120, 49_152, 16


def run_validation(  # noqa: PLR0913  sizes that tests reduce
    work_dir: Path,
    *,
    seed: int = 0,
    shape: Shape | None = None,
    num_warm: int = 60,
    num_requests: int = 60,
    repeat: int = 5,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Measure the costs, then run every load for real and simulated.

    Args:
        repeat: runs of each point of the cost profile.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    shape = shape or Shape()
    folder = write_checkpoint(work_dir, shape, "bfloat16", 0)
    environment = record_environment()
    torch.set_num_threads(environment.num_threads)
    pool = made_pool(_DOCUMENTS, min(_VOCABULARY, shape.vocab_size), seed)
    traffic = ReuseTraffic(pool, "mmlu", 2, "fixed", seed)
    budget = budget_for(pool, traffic.prompts(num_warm + num_requests, 0), 1)
    on_progress("measuring the costs of computing and loading")
    costs, per_token, max_model_len = _costs(folder, work_dir, budget.device, repeat)
    samples, rows = Samples(), []
    with tempfile.TemporaryDirectory(dir=work_dir, prefix="simulate-") as scratch:
        settings: dict[str, Any] = {
            "device": budget.device,
            "host": budget.host,
            "disk": 0,
            "max_seqs": MAX_SEQS,
            "step_tokens": _STEP_TOKENS,
            "max_tokens": 1,
            "scratch": scratch,
        }
        hardware = HardwareModel(
            costs=costs,
            bytes_per_token=per_token,
            num_layers=shape.num_layers,
            device_bytes=budget.device * per_token,
            max_model_len=max_model_len,
            max_seqs=MAX_SEQS,
            step_tokens=_STEP_TOKENS,
        )
        service = 0.0
        for arm in ARMS:
            config = reuse_config(arm, budget.host * per_token, 0)
            simulated = SimulatedRuntime(hardware, EnginePolicy(reuse=config))
            real = OurRuntime(arm, folder, settings, environment.num_threads, costs)
            warm = traffic.prompts(num_warm, 0)
            simulated.ask(warm)
            drive(real, warm, None)
            for number, load in enumerate(LOADS):
                on_progress(f"{arm}, {load:g}x")
                prompts = traffic.prompts(num_requests, 1 + number)
                dues = arrivals(num_requests, load * service, [seed, 6, number]) if load else None
                found = drive(real, prompts, dues)
                predicted = simulated.ask(prompts, dues)
                measured = float(np.mean(found["seconds"]))
                service = service or 1 / measured
                group = f"{load:g}x/{arm}"
                samples.values[f"{group} measured"] = {METRIC: found["seconds"]}
                samples.values[f"{group} simulated"] = {METRIC: predicted.seconds}
                kept = sum(map(sum, found["cached"]))
                row = {"arm": arm, "load": f"{load:g}x" if load else "one by one", "measured s": measured}
                row |= {"simulated s": predicted.mean, "simulated / measured": predicted.mean / measured}
                row |= {"within 15 %": "yes" if abs(predicted.mean / measured - 1) <= GOAL else "no"}
                rows.append(row | {"kept tokens": kept, "kept simulated": predicted.num_kept_tokens})
            real.close()
    parameters = {"num_warm": num_warm, "num_requests": num_requests, "seed": seed, "repeat": repeat}
    return BenchResult(
        "stillroom bench simulate --validate",
        environment,
        parameters,
        samples,
        notes=["The same prompts at the same times, measured, and simulated with costs measured before."],
        tables={"mean time to first token": rows},
        sample_of="request",
    )


def _costs(folder: Path, work_dir: Path, num_tokens: int, repeat: int) -> tuple[CostProfile, int, int]:
    """Measure the costs of this machine. Returns them with the KV bytes per token and the model's maximum length."""
    decoder = load_own_decoder(folder, device="cpu", dtype="bfloat16")
    kv = kv_shape(decoder)
    num_blocks = max(num_tokens // _BLOCK, 4096 // _BLOCK)
    device = DeviceStore(kv, num_blocks, _BLOCK, decoder.device)
    length = decoder.spec.max_positions
    bench = CalibrationTarget(TorchRunner(decoder, device), device, num_blocks, length, _STEP_TOKENS, SystemClock())
    profile = calibrate(bench, work_dir, repeat=repeat)
    return profile, kv.bytes_per_token, length
