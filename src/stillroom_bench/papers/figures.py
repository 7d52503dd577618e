"""Draws the figures of the pages from committed reports: python -m stillroom_bench.papers.figures

Each figure is a file in docs/figures/measured/, drawn from the JSON of one report. A test draws them again.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom_bench.papers.agreement import interval_numbers
from stillroom_bench.papers.page import find_checkout
from stillroom_bench.papers.svg_chart import Axis, Chart, Point, draw

FOLDER = Path("docs") / "figures" / "measured"
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and the report that it is drawn from."""

    name: str
    report: str
    """Name in benchmarks/, without ending."""
    chart: Callable[[Result], Chart]


def _summary(result: Result, arm: str, metric: str, scale: float = 1.0) -> tuple[float, float, float]:
    """Return a mean and its interval."""
    found = result["arms"][arm][metric]["summary"]
    return found["mean"] * scale, found["ci_low"] * scale, found["ci_high"] * scale


def _share(text: str) -> float:
    """Return `30%` as 30."""
    return float(text.removesuffix("%"))


def reuse_by_rate(result: Result) -> Chart:
    rates = {"0.3x": 0.3, "0.6x": 0.6, "0.9x": 0.9, "1.5x": 1.5, "2.5x": 2.5, "4x": 4.0}
    names = {"off": "keeps nothing", "lru": "on the device, LRU", "vllm": "vLLM 0.32", "tiers": "Stillroom"}

    def series(arm: str) -> Iterator[Point]:
        for load, rate in rates.items():
            if (name := f"mmlu, k=2, {load}/{arm}") in result["arms"]:
                yield Point(rate, *_summary(result, name, "first_token_seconds"))

    return Chart(
        "Time to first token by request rate",
        "Mean time to first token with its 95 % interval, on a logarithmic axis, of four systems at rates from 0.3 "
        "to 4 times what the system that keeps nothing serves one by one. Stillroom stays below the others as the "
        "rate grows.",
        Axis("requests per second, as a multiple of what keeping nothing serves one by one", is_log=True),
        Axis("mean time to first token, s (logarithmic)", is_log=True),
        {name: tuple(series(arm)) for arm, name in names.items()},
    )


def hits_by_capacity(result: Result) -> Chart:
    rows = [row for row in result["tables"]["Token hit rate"] if row["workload"] == "mmlu-like, k=2"]
    names = {"belady (offline)": "Belady, offline", "prefix_heat + look-ahead": "Stillroom's default"}
    names |= {"lfu": "LFU", "gdsf": "GDSF", "pgdsf": "PGDSF", "lru": "LRU"}
    return Chart(
        "Hit rate by capacity",
        "Share of prompt tokens whose KV is kept, of six eviction policies, when 2 to 40 % of the documents' KV "
        "fits; a replay of one generated workload, two documents a prompt, without intervals. PGDSF is below LFU, "
        "above LRU and level with GDSF.",
        Axis("share of the documents' KV that fits, % (logarithmic)", is_log=True),
        Axis("tokens found, %"),
        {
            name: tuple(Point(_share(row["fits"]), round(100 * float(row[policy]), 6)) for row in rows)
            for policy, name in names.items()
        },
    )


def quality_by_recomputation(result: Result) -> Chart:
    names = {"question": "question (ours)", "deviation": "deviation", "random": "random"}
    names |= {"context": "context (Eq. 14)", "received": "received (H2O)", "first": "first tokens"}
    by_name = {row["arm"]: row for row in result["tables"]["Against a full prefill"]}

    def series(selector: str) -> Iterator[Point]:
        for arm, row in by_name.items():
            if arm.rpartition(" ")[0] == selector:
                yield Point(_share(arm.rpartition(" ")[2]), float(row["ROUGE-L"]))

    return Chart(
        "Quality by share recomputed",
        "ROUGE-L against a full prefill when 0 to 100 % of the reused tokens are computed again, chosen by six "
        "rules; 200 questions that need two chunks, one small model, without intervals. The rule by the question "
        "reaches the full quality at 5 %, Cache-Craft's needs more than 60 %.",
        Axis("reused tokens that are computed again, %"),
        Axis("ROUGE-L against a full prefill"),
        {name: tuple(series(selector)) for selector, name in names.items()},
    )


def search_by_fast_memory(result: Result) -> Chart:
    places = {"all on disk": 0.0, "10% of lists in RAM": 10.0, "30% of lists in RAM": 30.0, "all in RAM": 100.0}

    def series(load: str) -> Iterator[Point]:
        for place, share in places.items():
            yield Point(share, *_summary(result, f"{load}/{place}", "mean_seconds", 1e3))

    loads = {f"{skew}, batch {batch}": f"{skew}-like, {batch}" for skew in ("ORCAS", "wiki-all") for batch in (1, 16)}
    return Chart(
        "Search time by share of the lists in fast memory",
        "Mean time of a search with its 95 % interval when none, the hottest 10 or 30 %, or all of the inverted "
        "lists are in RAM and the others on disk; two skews of questions, one question or 16 at once. A tenth of "
        "the lists brings 81 % of the gain for ORCAS-like questions one at a time, and 45 % for 16 at once.",
        Axis("inverted lists in RAM, %"),
        Axis("mean time until a search has its result, ms"),
        {name: tuple(series(load)) for load, name in loads.items()},
    )


