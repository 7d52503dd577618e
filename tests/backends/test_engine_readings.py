"""Metrics of a front's engines: what is shown of the counts and of the last reports."""

from prometheus_client.parser import text_string_to_metric_families

from stillroom.backends.engine_readings import cluster_readings
from stillroom.cluster.front_engine import EngineCounts
from stillroom.cluster.wire_state import EngineState
from stillroom.core.kv import Tier
from stillroom.telemetry.metrics import Metrics

A, B = "http://a:9100", "http://b:9100"


def test_counts_and_last_reports_are_shown_by_engine_state_and_tier() -> None:
    counts = {
        A: EngineCounts(
            num_predicted=2,
            predicted_seconds=0.5,
            first_token_seconds=0.75,
            num_runs=3,
            num_prompt_tokens=90,
            num_reused_tokens=60,
        ),
        B: EngineCounts(num_losses=1),
    }
    report = EngineState(
        run="r",
        sequence=1,
        queue_seconds=1.5,
        num_outstanding=4,
        num_blocks=10,
        num_free_blocks=7,
        kept_bytes={Tier.HOST: 2048},
    )
    metrics = Metrics()
    metrics.watch(lambda: cluster_readings(counts, {A: report}))
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples]
    shown = {
        (sample.name.removeprefix("stillroom_engine_"), *sample.labels.values()): sample.value
        for sample in samples
        if sample.name.startswith("stillroom_engine_")
    }
    of_a = {(name, *rest): value for (name, engine, *rest), value in shown.items() if engine == A}
    expected: dict[tuple[str, ...], float] = {
        ("losses_total",): 0,
        ("runs_total",): 3,
        ("predicted_first_token_seconds_total",): 0.5,
        ("first_token_seconds_total",): 0.75,
        ("first_tokens_total",): 2,
        ("prompt_tokens_total",): 90,
        ("cached_tokens_total",): 60,
        ("outstanding_requests",): 4,
        ("queue_seconds",): 1.5,
        ("kv_blocks", "free"): 7,
        ("kv_blocks", "used"): 3,
        **{("kept_bytes", tier.label): 2048 * (tier is Tier.HOST) for tier in Tier},
    }
    assert of_a == expected
    of_b = {name for name, engine, *_ in shown if engine == B}
    assert of_b == {
        "losses_total",
        "runs_total",
        "predicted_first_token_seconds_total",
        "first_token_seconds_total",
    } | {
        "first_tokens_total",
        "prompt_tokens_total",
        "cached_tokens_total",
    }, "an engine without a report has counts only"
