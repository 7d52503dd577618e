"""`stillroom bench support`: how often the support check of citations is right, on sentences with known support.

The thresholds in `rag/support.py` were chosen on one half of the held-out titles (`--part choose`); the figures of
docs/citations.md are those of the other half. How to read it: docs/citations.md
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from stillroom.config.settings import EmbedderConfig
from stillroom.rag.answer import Source, Support
from stillroom.rag.citations import cite
from stillroom.rag.support import Embed
from stillroom.retrieval.embedder import Embedder
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.quality.quality_options import SupportOptions
from stillroom_bench.quality.support_cases import SupportCase, read_cases

WORDS, MEANING = "words", "words and meaning"
_NOTES = (
    "Half of the sentences are true. Precision: of the sentences with this mark, the share that is true (supported) or "
    "false (unsupported). Recall: of all true (false) sentences, the share with this mark.",
    "A true statement is a question and its answer, joined by simple rules; another answer of the same kind makes it "
    "false. A sentence of another passage of the same title is not supported either.",
)


def run_support(options: SupportOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Check every sentence by its words, and by words and meaning.

    Raises:
        UsageError: the folder does not hold the data set.
        ModelNotFoundError: the embedder is missing.
    """
    cases = read_cases(options.data, is_test=options.part == "test", limit=options.num_cases, seed=options.seed)
    embedder = Embedder(EmbedderConfig())
    environment = record_environment()
    samples = Samples()
    rows: list[dict[str, Any]] = []
    kinds: list[dict[str, Any]] = []
    arms: dict[str, Embed | None] = {WORDS: None, MEANING: embedder.embed_sentences}
    for name, embed in arms.items():
        on_progress(f"{len(cases)} sentences by {name}")
        if embed is not None:
            embed(["warm up"])
        found, seconds = _checked(cases, embed)
        samples.values[name] = {"seconds": seconds}
        rows += [{"arm": name, **row} for row in quality_of([case.is_true for case in cases], found)]
        kinds += [{"arm": name, **row} for row in _by_kind(cases, found)]
    parameters = {"data": options.data.name, "part": options.part, "num_cases": len(cases), "seed": options.seed}
    return BenchResult(
        "stillroom bench support",
        environment,
        parameters,
        samples,
        tables={"How often a mark is right": rows, "Marks by kind of sentence": kinds},
        notes=list(_NOTES),
        sample_of="question",
    )


def quality_of(truth: Sequence[bool], found: Sequence[Support]) -> list[dict[str, Any]]:
    """Return a row per mark with its share, precision and recall; `partly` is neither right nor wrong."""
    rows = []
    for mark in Support:
        marked = [is_true for is_true, one in zip(truth, found, strict=True) if one is mark]
        row: dict[str, Any] = {"mark": mark.value, "share": f"{len(marked) / len(found):.3f}"}
        if mark is not Support.PARTLY:
            wanted = mark is Support.SUPPORTED
            right = sum(is_true == wanted for is_true in marked)
            row["precision"] = f"{right / len(marked):.3f}" if marked else ""
            row["recall"] = f"{right / max(sum(is_true == wanted for is_true in truth), 1):.3f}"
        rows.append(row)
    return rows


def _checked(cases: Sequence[SupportCase], embed: Embed | None) -> tuple[list[Support], list[float]]:
    found, seconds = [], []
    for case in cases:
        sources = [
            Source(f"d{number}", f"c{number}", text, 1.0, {}, number, heading, 0, 0)
            for number, (text, heading) in enumerate(case.sources, start=1)
        ]
        start = time.perf_counter()
        citations = cite(case.sentence, sources, embed)
        seconds.append(time.perf_counter() - start)
        order = list(Support)
        found.append(max((one.support for one in citations), key=order.index, default=Support.UNSUPPORTED))
    return found, seconds


def _by_kind(cases: Sequence[SupportCase], found: Sequence[Support]) -> list[dict[str, Any]]:
    rows = []
    for kind in dict.fromkeys(case.kind for case in cases):
        marks = [one for case, one in zip(cases, found, strict=True) if case.kind == kind]
        shares = {mark.value: f"{marks.count(mark) / len(marks):.3f}" for mark in Support}
        rows.append({"sentences": f"{kind} ({len(marks)})", **shares})
    return rows
