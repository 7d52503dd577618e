"""Tests the simulated runtime against hand-computed values, and every experiment at a tiny size."""

from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.config.settings import ReuseConfig
from stillroom.core.kv import Link, Tier
from stillroom.errors import UsageError
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom_bench.experiments import simulate
from stillroom_bench.experiments.experiment_options import SimulateOptions
from stillroom_bench.experiments.simulate import EXPERIMENTS, run_simulate
from stillroom_bench.experiments.simulate_validation import run_validation
from stillroom_bench.experiments.simulated_cases import SGLANG, VLLM, ragcache_case
from stillroom_bench.instrument.bench_report import to_markdown
from stillroom_bench.loads.reuse_traffic import ReuseTraffic
from stillroom_bench.quality.runtime import Shape

TINY = SimulateOptions(num_requests=5, num_warm=4, num_documents=40)
COSTS = linear_profile(1.0, 0.01, 0.0, {Tier.HOST: Link(0.0, 100.0)})
HARDWARE = HardwareModel(costs=COSTS, bytes_per_token=1, num_layers=2, device_bytes=320, max_model_len=300)
PROMPT = ((1,) * 16, (2,) * 64, (3,) * 32, (4,) * 8)


def test_simulated_times_equal_hand_computed_values() -> None:
    alone = SimulatedRuntime(HARDWARE, VLLM).ask([PROMPT, PROMPT])
    kept = SimulatedRuntime(HARDWARE, SGLANG).ask([PROMPT, PROMPT], [0.0, 10.0])

    assert alone.seconds == alone.response_seconds == pytest.approx([1 + 1.2] * 2)
    assert alone.wall_seconds == pytest.approx(4.4)
    assert kept.seconds == pytest.approx([1 + 1.2, 1 + 0.08])
    assert (kept.hit_rate, kept.num_kept_tokens, kept.num_tokens) == (0.5, 112, 240)


def test_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    outcome = SimulatedRuntime(HARDWARE, VLLM).ask([PROMPT, PROMPT], [0.0, 1.0])

    assert outcome.seconds == pytest.approx([2.2, 1.2 + 2.2])


@pytest.mark.parametrize(("max_seqs", "waited"), [(4, 2.0), (2, 1.0)])
def test_batch_delay_ends_when_its_time_is_up_or_the_batch_is_full(max_seqs: int, waited: float) -> None:
    """Both prompts then run in one step, which takes T(0, 1) and 2 x 119 tokens more."""
    hardware = replace(HARDWARE, batch_delay_seconds=2.0, max_seqs=max_seqs)
    outcome = SimulatedRuntime(hardware, VLLM).ask([PROMPT, PROMPT], [0.0, 1.0])

    assert outcome.seconds == pytest.approx([waited + 3.39, waited - 1.0 + 3.39])


def test_kv_is_loaded_from_host_only_if_that_is_faster_than_computing() -> None:
    """Another prompt evicts the first one from the device."""
    other = ((1,) * 16, *(((5,) * 96,) * 2), (6,) * 8)
    tiers = EnginePolicy(reuse=ReuseConfig(policy="lru", host_bytes=1000, disk_bytes=0))
    fast, slow = (
        SimulatedRuntime(
            HardwareModel(
                costs=linear_profile(1.0, 0.01, 0.0, {Tier.HOST: Link(0.0, rate)}),
                bytes_per_token=1,
                num_layers=2,
                device_bytes=256,
                max_model_len=300,
            ),
            tiers,
        )
        for rate in (1e6, 10.0)
    )

    assert [runtime.ask([PROMPT, other, PROMPT]).num_kept_tokens for runtime in (fast, slow)] == [16 + 112, 16 + 16]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if number < 3 else pytest.mark.slow) for number, name in enumerate(EXPERIMENTS)],
)
def test_experiment_fills_its_tables_and_is_deterministic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "RATES", (0.5, 2.0))
    monkeypatch.setattr(simulate, "TABLE_2", {"mmlu": {8: simulate.TABLE_2["mmlu"][8]}})
    options = SimulateOptions(
        experiments=(name,), num_requests=TINY.num_requests, num_warm=TINY.num_warm, num_documents=TINY.num_documents
    )
    said: list[str] = []

    result = run_simulate(options, said.append)

    assert said and result.tables and all(result.tables.values())
    assert to_markdown(result).count("## ") == len(result.tables)
    if name != "scheduling":
        assert run_simulate(options).tables == result.tables


def test_prompts_fit_the_model_for_every_k() -> None:
    for k in (1, 2, 5):
        case = ragcache_case("llama2-7b-a10g", "nq", k, TINY)
        assert isinstance(case.traffic, ReuseTraffic)
        longest = max(sum(map(len, prompt)) for prompt in case.traffic.prompts(20, 0))
        assert longest + case.hardware.max_tokens <= case.hardware.max_model_len


def test_unknown_experiment_is_refused() -> None:
    with pytest.raises(UsageError, match="known are overall"):
        run_simulate(SimulateOptions(experiments=("figure 13",)))


def test_validation_compares_measured_and_simulated_times(tmp_path: Path) -> None:
    shape = Shape(97, 32, 48, 2, 4, 2, 8)

    result = run_validation(tmp_path, shape=shape, num_warm=2, num_requests=2, repeat=1)

    rows = result.tables["mean time to first token"]
    assert [row["arm"] for row in rows] == ["off"] * 3 + ["tiers"] * 3
    assert all(row["measured s"] > 0 and row["simulated s"] > 0 for row in rows)
    assert rows[0]["kept tokens"] == rows[0]["kept simulated"] == 0
    assert rows[3]["kept tokens"] == rows[3]["kept simulated"]
