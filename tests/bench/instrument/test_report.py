"""Tests result files, Markdown and HTML reports."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from stillroom_bench.instrument.bench_report import BenchResult, format_value, markdown_table, rows, save, to_markdown
from stillroom_bench.instrument.comparison import Earlier, compare, load_earlier
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.html_report import to_html


def samples(scale: float = 1.0, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    kept = Samples()
    for _ in range(20):
        kept.add("ours", {"search_seconds": scale * rng.normal(0.002, 0.0001), "recall": 0.9})
        kept.add("theirs", {"search_seconds": rng.normal(0.004, 0.002), "recall": 0.8})
    return kept


@pytest.fixture
def result() -> BenchResult:
    environment = record_environment(["stillroom", "bench", "x"])
    return BenchResult("bench x", environment, {"k": 10}, samples(), "theirs", notes=["no <peer>"])


def test_saved_result_holds_every_sample(result: BenchResult, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    save(result, path)
    assert load_earlier(path).samples.values == result.samples.values
    content = json.loads(path.read_text())
    ours = content["arms"]["ours"]["search_seconds"]
    assert ours["summary"]["num_samples"] == 20 and not ours["is_flaky"]
    assert ours["ratio_to_baseline"]["value"] == pytest.approx(0.5, abs=0.15)
    assert content["arms"]["theirs"]["search_seconds"]["is_flaky"]
    assert not list(path.parent.glob("*.tmp"))


def test_json_has_no_infinities_or_nan(result: BenchResult, tmp_path: Path) -> None:
    single = Samples()
    single.add("a", {"x": 0.0})
    save(dataclasses.replace(result, samples=single, baseline=None), tmp_path / "r.json")
    for arm in ("b", "c"):
        for value in (math.nan, 0.0, 2.0, math.inf):
            single.add(arm, {"x": value})
    tables = {"t": [{"ratio": math.nan, "list": (1.0, math.inf)}]}
    odd = dataclasses.replace(result, samples=single, baseline="c", tables=tables, parameters={"limit": math.inf})
    save(odd, tmp_path / "r.json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    content = json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)
    assert content["arms"]["b"]["x"]["samples"] == [None, 0.0, 2.0, None]
    assert content["tables"] == {"t": [{"ratio": None, "list": [1.0, None]}]}
    assert content["parameters"] == {"limit": None}
    assert "nan" not in to_html(odd).partition("<svg")[2]
    earlier = load_earlier(tmp_path / "r.json")
    assert [change.now for change in compare(odd, earlier).changes] == [0.0, 1.0, 1.0]


def test_markdown_marks_flaky_metrics(result: BenchResult) -> None:
    text = to_markdown(result)
    line = next(line for line in text.splitlines() if line.startswith("| theirs | search_seconds"))
    assert "(!)" in line
    assert "(!)" not in next(line for line in text.splitlines() if line.startswith("| ours | search_seconds"))
    assert "bench x" in text and result.environment.processor in text


def test_shares_of_questions_have_wilsons_interval_and_are_never_flaky(result: BenchResult) -> None:
    found = Samples()
    for right, f1 in [(1.0, 1.0), (1.0, 1.0), (0.0, 0.9), (1.0, 1.0)]:
        found.add("ours", {"right": right, "f1": f1, "answer_seconds": 1.0 - right / 2})
    shares = dataclasses.replace(result, samples=found, baseline=None, sample_of="question")
    shown = {row["metric"]: row for row in rows(shares)}
    assert shown["right"]["mean"] == "0.75 [0.3006, 0.9544]" and shown["f1"]["mean"].endswith(", 1]")
    assert {shown["right"][name] for name in ("p50", "p95", "p99", "std", "CV", "class")} == {""}
    assert shown["answer_seconds"]["p50"] == "500 ms" and shown["answer_seconds"]["CV"] != ""
    for page in (to_markdown(shares), to_html(shares)):
        assert "flaky:" not in page and "Wilson" in page
    told = shares.to_json()["arms"]["ours"]["right"]
    assert not told["is_flaky"] and told["reproducibility"] is None and told["summary"]["ci_high"] < 1.0
    assert "flaky: CV above 20%" in to_markdown(dataclasses.replace(shares, sample_of="run"))


def test_html_is_self_contained_and_escaped(result: BenchResult) -> None:
    page = to_html(result, compare(result, Earlier("bench x", {"k": 5}, samples(0.5, seed=1))))
    assert "k (5 then, 10 now)" in page
    assert "no &lt;peer&gt;" in page and "<script" not in page and "http" not in page
    assert page.count("<circle") == 80 and "regression" in page


@pytest.mark.parametrize(
    ("metric", "value", "shown"),
    [
        ("a_seconds", 2e-6, "2 us"),
        ("a_seconds", 0.0125, "12.5 ms"),
        ("a_seconds", 3.0, "3 s"),
        ("a_bytes", 3 << 20, "3 MiB"),
        ("recall", 0.98765, "0.9877"),
        ("x", float("nan"), "-"),
    ],
)
def test_values_are_formatted_with_units(metric: str, value: float, shown: str) -> None:
    assert format_value(metric, value) == shown


def test_table_cells_are_escaped() -> None:
    assert markdown_table([{"a|b": "c|d", "e": "f\ng"}]) == ["| a\\|b | e |", "|---|---|", "| c\\|d | f g |"]
