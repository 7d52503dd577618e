"""Commands that repeat the papers' experiments."""

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from stillroom.cli.options import help_text
from stillroom.errors import UsageError
from stillroom_bench.cli.flags import Call, add_command
from stillroom_bench.experiments import experiment_options as options
from stillroom_bench.experiments.reuse_options import ReuseOptions

if TYPE_CHECKING:
    from stillroom_bench.instrument.bench_report import BenchResult

REUSE_HELP = help_text(
    "Measure the benefit of KV reuse: time to first token against request rate, as in RAGCache's Figures 13 to 15.",
    "Requests arrive at random times; popular documents are requested far more often. Compared are no reuse, prefix "
    "caching (LRU on the device), three tiers, and optionally reuse at any position; vLLM with its prefix cache and "
    "llama.cpp with its prompt cache receive the same prompts at the same times. How to read it: docs/reuse-bench.md.",
    examples=(
        "stillroom bench reuse",
        "stillroom bench reuse --dataset data/nq --curve mmlu --curve nq --k 1 --k 2 --peer vllm=vllm/bin/python",
        "stillroom bench reuse --search 1000000 --arm off --arm tiers --peer vllm=vllm/bin/python",
        "stillroom bench reuse --k 5 --arm off --arm lru --arm 'anywhere 15%'",
        "stillroom bench reuse --arm off --arm 'cache first' --max-tokens 16 --slo-ttft 0.5 --arrivals azure_conv.csv",
    ),
)

ANYWHERE_HELP = help_text(
    "Measure time to first token when the KV of documents is reused in another order.",
    "The model is a Llama with 135 million random weights; documents come from device, host and disk, at several "
    "recompute ratios. --lasting runs many shuffled questions, to see whether the gain lasts. KVBoost can be a peer. "
    "How to read it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench anywhere",
        "stillroom bench anywhere --lasting 1000 --output anywhere.json",
        "stillroom bench anywhere --chunk-tokens 192 --peer kvboost=kvboost/bin/python",
    ),
)

ATTENTION_HELP = help_text(
    "Measure how the documents of a prompt attend to each other, as in Cache-Craft's Figures 7, 9, 10 and 14.",
    "Prints the attention within and between documents, how many tokens have most of it, how far the hidden states of "
    "a document move with each document before it, and whether reuse without repair keeps the answer. Questions are "
    "those of `stillroom bench quality`. Nothing is timed. How to read it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench attention --questions eval.jsonl",
        "stillroom bench attention --questions data/xquad --limit 100 --words 40 --output attention.json",
    ),
)

PREPARED_HELP = help_text(
    "Measure time to first token of questions that were never asked, over documents that were prepared.",
    "The model is a Llama with 135 million random weights. Prepared chunks come from device, host and disk; with exact "
    "reuse only the best chunk is found. Also prints what preparing costs. How to read it: docs/prepared.md.",
    examples=("stillroom bench prepared", "stillroom bench prepared --repeat 30 --output prepared.json"),
)

FIRST_QUESTIONS_HELP = help_text(
    "Measure time to first token where a third of the questions are about documents never asked for before.",
    "Documents have Zipf popularity; their number is computed from the share of first questions. Compared are no "
    "reuse, exact reuse on device, host and disk, and documents prepared with several budgets, most demanded first. "
    "The model is a Llama with 135 million random weights. How to read it: docs/prepared.md.",
    examples=(
        "stillroom bench first-questions",
        "stillroom bench first-questions --repeat 3 --output first-questions.json",
        "stillroom bench first-questions --companions drawn --anywhere --budget 1",
    ),
)

PRELOADING_HELP = help_text(
    "Measure how much loading cached documents adds to the time to first token, and how much overlap saves.",
    "Uses the model and prompts of `bench anywhere`. Documents are on device, host, or disk (with and without the "
    "operating system's page cache); the request runs alone or queues behind another question. How to read it: "
    "docs/chunk-reuse.md.",
    examples=(
        "stillroom bench preloading",
        "stillroom bench preloading --ratio 0 --repeat 20 --output preloading.json",
    ),
)

