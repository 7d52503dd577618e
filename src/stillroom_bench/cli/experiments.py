"""The commands that repeat the papers' experiments."""

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from stillroom.cli.options import help_text
from stillroom.errors import UsageError
from stillroom_bench.cli.flags import Call, add_command, imported
from stillroom_bench.experiments import options

if TYPE_CHECKING:
    from stillroom_bench.instrument.report import BenchResult

REUSE_HELP = help_text(
    "Measure what kept KV saves: time to first token against request rate, as in RAGCache's Figures 13 to 15.",
    "Requests come at random moments, some documents far more often than others. Compared are: no reuse, the least "
    "recently used on the device only (prefix caching), three tiers, and if asked for reuse anywhere; vLLM with its "
    "prefix cache and llama.cpp with its prompt cache get the same prompts at the same moments. How to read it: "
    "docs/reuse-bench.md.",
    examples=(
        "stillroom bench reuse",
        "stillroom bench reuse --dataset data/nq --curve mmlu --curve nq --k 1 --k 2 --peer vllm=vllm/bin/python",
        "stillroom bench reuse --search 1000000 --arm off --arm tiers --peer vllm=vllm/bin/python",
        "stillroom bench reuse --k 5 --arm off --arm lru --arm 'anywhere 15%'",
        "stillroom bench reuse --arm off --arm 'cache first' --max-tokens 16 --slo-ttft 0.5 --arrivals azure_conv.csv",
    ),
)

ANYWHERE_HELP = help_text(
    "Measure time to first token when documents are reused in another order than before.",
    "A Llama of 135 million random weights; documents come from device, host and disk, at several recompute ratios. "
    "--lasting asks many shuffled questions, to see whether the gain lasts. KVBoost can be measured too. How to read "
    "it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench anywhere",
        "stillroom bench anywhere --lasting 1000 --output anywhere.json",
        "stillroom bench anywhere --chunk-tokens 192 --peer kvboost=kvboost/bin/python",
    ),
)

PRELOADING_HELP = help_text(
    "Measure what loading kept documents adds to the time to first token, and what loading while others compute saves.",
    "The model and prompts of `bench anywhere`; documents on device, host, and disk (files in the system's memory, and "
    "not); with nobody before, and behind another question. How to read it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench preloading",
        "stillroom bench preloading --ratio 0 --repeat 20 --output preloading.json",
    ),
)

POLICIES_HELP = help_text(
    "Measure who should leave a full cache of KV: hit rate by policy and capacity, on the real tree without its bytes.",
    "Made workloads have the popularity of documents that the RAGCache paper measured; --data adds recorded traces "
    "(traces/rag_*.json, traces/mooncake_*.jsonl). Belady's offline rule is printed as the yardstick.",
    examples=(
        "stillroom bench policies",
        "stillroom bench policies --data data --output policies.json",
    ),
)

STRUCTURES_HELP = help_text(
    "Measure the heap, the token cache and the sketch beside the usual alternatives.",
    examples=(
        "stillroom bench structures",
        "stillroom bench structures --repeat 30 --output structures.json --html structures.html",
        "stillroom bench structures --compare structures.json",
    ),
)

CONVERGENCE_HELP = help_text(
    "Measure how early a search in stages shows the documents that it will end with, and what the stages cost.",
    "Dense searches run over real and made vectors, whole ones over the real documents. For each index: after which "
    "share of the stages the first 1, 3 and 5 documents stay as they are, and how often the last list is the plain "
    "search's.",
    examples=(
        "stillroom bench convergence --dataset data/nq-gold",
        "stillroom bench convergence --dataset data/nq-gold --size 50000 --stages 16 --output convergence.json",
    ),
)

