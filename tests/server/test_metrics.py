"""What the metrics say after a few calls, and that the page lists them all."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from stillroom.errors import StillroomError
from stillroom.telemetry.figures import AuditMetrics, CacheFigures, EngineFigures, IndexFigures
from stillroom.telemetry.metrics import SPECS, Metrics, reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def samples(metrics: Metrics) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def observe(metrics: Metrics, *, num_generated_tokens: int) -> None:
    metrics.observe_answer("stop", num_generated_tokens=num_generated_tokens, tpot_seconds=0.03, total_seconds=0.5)
    metrics.observe_search(0.01)
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


def test_times_that_did_not_happen_are_not_observed() -> None:
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


def test_documents_of_all_knowledge_bases_are_asked_for_when_somebody_looks() -> None:
    metrics = Metrics()
    held = {"a": (1, 10)}
    metrics.watch_corpora("room", lambda: held)
    metrics.watch_corpora("folder", lambda: {"a": (1, 10), "b": (5, 60)})

    def broken() -> dict[str, tuple[int, int]]:
        raise StillroomError("the disk is gone")

    metrics.watch_corpora("broken", broken)

    seen = samples(metrics)
    assert (seen["stillroom_documents"], seen["stillroom_chunks"]) == (6, 70)
    held["a"] = (2, 20)
    metrics.forget_corpora("folder")
    assert samples(metrics)["stillroom_documents"] == 2


def test_two_rooms_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()

    first.count_refused("rate")

    assert samples(second)["stillroom_refused_requests_total{reason=rate}"] == 0


def test_what_alarms_look_at_is_there_before_the_first_failure() -> None:
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


TIERS = {"device": 3, "host": 2, "disk": 1}
FIGURES = CacheFigures(
    num_nodes=TIERS,
    num_bytes=TIERS,
    hits=TIERS,
    hit_tokens=TIERS,
    misses=4,
    missed_tokens=5,
    cheaper=6,
    placed={"device": 21, "host": 22, "disk": 23},
    placed_tokens=24,
    repaired_tokens=25,
    placed_overlap=25.5,
    placed_overhead=25.25,
    unfocused=30,
    audit=AuditMetrics(results={"agreed": 26, "differed": 27}, disagreement_bound=0.28, recompute_ratio=0.29),
    evictions=TIERS,
    failed_loads=TIERS,
    rejected=7,
    moves={("host", "device"): 8},
    moved_bytes={("host", "device"): 9},
    moved_seconds={("host", "device"): 0.5},
    verify_failures={("host", "checksum"): 1},
    write_failures=2,
    read_ahead_bytes={"used": 30, "wasted": 31},
)


def test_a_cache_is_asked_when_somebody_looks() -> None:
    metrics = Metrics()
    assert b"stillroom_kv_cache" not in metrics.render()
    metrics.watch_cache(lambda: FIGURES)

    text = metrics.render().decode()

    assert 'stillroom_kv_cache_hits_total{tier="host"} 2.0' in text
    assert 'stillroom_kv_cache_moved_bytes_total{source="host",target="device"} 9.0' in text
    assert 'stillroom_kv_cache_verify_failures_total{reason="checksum",tier="host"} 1.0' in text


LISTS = IndexFigures(
    num_lists={"ram": 3, "disk": 7},
    num_bytes={"ram": 30, "disk": 70},
    probes={"ram": 90, "disk": 10},
    hit_ratio=0.75,
    exchanged=12,
)


def test_a_tiered_index_is_asked_when_somebody_looks() -> None:
    metrics = Metrics()
    figures: list[IndexFigures | None] = [None]
    metrics.watch_index(lambda: figures[0])
    assert b"stillroom_index" not in metrics.render()
    figures[0] = LISTS

    seen = samples(metrics)

    assert seen["stillroom_index_probes_total{tier=ram}"] == 90
    assert seen["stillroom_index_list_bytes{tier=disk}"] == 70
    assert (seen["stillroom_index_hit_ratio"], seen["stillroom_index_exchanged_total"]) == (0.75, 12)


def test_nothing_else_is_rendered() -> None:
    metrics = Metrics()
    metrics.watch_cache(lambda: FIGURES)
    metrics.watch_index(lambda: LISTS)
    metrics.watch_engine(lambda: EngineFigures(device_losses=1, failed_steps=2))
    observe(metrics, num_generated_tokens=2)

    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}

    # the parser drops `_total` from a counter's family
    assert names == {spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name for spec in SPECS}


def test_page_has_the_table() -> None:
    assert reference() in PAGE.read_text(encoding="utf-8"), f"put this into docs/metrics.md:\n{reference()}"