POLICIES_HELP = help_text(
    "Measure what is evicted from a full KV cache: hit rate by policy and capacity.",
    "The knowledge tree makes the decisions; no KV is computed. Generated workloads have the document popularity that "
    "RAGCache measured; --data adds recorded traces (traces/rag_*.json, traces/mooncake_*.jsonl). Belady's offline "
    "rule is the reference.",
    examples=(
        "stillroom bench policies",
        "stillroom bench policies --data data --output policies.json",
        "stillroom bench policies --changing --repeat 6",
        "stillroom bench policies --anywhere --repeat 6",
        "stillroom bench policies --recorded --data data --requests 600 --repeat 6",
    ),
)

STRUCTURES_HELP = help_text(
    "Measure the heap, the token cache and the frequency sketch against common alternatives.",
    examples=(
        "stillroom bench structures",
        "stillroom bench structures --repeat 30 --output structures.json --html structures.html",
        "stillroom bench structures --compare structures.json",
    ),
)

COMPONENTS_HELP = help_text(
    "Measure time and memory of each part of a request: KV accounting, scheduler, BM25, HNSW, hybrid search.",
    "After llmds' Tables 2 to 4 and Figures 4 to 6, with the paper's sizes. Times are processor time of one thread; "
    "memory is the growth of the process's peak. How to read it: docs/structures-bench.md.",
    examples=("stillroom bench components", "stillroom bench components --repeat 30 --output components.json"),
)

CONVERGENCE_HELP = help_text(
    "Measure how early a staged search finds its final documents, and what the stages cost.",
    "Dense searches run over real and generated vectors, hybrid searches over the real documents. Prints for each "
    "index the share of the stages after which the first 1, 3 and 5 documents are final, and how often the last list "
    "equals that of an unstaged search.",
    examples=(
        "stillroom bench convergence --dataset data/nq-gold",
        "stillroom bench convergence --dataset data/nq-gold --size 50000 --stages 16 --output convergence.json",
    ),
)

SPECULATION_HELP = help_text(
    "Measure the gain of speculative prefill: the model reads the likely documents while the search runs.",
    "Searches probe 12.5 to 100 % of the lists of an IVF-PQ index; prompts of two documents run on a model with 135 "
    "million random weights. Compared are no speculation, speculation always, and speculation where it pays, with one "
    "question at a time and with four.",
    examples=(
        "stillroom bench pipeline speculation --dataset data/nq-gold",
        "stillroom bench pipeline speculation --dataset data/nq-gold --size 2000000 --output speculation.json",
        "stillroom bench pipeline speculation --dataset data/nq-gold --on-disk --share 1 --k 1 --document-tokens 128",
    ),
)

REORDERING_HELP = help_text(
    "Measure the effect of admission order on an overloaded engine, as in RAGCache's Figure 18.",
    "An engine with little memory for KV admits requests in order of arrival, by highest ratio of cached to remaining "
    "tokens with several starvation windows, or by fewest remaining tokens. Each run is also simulated with the "
    "measured costs. How to read it: docs/reordering-bench.md.",
    examples=(
        "stillroom bench pipeline reordering",
        "stillroom bench pipeline reordering --curve nq --load 1.1 --load 2 --window 8 --window 32 --repeat 5",
    ),
)

TIERED_HELP = help_text(
    "Measure the gain of keeping the hot lists of an IVF-PQ index in RAM and the others on disk.",
    "Vectors and questions are generated; a tenth of the lists takes 40 % or 80 % of the accesses. Pages of the lists "
    "on disk are dropped before each batch, so --work-dir should be on the disk to measure. --drift measures how long "
    "it takes until the hot lists are in RAM after the popular topics change. --predict compares measured throughput "
    "with the predictions of Stillroom's model and of VectorLiteRAG's formula (its Figure 8). --answers measures times "
    "to first token, beside what VectorLiteRAG's rule and a simulation plan for them. --parts measures what a search "
    "consists of.",
    examples=(
        "stillroom bench tiered",
        "stillroom bench tiered --size 500000 --lists 1024 --share 0.2 --batch 1 --batch 16 --output tiered.json",
        "stillroom bench tiered --drift --size 500000 --lists 1024 --share 0.2 --half-life 500 --half-life 1000",
        "stillroom bench tiered --predict --output tiered-model.json",
        "stillroom bench tiered --answers --probes 256 --repeat 3",
        "stillroom bench tiered --parts --batch 1 --batch 16",
    ),
)

