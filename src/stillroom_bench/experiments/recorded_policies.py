"""`stillroom bench policies --recorded`: eviction policies on recorded requests that nothing was chosen on.

The half-life, the exponent of cost and the discount by depth of `prefix_heat` were chosen on generated workloads, on
the first 1,500 requests of Mooncake's conversations, and on the lists of retrieved passages cut to one and to five.
Left are the later requests of the conversations, and the lists cut to two, three and four, whose requests are the same.
No parameter differs from the product's. How to read it: docs/policies-bench.md
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stillroom.errors import UsageError
from stillroom_bench.experiments.experiment_options import PoliciesOptions
from stillroom_bench.experiments.policies import ARMS as ALL_ARMS
from stillroom_bench.experiments.policies import BELADY, DEFAULT
from stillroom_bench.experiments.policy_choice import compared_rows, gdsf_by_size
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.loads.policy_replay import Capacity, Setup, replay
from stillroom_bench.loads.reuse_workloads import ReuseWorkload, retrieved_workload, trace_workload, windows_of

NUM_SEEN = 1500
"""Requests of a conversation trace on which `prefix_heat` was chosen: the first ones."""
TOP_KS = (2, 3, 4)
"""Passages of a request that no choice was made on."""
CAPACITIES = (0.05, 0.2)
ARMS = {name: setup for name, setup in ALL_ARMS.items() if name not in (BELADY, "lru + look-ahead")}
ARMS["gdsf, cost by size"] = Setup(policy=gdsf_by_size)
OF_PAPER = ("pgdsf", "gdsf, cost by size", "gdsf", "lru", "lfu", "fifo")
"""RAGCache 7.3: its policy, and those that it is compared with, whose GDSF is the one with cost by size. FIFO is
Cache-Craft's (3.3)."""
_NOTES = (
    f"Ratios: the policy divided by {DEFAULT}, and in the second table by pgdsf; mean of the logarithms over the "
    "windows, with the 95 % interval of Student's t over pairs of the same window. Below 1 the policy is behind. "
    "`-`: a policy found nothing in a window.",
    f"Conversations: requests after the first {NUM_SEEN}. Retrieved passages: the first two, three and four of each "
    "list; prefix_heat was chosen with one and with five of the same lists, so only the number of passages is held "
    "out.",
    "Each window starts with an empty cache. Fits: share of the KV of the window's distinct pieces. Saved: share of "
    "the modelled prefill seconds. Hit rate: share of documents found; tokens: of document tokens. Nothing is timed.",
)


def run_recorded_policies(options: PoliciesOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Replay windows of every trace with every policy.

    Raises:
        UsageError: no folder is given, it has no traces, a trace cannot be read, or none is long enough.
    """
    if options.data is None:
        raise UsageError("--recorded needs traces; name the folder that contains `traces` with --data")
    environment = record_environment()
    rows, to_pgdsf = list[dict[str, Any]](), list[dict[str, Any]]()
    for workload, first in _workloads(options.data):
        windows = windows_of(workload, options.repeat, options.num_asks, first=first)
        for capacity in CAPACITIES if windows else ():
            on_progress(f"{workload.name}, {share_name(capacity)} fits")
            found = {
                arm: [replay(window, Capacity(capacity), setup) for window in windows] for arm, setup in ARMS.items()
            }
            sizes = {"windows": len(windows), "requests": sum(len(window.asks) for window in windows)}
            head = {"trace": workload.name, "fits": share_name(capacity)} | sizes
            rows += compared_rows(head, found, DEFAULT)
            to_pgdsf += compared_rows(head, {arm: found[arm] for arm in OF_PAPER}, "pgdsf")
    if not rows:
        raise UsageError(
            f"{options.data / 'traces'} has no rag_*.json, and no mooncake_*.jsonl of more than {NUM_SEEN:,} requests"
        )
    parameters = {"data": options.data.name, "num_asks": options.num_asks, "repeat": options.repeat}
    return BenchResult(
        "stillroom bench policies --recorded",
        environment,
        parameters,
        Samples(),
        notes=list(_NOTES),
        tables={"Recorded requests": rows, "RAGCache's policies, relative to PGDSF": to_pgdsf},
    )


def _workloads(data: Path) -> Iterator[tuple[ReuseWorkload, int]]:
    """Yield each workload with the number of its first request that nothing was chosen on."""
    for path in sorted((data / "traces").glob("mooncake_*.jsonl")):
        num_before = len(trace_workload(path, NUM_SEEN).asks)
        yield trace_workload(path, 10**9), num_before
    for path in sorted((data / "traces").glob("rag_*.json")):
        for top_k in TOP_KS:
            yield retrieved_workload(path, top_k, 10**9), 0