def time_by_window(result: Result) -> Chart:
    metrics = {"mean_first_token_seconds": "mean", "p99_first_token_seconds": "99th percentile"}

    def series(metric: str) -> Iterator[Point]:
        for window in (1, 8, 32, 128):
            ratio = result["arms"][f"1.5x/cache first, window {window}"][metric]["ratio_to_baseline"]
            yield Point(window, ratio["value"], ratio["low"], ratio["high"])

    return Chart(
        "Time to first token by reordering window",
        "Time to first token of admission by kept tokens, divided by that of the order of arrival, with its 95 % "
        "interval, for windows of 1 to 128 requests at 1.5 times the throughput. The mean falls, the 99th "
        "percentile rises.",
        Axis("later requests that may be admitted before a waiting one (logarithmic)", is_log=True),
        Axis("time to first token, of first come = 1"),
        {name: tuple(series(metric)) for metric, name in metrics.items()},
    )


def time_by_preparing(result: Result) -> Chart:
    names = {"first": "first questions", "all": "all questions", "repeated": "later questions"}

    def series(questions: str) -> Iterator[Point]:
        for row in result["tables"]["Mean time to first token"]:
            if row["questions"] == questions and row["arm"].startswith("prepared "):
                value, low, high = interval_numbers(row["ratio to tiers"])
                yield Point(_share(row["arm"].removeprefix("prepared ")), value, low, high)

    return Chart(
        "Time to first token by share of the chunks prepared",
        "Mean time to first token with 0, 5, 25 and 100 % of the chunks prepared, divided by that without "
        "preparing, with its 95 % interval: of first questions about a document, of all, and of later ones. First "
        "questions gain up to a factor of eight, later ones lose up to a seventh.",
        Axis("chunks prepared, %"),
        Axis("mean time to first token, without preparing = 1"),
        {name: tuple(series(questions)) for questions, name in names.items()},
    )


def quality_by_documents(result: Result) -> Chart:
    names = {"question 30%": "question (ours)", "random 30%": "random", "context 30%": "context (Eq. 14)"}
    names |= {"no recompute": "nothing recomputed"}
    rows = {row["arm"]: row for row in result["tables"]["Same answer as a full prefill, by documents in the prompt"]}
    return Chart(
        "Same answers by documents in the prompt",
        "Share of the questions whose answer is that of a full prefill, for prompts of 3 to 8 documents, when 30 % of "
        "the reused tokens are computed again by three rules, and without; 1,000 questions, one small model, without "
        "intervals. All but the rule by the question fall with the number of documents.",
        Axis("documents in the prompt"),
        Axis("share with the same answer"),
        {
            name: tuple(
                Point(float(size.split()[0]), float(share.split()[0]))
                for size, share in rows[arm].items()
                if size not in ("arm", "all")
            )
            for arm, name in names.items()
        },
    )


def search_by_size(result: Result) -> Chart:
    names = {
        "hnsw m=16 ef=100": "HNSW",
        "faiss m=16 ef=100": "faiss alone",
        "ivf_pq nprobe=32": "IVF-PQ",
        "flat": "flat",
    }

    def series(index: str) -> Iterator[Point]:
        for size in result["parameters"]["sizes"]:
            yield Point(float(size), *_summary(result, f"{size:,} {index}", "p50_seconds", 1e6))

    return Chart(
        "Search time by number of vectors",
        "Median time of a dense search with its 95 % interval over 10,000, 25,000 and 50,000 vectors, on logarithmic "
        "axes: HNSW with m = 16 and ef = 100, the same graph by faiss alone, IVF-PQ, and the exact flat index. The "
        "flat index takes four times as long over five times the vectors, the others hardly longer.",
        Axis("vectors (logarithmic)", is_log=True),
        Axis("median time of a search, us (logarithmic)", is_log=True),
        {name: tuple(series(index)) for index, name in names.items()},
    )


FIGURES = (
    Figure("reuse-by-rate", "2026-11-21-reuse", reuse_by_rate),
    Figure("hits-by-capacity", "2026-11-21-policies", hits_by_capacity),
    Figure("time-by-window", "2026-11-22-reordering", time_by_window),
    Figure("quality-by-recomputation", "2026-11-21-quality-curve", quality_by_recomputation),
    Figure("search-by-fast-memory", "2026-11-22-tiered", search_by_fast_memory),
    Figure("time-by-preparing", "2026-11-26-first-questions", time_by_preparing),
    Figure("quality-by-documents", "2026-11-27-quality-held-out", quality_by_documents),
    Figure("search-by-size", "2026-11-21-index", search_by_size),
)


def drawn(figure: Figure, checkout: Path) -> str:
    """Return the SVG of a figure."""
    result = json.loads((checkout / "benchmarks" / f"{figure.report}.json").read_text(encoding="utf-8"))
    return draw(figure.chart(result))


def main() -> None:
    """Write all figures of this checkout."""
    checkout = find_checkout(None)
    (checkout / FOLDER).mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        (checkout / FOLDER / f"{figure.name}.svg").write_text(drawn(figure, checkout), encoding="utf-8")


if __name__ == "__main__":
    main()