SIMULATE_HELP = help_text(
    "Simulate the papers' experiments at full scale, in minutes: Stillroom's engine on modelled machines.",
    "Covers RAGCache's Figures 13 to 18 and Tables 2 and 4, and Cache-Craft's Figures 22 to 24, as ratios between arms "
    "next to the paper's. No model runs; costs of computing and loading come from data files that give the source of "
    "every number. --validate runs one workload on a small model and compares the measurement with the simulation. How "
    "to read it: docs/simulate-bench.md.",
    examples=(
        "stillroom bench simulate",
        "stillroom bench simulate --experiment policies --experiment reordering --output simulate.json",
        "stillroom bench simulate --validate",
    ),
)

CLUSTER_HELP = help_text(
    "Simulate which engine of a cluster gets a request: routing by kept chunks, prefixes, hashes or load.",
    "Stillroom's engines and router run on modelled machines. traces: recorded retrievals, and whether routing by "
    "chunks beats routing by prefix; generated: topics and independent chunks; age: old beliefs, several fronts; "
    "changes: engines lost and added; tier: a KV tier that they share over the network. How to read it: "
    "docs/cluster.md.",
    examples=(
        "stillroom bench cluster --data data/traces",
        "stillroom bench cluster --data data/traces --mode exact --engines 4 --repeat 3",
        "stillroom bench cluster --experiment generated --experiment age --engines 16 --output cluster.json",
    ),
)

_UNUSED = {
    "": ("half_lives", "together"),
    " --predict": ("half_lives", "together"),
    " --answers": ("shares", "batch_sizes", "half_lives"),
    " --drift": ("batch_sizes", "together"),
    " --parts": ("shares", "half_lives", "together"),
}
"""Fields without effect, by benchmark of `stillroom bench tiered`."""


def add_commands(app: typer.Typer, pipeline: typer.Typer) -> None:
    """Add the commands to `stillroom bench` and to `stillroom bench pipeline`."""
    add_command(app, "reuse", ReuseOptions, _reuse, REUSE_HELP, ["config"])
    add_command(app, "anywhere", options.AnywhereBenchOptions, _anywhere, ANYWHERE_HELP, ["config"])
    add_command(
        app, "attention", options.AttentionOptions, _attention, ATTENTION_HELP, ["config", "work_dir", "compare"]
    )
    add_command(app, "prepared", options.PreparedBenchOptions, _prepared, PREPARED_HELP, ["config"])
    add_command(
        app, "first-questions", options.FirstQuestionsOptions, _first_questions, FIRST_QUESTIONS_HELP, ["config"]
    )
    add_command(app, "preloading", options.PreloadingOptions, _preloading, PRELOADING_HELP, ["config"])
    add_command(app, "policies", options.PoliciesOptions, _policies, POLICIES_HELP, ["config", "work_dir"])
    add_command(app, "structures", options.StructuresOptions, _structures, STRUCTURES_HELP, ["config", "work_dir"])
    add_command(app, "components", options.ComponentsOptions, _components, COMPONENTS_HELP, ["config", "work_dir"])
    add_command(app, "convergence", options.ConvergenceOptions, _convergence, CONVERGENCE_HELP, ["config"])
    add_command(app, "tiered", options.TieredOptions, _tiered, TIERED_HELP, ["config"])
    add_command(app, "simulate", options.SimulateOptions, _simulate, SIMULATE_HELP, ["config", "compare"])
    add_command(app, "cluster", options.ClusterOptions, _cluster, CLUSTER_HELP, ["config", "compare", "work_dir"])
    add_command(pipeline, "speculation", options.SpeculationOptions, _speculation, SPECULATION_HELP, ["config"])
    add_command(pipeline, "reordering", options.ReorderingOptions, _reordering, REORDERING_HELP, ["config"])