SPECULATION_HELP = help_text(
    "Measure what it gains that the model begins to read the likely documents while the search goes on.",
    "Searches of an IVF-PQ index look at 12.5 to 100 % of its lists; prompts of two documents run on a model of random "
    "weights with 135 million parameters. Compared are: search first, begin early, and begin early where it pays; with "
    "one question at a time, and with four.",
    examples=(
        "stillroom bench pipeline speculation --dataset data/nq-gold",
        "stillroom bench pipeline speculation --dataset data/nq-gold --size 2000000 --output speculation.json",
    ),
)

REORDERING_HELP = help_text(
    "Measure what the order of admission is worth when requests come faster than they are answered, as in RAGCache's "
    "Figure 18.",
    "The same engine with little room for KV admits in the order of arrival, those first who find most of their prompt "
    "kept, with several starvation windows, or those who have least to compute. Each run is also simulated on the "
    "measured costs. How to read it: docs/reordering-bench.md.",
    examples=(
        "stillroom bench pipeline reordering",
        "stillroom bench pipeline reordering --curve nq --load 1.1 --load 2 --window 8 --window 32 --repeat 5",
    ),
)

TIERED_HELP = help_text(
    "Measure what it gains that the hot lists of an IVF-PQ index are in RAM and the others on disk.",
    "Vectors and questions are made; a tenth of the lists takes 40 % or 80 % of the accesses. The pages of the lists "
    "on disk are dropped before each batch, so the work folder should be on the disk in question. With --drift: how "
    "long it takes until the hot lists are in RAM again after a sudden shift of what is asked for. With --predict: how "
    "well throughput is told beforehand, by our model and by VectorLiteRAG's formula (its Figure 8).",
    examples=(
        "stillroom bench tiered",
        "stillroom bench tiered --size 500000 --lists 1024 --share 0.2 --batch 1 --batch 16 --output tiered.json",
        "stillroom bench tiered --drift --size 500000 --lists 1024 --share 0.2 --half-life 500 --half-life 1000",
        "stillroom bench tiered --predict --output tiered-model.json",
        "stillroom bench tiered --answers --probes 256 --repeat 3",
    ),
)

SIMULATE_HELP = help_text(
    "Simulate the papers' experiments at their scale: our engine and policies on modelled machines, in minutes.",
    "RAGCache's Figures 13 to 18 and Tables 2 and 4 and Cache-Craft's Figure 22, as ratios between arms with the "
    "paper's number beside ours. No model runs; what computing and loading cost comes from data files in which every "
    "number has its source. --validate runs one workload on a small model for real and simulated. How to read it: "
    "docs/simulate-bench.md.",
    examples=(
        "stillroom bench simulate",
        "stillroom bench simulate --experiment policies --experiment reordering --output simulate.json",
        "stillroom bench simulate --validate",
    ),
)

_IDLE = {
    "": ("half_lives",),
    " --predict": ("half_lives",),
    " --answers": ("shares", "batch_sizes", "half_lives"),
    " --drift": ("batch_sizes",),
}
"""Fields that a benchmark of `stillroom bench tiered` has no use for."""


def add_commands(app: typer.Typer, pipeline: typer.Typer) -> None:
    """Add the commands to `stillroom bench` and to `stillroom bench pipeline`."""
    add_command(app, "reuse", options.ReuseOptions, _reuse, REUSE_HELP, ["config"])
    add_command(app, "anywhere", options.AnywhereScope, _anywhere, ANYWHERE_HELP, ["config"])
    add_command(app, "preloading", options.PreloadingOptions, _preloading, PRELOADING_HELP, ["config"])
    add_command(app, "policies", options.PoliciesScope, _policies, POLICIES_HELP, ["config", "work_dir"])
    add_command(app, "structures", options.StructuresOptions, _structures, STRUCTURES_HELP, ["config", "work_dir"])
    add_command(app, "convergence", options.ConvergenceOptions, _convergence, CONVERGENCE_HELP, ["config"])
    add_command(app, "tiered", options.TieredScope, _tiered, TIERED_HELP, ["config"])
    add_command(app, "simulate", options.SimulateOptions, _simulate, SIMULATE_HELP, ["config", "compare"])
    add_command(pipeline, "speculation", options.SpeculationScope, _speculation, SPECULATION_HELP, ["config"])
    add_command(pipeline, "reordering", options.ReorderingOptions, _reordering, REORDERING_HELP, ["config"])


