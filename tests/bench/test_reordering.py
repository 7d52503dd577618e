"""Tests `stillroom bench pipeline reordering`: arms, metrics, and a run on a tiny model."""

from pathlib import Path

import pytest

from stillroom.config.settings import ReuseConfig
from stillroom.errors import UsageError
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom_bench.experiments.experiment_options import ReorderingOptions
from stillroom_bench.experiments.reordering import (
    ANSWERED,
    BASELINE,
    KEPT,
    MEAN,
    P99,
    figures,
    rows,
    run_reordering,
    systems,
)
from stillroom_bench.instrument.bench_report import to_markdown
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.loads.popularity import CURVES
from stillroom_bench.loads.reuse_traffic import ReuseTraffic, budget_for, made_pool
from stillroom_bench.quality.runtime import Shape

TINY = Shape(97, 32, 48, 2, 4, 2, 8)
SMALL = ReorderingOptions(windows=(0, 8), num_requests=12, num_warm=3, num_documents=20, repeat=2, loads=(3.0,))


def test_arms_are_arrival_order_cache_first_and_shortest_first() -> None:
    reuse = ReuseConfig()
    assert systems(reuse, (8, 1, 8)) == {
        BASELINE: EnginePolicy(reuse=reuse),
        "cache first, window 1": EnginePolicy(reuse=reuse, scheduling="cache_first", window=1),
        "cache first, window 8": EnginePolicy(reuse=reuse, scheduling="cache_first", window=8),
        "shortest first, window 8": EnginePolicy(reuse=reuse, scheduling="shortest_first", window=8),
    }


def test_metrics_of_a_run_equal_hand_computed_values() -> None:
    found = figures([1.0, 3.0], 4.0, 30, 120)
    assert found == {MEAN: 2.0, P99: pytest.approx(2.98), ANSWERED: 0.5, KEPT: 0.25}


def test_rows_equal_hand_computed_values() -> None:
    samples, modelled = Samples(), Samples()
    for came, other in ((4.0, 2.0), (8.0, 2.0)):
        samples.add(f"2x/{BASELINE}", {MEAN: came, P99: came, ANSWERED: 3.0, KEPT: 0.2})
        samples.add("2x/cache first, window 8", {MEAN: other, P99: 3 * came, ANSWERED: 3.0, KEPT: 0.4})
        modelled.add(f"2x/{BASELINE}", {MEAN: 6.0, KEPT: 0.2})
        modelled.add("2x/cache first, window 8", {MEAN: 4.0, KEPT: 0.5})
    first, second = rows(samples, modelled)
    assert (first["order"], first["first come / it"], first["modelled first come / it"]) == (BASELINE, "", 1.0)
    assert second["first come / it"] == "3 [2, 4]", "paired by run"
    assert second["p99 x"] == "3 [3, 3]"
    assert (second["kept"], second["modelled kept"], second["modelled first come / it"]) == ("40.0%", "50.0%", 1.5)


def test_invalid_options_are_refused() -> None:
    for changes, words in (
        ({"curve": "zipf"}, "unknown curves zipf"),
        ({"companions": "none"}, "unknown companions"),
        ({"loads": ()}, "loads .* must be positive"),
        ({"loads": (0.0,)}, "loads .* must be positive"),
        ({"windows": ()}, "--window"),
        ({"device_share": -0.1}, "must not be negative"),
    ):
        with pytest.raises(UsageError, match=words):
            ReorderingOptions(**changes)


@pytest.mark.parametrize("curve", CURVES)
def test_cache_first_is_faster_than_arrival_order_with_little_memory(curve: str) -> None:
    """Simulates the benchmark on a modelled machine."""
    traffic = ReuseTraffic(made_pool(60, 97, seed=0), curve, 1, "drawn", 0)
    prompts = traffic.prompts(100, 0)
    budget = budget_for(traffic.pool, prompts, 1, device_share=0.0, host_share=0.0)
    hardware = HardwareModel(
        costs=linear_profile(0.02, 7e-4, 0.0),
        bytes_per_token=64,
        num_layers=2,
        device_bytes=64 * budget.device,
        max_model_len=1024,
        step_tokens=512,
    )
    reuse = ReuseConfig(host_bytes=64 * budget.host, disk_bytes=0)
    dues = [0.0] * len(prompts)
    found = {
        name: SimulatedRuntime(hardware, system).ask(prompts, dues) for name, system in systems(reuse, (32,)).items()
    }
    first, ordered = found[BASELINE], found["cache first, window 32"]
    assert ordered.num_kept_tokens > 1.1 * first.num_kept_tokens
    assert first.mean > 1.2 * ordered.mean


def test_window_zero_equals_arrival_order_and_every_arm_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    result = run_reordering(SMALL, tmp_path, shape=TINY, on_progress=said.append)
    names = [f"3x/{name}" for name in systems(ReuseConfig(), SMALL.windows)]
    assert list(result.samples.values) == names
    assert all(len(result.samples.of(name, metric)) == 2 for name in names for metric in (MEAN, P99, ANSWERED, KEPT))
    assert said[-1] == f"{names[0]}, run 2", "the second run has the reverse order"
    assert result.ratio(names[1], MEAN) is not None
    table = {row["order"]: row for row in result.tables["order of admission"]}
    assert table["cache first, window 0"]["modelled first come / it"] == 1.0
    assert table["cache first, window 0"]["modelled kept"] == table[BASELINE]["modelled kept"]
    assert all(row["kept"] != "0.0%" for row in table.values())
    assert "## order of admission" in to_markdown(result)
    assert not list(tmp_path.glob("reordering-*/")), "KV is removed"