def _reuse(chosen: ReuseOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.reuse_rates import run_reuse

    return run_reuse(chosen, call.work_dir, on_progress=call.say)


def _anywhere(chosen: options.AnywhereBenchOptions, call: Call) -> "BenchResult":
    call.work_dir.mkdir(parents=True, exist_ok=True)
    from stillroom_bench.experiments.anywhere import run_anywhere

    return run_anywhere(chosen, call.work_dir, on_progress=call.say)


def _attention(chosen: options.AttentionOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.chunk_attention import run_attention

    return run_attention(chosen, call.say)


def _prepared(chosen: options.PreparedBenchOptions, call: Call) -> "BenchResult":
    call.work_dir.mkdir(parents=True, exist_ok=True)
    from stillroom_bench.experiments.prepared import run_prepared

    return run_prepared(chosen, call.work_dir, on_progress=call.say)


def _first_questions(chosen: options.FirstQuestionsOptions, call: Call) -> "BenchResult":
    call.work_dir.mkdir(parents=True, exist_ok=True)
    from stillroom_bench.experiments.first_questions import run_first_questions

    return run_first_questions(chosen, call.work_dir, on_progress=call.say)


def _preloading(chosen: options.PreloadingOptions, call: Call) -> "BenchResult":
    call.work_dir.mkdir(parents=True, exist_ok=True)
    from stillroom_bench.experiments.preloading import run_preloading

    return run_preloading(chosen.as_anywhere(), call.work_dir, on_progress=call.say)


def _policies(chosen: options.PoliciesOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.policies import run_policies
    from stillroom_bench.experiments.policy_choice import run_anywhere_policies, run_policy_choice
    from stillroom_bench.experiments.recorded_policies import run_recorded_policies

    runs = {"changing": run_policy_choice, "anywhere": run_anywhere_policies, "recorded": run_recorded_policies}
    kinds = [name for name in runs if getattr(chosen, name)]
    if len(kinds) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in kinds)} are different benchmarks; choose one")
    return runs.get("".join(kinds), run_policies)(chosen, call.say)


def _structures(chosen: options.StructuresOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.structures import run_structures

    return run_structures(chosen, call.say_run)


def _components(chosen: options.ComponentsOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.components import run_components

    return run_components(chosen, call.say_run)


def _convergence(chosen: options.ConvergenceOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.convergence import run_convergence

    return run_convergence(chosen, call.work_dir, call.say)


def _speculation(chosen: options.SpeculationOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.speculative_prefill import run_speculation

    return run_speculation(chosen, call.work_dir, on_progress=call.say)


def _reordering(chosen: options.ReorderingOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.reordering import run_reordering

    return run_reordering(chosen, call.work_dir, on_progress=call.say)


def _simulate(chosen: options.SimulateOptions, call: Call) -> "BenchResult":
    if not chosen.validate:
        from stillroom_bench.experiments.simulate import run_simulate

        return run_simulate(chosen, call.say)
    call.refuse_unused("with --validate", "experiments", "num_requests", "num_warm", "num_documents", "companions")
    from stillroom_bench.experiments.simulate_validation import run_validation

    return run_validation(call.work_dir, seed=chosen.seed, on_progress=call.say)


def _cluster(chosen: options.ClusterOptions, call: Call) -> "BenchResult":
    from stillroom_bench.experiments.cluster import run_cluster

    return run_cluster(chosen, call.say)


def _tiered(chosen: options.TieredOptions, call: Call) -> "BenchResult":
    kinds = [f" --{name}" for name in ("drift", "answers", "predict", "parts") if getattr(chosen, name)]
    kind = "".join(kinds)
    if len(kinds) > 1:
        raise UsageError(f"{' and'.join(kinds).strip()} are different benchmarks; choose one")
    call.refuse_unused(f"with{kind}" if kind else "without --drift", *_UNUSED[kind])
    if chosen.drift and call.is_given("shares") and len(chosen.shares) > 1:
        raise UsageError("--drift takes one --share")
    call.must_compare(f"stillroom bench tiered{kind}")
    if chosen.drift:
        from stillroom_bench.experiments.tiered_drift import DriftOptions, run_drift

        default = DriftOptions()
        share = chosen.shares[0] if call.is_given("shares") else default.share
        drift = replace(default, share=share, half_lives=chosen.half_lives or default.half_lives)
        return run_drift(chosen, drift, call.work_dir, call.say)
    if chosen.answers:
        from stillroom_bench.experiments.tiered_answers import TieredAnswersOptions, run_answers

        asked = TieredAnswersOptions(together=chosen.together)
        return run_answers(chosen, asked, call.work_dir, on_progress=call.say)
    if chosen.parts:
        from stillroom_bench.experiments.tiered_parts import run_parts

        return run_parts(chosen, call.say)
    if chosen.predict:
        from stillroom.retrieval.tiers.search_profile import BATCH_SIZES

        predicted = chosen if call.is_given("batch_sizes") else replace(chosen, batch_sizes=BATCH_SIZES)
        from stillroom_bench.experiments.tiered_model import run_prediction

        return run_prediction(predicted, call.work_dir, call.say)
    from stillroom_bench.experiments.tiered_throughput import run_tiered

    return run_tiered(chosen, call.work_dir, call.say)