def _reuse(chosen: options.ReuseOptions, call: Call) -> "BenchResult":
    return imported("experiments.reuse:run_reuse")(chosen, call.work_dir, on_progress=call.say)


def _anywhere(chosen: options.AnywhereScope, call: Call) -> "BenchResult":
    call.work_dir.mkdir(parents=True, exist_ok=True)
    return imported("experiments.anywhere:run_anywhere")(chosen, call.work_dir, on_progress=call.say)


def _preloading(chosen: options.PreloadingOptions, call: Call) -> "BenchResult":
    call.work_dir.mkdir(parents=True, exist_ok=True)
    return imported("experiments.preloading:run_preloading")(chosen.scope(), call.work_dir, on_progress=call.say)


def _policies(chosen: options.PoliciesScope, call: Call) -> "BenchResult":
    return imported("experiments.policies:run_policies")(chosen, call.say)


def _structures(chosen: options.StructuresOptions, call: Call) -> "BenchResult":
    return imported("experiments.structures:run_structures")(chosen, call.say_run)


def _convergence(chosen: options.ConvergenceOptions, call: Call) -> "BenchResult":
    return imported("experiments.convergence:run_convergence")(chosen, call.work_dir, call.say)


def _speculation(chosen: options.SpeculationScope, call: Call) -> "BenchResult":
    return imported("experiments.speculation:run_speculation")(chosen, call.work_dir, on_progress=call.say)


def _reordering(chosen: options.ReorderingOptions, call: Call) -> "BenchResult":
    return imported("experiments.reordering:run_reordering")(chosen, call.work_dir, on_progress=call.say)


def _simulate(chosen: options.SimulateOptions, call: Call) -> "BenchResult":
    if not chosen.validate:
        return imported("experiments.simulate:run_simulate")(chosen, call.say)
    call.refuse_idle("with --validate", "experiments", "num_requests", "num_warm", "num_documents", "companions")
    run = imported("experiments.simulate_validation:run_validation")
    return run(call.work_dir, seed=chosen.seed, on_progress=call.say)


def _tiered(chosen: options.TieredScope, call: Call) -> "BenchResult":
    kinds = [f" --{name}" for name in ("drift", "answers", "predict") if getattr(chosen, name)]
    kind = "".join(kinds)
    if len(kinds) > 1:
        raise UsageError(f"{' and'.join(kinds).strip()} are different benchmarks; give one of them")
    call.refuse_idle(f"with{kind}" if kind else "without --drift", *_IDLE[kind])
    if chosen.drift and call.is_given("shares") and len(chosen.shares) > 1:
        raise UsageError("--drift takes one --share")
    call.must_compare(f"stillroom bench tiered{kind}")
    if chosen.drift:
        from stillroom_bench.experiments.tiered_drift import DriftScope, run_drift

        default = DriftScope()
        share = chosen.shares[0] if call.is_given("shares") else default.share
        drift = replace(default, share=share, half_lives=chosen.half_lives or default.half_lives)
        return run_drift(chosen, drift, call.work_dir, call.say)
    if chosen.answers:
        from stillroom_bench.experiments.tiered_answers import AnswerScope, run_answers

        return run_answers(chosen, AnswerScope(), call.work_dir, on_progress=call.say)
    if chosen.predict:
        from stillroom.retrieval.tiers.search_profile import BATCH_SIZES

        scope = chosen if call.is_given("batch_sizes") else replace(chosen, batch_sizes=BATCH_SIZES)
        return imported("experiments.tiered_model:run_prediction")(scope, call.work_dir, call.say)
    return imported("experiments.tiered:run_tiered")(chosen, call.work_dir, call.say)
