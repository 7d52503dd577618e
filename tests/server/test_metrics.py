"""Values of the metrics, and their page."""

import re
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from stillroom.errors import StillroomError
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import SPECS, MetricSpec, Readings, reference
from stillroom.telemetry.metrics import Metrics

SOURCE = Path(__file__).resolve().parents[2] / "src" / "stillroom"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def samples(metrics: Metrics) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def observe(metrics: Metrics, *, num_generated_tokens: int) -> None:
    metrics.observe_answer("stop", num_generated_tokens=num_generated_tokens, tpot_seconds=0.03, total_seconds=0.5)
    metrics.observe_retrieval(0.01)
    metrics.observe_prompt(
        num_prompt_tokens=100,
        num_cached_tokens=64,
        ttft_seconds=0.2 if num_generated_tokens else None,
        phase_seconds={"queue": 0.02, "load": None, "prefill": 0.17},
    )


def test_answer_is_counted_in_every_metric() -> None:
    metrics = Metrics()

    observe(metrics, num_generated_tokens=11)

    seen = samples(metrics)
    assert seen["stillroom_requests_total{outcome=stop}"] == 1
    assert seen["stillroom_prompt_tokens_total"] == 100
    assert seen["stillroom_cached_tokens_total"] == 64
    assert seen["stillroom_generated_tokens_total"] == 11
    assert seen["stillroom_retrieval_seconds_sum"] == 0.01
    assert seen["stillroom_time_to_first_token_seconds_bucket{le=0.25}"] == 1
    assert seen["stillroom_time_to_first_token_seconds_bucket{le=0.1}"] == 0
    assert seen["stillroom_time_per_output_token_seconds_count"] == 1
    assert seen["stillroom_request_seconds_sum"] == 0.5
    assert seen["stillroom_phase_seconds_sum{phase=queue}"] == 0.02
    assert "stillroom_phase_seconds_sum{phase=load}" not in seen


def test_unmeasured_times_are_not_observed() -> None:
    metrics = Metrics()

    observe(metrics, num_generated_tokens=1)
    observe(metrics, num_generated_tokens=0)

    seen = samples(metrics)
    assert seen["stillroom_time_per_output_token_seconds_count"] == 0
    assert seen["stillroom_time_to_first_token_seconds_count"] == 1
    assert seen["stillroom_requests_total{outcome=stop}"] == 2


def test_gauges_show_the_last_value() -> None:
    metrics = Metrics()

    metrics.set_kv_blocks(10, 2)
    metrics.set_kv_blocks(9, 3)
    metrics.set_requests(4, 5)

    seen = samples(metrics)
    assert (seen["stillroom_kv_blocks{state=free}"], seen["stillroom_kv_blocks{state=used}"]) == (9, 3)
    assert seen["stillroom_active_requests{state=waiting}"] == 4
    assert seen["stillroom_active_requests{state=running}"] == 5


def test_documents_of_all_knowledge_bases_are_counted_at_render() -> None:
    metrics = Metrics()
    held = {"a": (1, 10)}
    metrics.watch_corpora("tenants", lambda: held)
    metrics.watch_corpora("folder", lambda: {"a": (1, 10), "b": (5, 60)})

    def broken() -> dict[str, tuple[int, int]]:
        raise StillroomError("the disk is gone")

    metrics.watch_corpora("broken", broken)

    seen = samples(metrics)
    assert (seen["stillroom_documents"], seen["stillroom_chunks"]) == (6, 70)
    held["a"] = (2, 20)
    metrics.forget_corpora("folder")
    assert samples(metrics)["stillroom_documents"] == 2


def test_two_registries_are_independent() -> None:
    first, second = Metrics(), Metrics()

    first.count_refused("rate")

    assert samples(second)["stillroom_refused_requests_total{reason=rate}"] == 0


def test_series_of_alerts_exist_before_the_first_failure() -> None:
    metrics = Metrics()
    metrics.expect_http_requests(["/v1/search"])

    seen = samples(metrics)

    for outcome in ("stop", "length", "aborted", "failed"):
        assert seen[f"stillroom_requests_total{{outcome={outcome}}}"] == 0
    for reason in ("rate", "concurrency", "queue", "closing"):
        assert seen[f"stillroom_refused_requests_total{{reason={reason}}}"] == 0
    assert seen["stillroom_http_requests_total{path=/v1/search}{status=500}"] == 0


def test_names_end_in_their_unit() -> None:
    for spec in SPECS:
        assert re.fullmatch(r"stillroom_[a-z]+(_[a-z]+)*", spec.name)
        if spec.kind == "counter":
            assert spec.name.endswith("_total")
        if spec.kind == "histogram":
            assert spec.name.endswith(("_seconds", "_bytes", "_ratio"))


def test_other_parts_are_read_when_metrics_are_rendered() -> None:
    metrics = Metrics()
    readings: dict[MetricSpec, float | dict[str, int] | dict[tuple[str, str], int]] = {}
    metrics.watch(lambda: readings)
    assert b"stillroom_kv_cache" not in metrics.render()
    readings[catalogue.KV_MISSES] = 4
    readings[catalogue.KV_HITS] = {"device": 3, "host": 2, "disk": 1}
    readings[catalogue.KV_MOVED_BYTES] = {("host", "device"): 9}

    text = metrics.render().decode()

    assert "stillroom_kv_cache_misses_total 4.0" in text
    assert 'stillroom_kv_cache_hits_total{tier="host"} 2.0' in text
    assert 'stillroom_kv_cache_moved_bytes_total{source="host",target="device"} 9.0' in text


def test_every_declared_metric_is_rendered_and_no_other() -> None:
    metrics = Metrics()
    counted = {family.name for family in metrics.registry.collect()}
    others = [spec for spec in SPECS if spec.name.removesuffix("_total") not in counted]
    readings: Readings = {spec: {("a",) * len(spec.labels): 1.0} for spec in others}
    metrics.watch(lambda: readings)
    observe(metrics, num_generated_tokens=2)

    names = [family.name for family in text_string_to_metric_families(metrics.render().decode())]

    # the parser drops `_total` from a counter's family
    assert sorted(names) == sorted(spec.name.removesuffix("_total") for spec in SPECS)


def test_every_declared_metric_is_supplied_in_one_place() -> None:
    source = "\n".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))
    supplied = Counter(re.findall(r"\bcatalogue\.(\w+)", source))
    for name, spec in vars(catalogue).items():
        if isinstance(spec, MetricSpec):
            assert supplied[name] == 1, f"{name} has no source or several"


def test_metrics_page_has_the_reference_table() -> None:
    assert reference() in PAGE.read_text(encoding="utf-8"), "run: python docs/_site/metrics.py"
