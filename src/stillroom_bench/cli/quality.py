"""The commands that measure a user's own documents, questions and machine."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer

from stillroom.cli.options import help_text
from stillroom.errors import UsageError
from stillroom_bench.cli.flags import Call, add_command
from stillroom_bench.quality import quality_options as options

if TYPE_CHECKING:
    from stillroom_bench.instrument.bench_report import BenchResult

RETRIEVAL_HELP = help_text(
    "Measure retrieval quality against relevance judgements, for every rule that fuses dense and sparse results.",
    "A data set is a folder in BEIR layout: corpus.jsonl, queries.jsonl, and qrels/test.tsv or qrels.tsv. The first "
    "run builds its index, which may take minutes; later runs reuse it from the work folder.",
    "Prints nDCG@10, Recall@5, Recall@10, Recall@100 and MRR@10 per set and rule, with significance tests.",
    examples=(
        "stillroom bench retrieval --dataset data/nfcorpus",
        "stillroom bench retrieval --dataset data/nfcorpus --dataset data/fiqa --output retrieval.json",
    ),
)

FOLLOW_UPS_HELP = help_text(
    "Measure which documents the second question of a conversation finds.",
    "Conversations of two questions are made from a data set with several questions a document: a follow-up says it "
    "for what the first question names, and a change of subject asks about another document. Compares searching for "
    "the second question alone, together with the first, and both, merged in turns or by score.",
    examples=(
        "stillroom bench follow-ups --dataset data/xquad",
        "stillroom bench follow-ups --dataset data/xquad --conversations 100 --output follow-ups.json",
    ),
)

INDEX_HELP = help_text(
    "Measure index quality and cost: recall against speed of flat, HNSW and IVF-PQ, hybrid search, and BM25.",
    "The data sets supply real texts, questions and embeddings; larger corpora are generated from them with a seed. "
    "Compared with Stillroom's indexes are faiss called directly, and hnswlib, usearch and bm25s if installed.",
    examples=(
        "stillroom bench index --dataset data/nfcorpus --dataset data/fiqa",
        "stillroom bench index --dataset data/nfcorpus --size 10000 --size 50000 --repeat 10 --html index.html",
        "stillroom bench index --dataset data/nfcorpus --size 10000 --pgvector postgresql://anna@db/docs",
    ),
)

FILTERS_HELP = help_text(
    "Measure recall and latency of approximate indexes under filters that allow 50 %, 10 %, 1 % and 0.1 % of the "
    "chunks.",
    "A filter allows random chunks, or the chunks of one subject. Stillroom's choice of strategy is compared with each "
    "strategy alone: compare the query with all allowed chunks, or always search the approximate index.",
    examples=(
        "stillroom bench filters --dataset data/nfcorpus",
        "stillroom bench filters --dataset data/nfcorpus --size 200000 --output filters.json",
    ),
)

QUESTIONS_HELP = help_text(
    "Measure the time that the query cache saves when questions repeat and documents change.",
    "Questions of the data set arrive at random times, popular questions more often. Compares search with and without "
    "the cache.",
    examples=(
        "stillroom bench questions --dataset data/nfcorpus",
        "stillroom bench questions --dataset data/nfcorpus --rate 50 --change-every 20 --zipf 1.2",
    ),
)

RUNTIME_HELP = help_text(
    "Measure prefill, decoding, batches and memory of the decoder on random weights, compared with other runtimes.",
    "Each peer runs in its own process under the Python that has it installed; `transformers` is always measured.",
    examples=(
        "stillroom bench runtime",
        "stillroom bench runtime --peer llama.cpp=llama/bin/python --peer vllm=vllm/bin/python --dtype bfloat16",
    ),
)

NEIGHBOURS_HELP = help_text(
    "Measure the time to the first token beside processes that keep every core busy.",
    "The same prompts run alone and beside the processes, with a fixed number of threads and with the number that "
    "follows the load, in turn. Also measured: the seconds until the processes are noticed, and until all threads are "
    "used again. How to read it: docs/runtime.md.",
    examples=(
        "stillroom bench neighbours",
        "stillroom bench neighbours --length 512 --requests 3 --processes 1 --output neighbours.json",
    ),
)

ENGINES_HELP = help_text(
    "Measure what a front with engines of its own costs on this machine, and what a second engine gains.",
    "Starts real servers on loopback addresses, asks them questions about the documents, and reads streamed answers. "
    "split: time to the first token, tokens per second, start-up and memory of a front with one engine, against one "
    "process. routing: hit rate and time to the first token of several engines against one with the same memory each, "
    "on questions that repeat by Zipf's law. How to read it: docs/front-and-engines.md.",
    examples=(
        "stillroom bench engines --documents examples/gazetteer --questions examples/questions.jsonl",
        "stillroom bench engines --documents examples/gazetteer --questions examples/questions.jsonl --experiment "
        "routing --different 60 --tokens 8 --output routing.json",
    ),
)

LOOKUP_HELP = help_text(
    "Measure the time per token of answers that quote their prompt, with and without prompt lookup.",
    "The answers are given, so both compute the same: they quote everything, half or nothing, in runs. How to read it: "
    "docs/runtime.md.",
    examples=("stillroom bench lookup", "stillroom bench lookup --requests 4 --run-length 16 --output lookup.json"),
)

FIXED_SHAPES_HELP = help_text(
    "Measure runtime.fixed_shapes: how many answers exact prefix reuse changes, and the time to first token.",
    "The same questions over random documents run one at a time, with and without reuse, with and without fixed "
    "shapes.",
    examples=(
        "stillroom bench fixed-shapes",
        "stillroom bench fixed-shapes --model ./models/qwen2.5-0.5b --questions 500 --output fixed-shapes.json",
    ),
)

QUALITY_HELP = help_text(
    "Measure how reuse at any position changes answers: exact match and agreement with a full prefill.",
    "Questions come from a JSON-lines file (`chunks`, a list of texts, `question`, optional `answer` and `kind`), "
    "from a JSON list (`ctxs` with `title` and `text`, `question`, `answers`), or from a data set in BEIR layout. The "
    "KV of each chunk is computed behind a chunk of another question, then reused at its position in the prompt, with "
    "a share of its tokens recomputed. Compared are all token selectors, a prefix cache, and a prefix cache that "
    "reorders documents. How to read it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench quality --questions eval.jsonl",
        "stillroom bench quality --questions data/xquad --limit 200 --model ./model --words 60",
        "stillroom bench quality --questions eval.jsonl --selector question --selector context --alpha 1 --focus 2",
        "stillroom bench quality --questions eval.jsonl --model ./model --ratio 0.15 --ratio 0.3 --output quality.json",
    ),
)

ANSWERS_HELP = help_text(
    "Measure answers end to end: exact match, F1, quotes, citations, abstention and time, for every model.",
    "Questions come from a data set in BEIR layout whose queries have `answers`, or from a JSON-lines file about a "
    "knowledge base: `question`, `answers` (a list, empty if the documents do not say) and optionally `document`. "
    "How to read it: docs/answers-bench.md.",
    examples=(
        "stillroom bench answers --questions data/xquad --gold --without-gold --limit 200",
        "stillroom bench answers --questions eval.jsonl --kb ./kb --output answers.json",
        "stillroom bench answers --questions data/xquad --model bundled --model ./model --limit 100",
    ),
)

HOPS_HELP = help_text(
    "Measure answers to questions over several documents, searched once and in several hops.",
    "Questions come from a JSON list (`ctxs` with `title` and `text`, `question`, `answers`), or from a JSON-lines "
    "file (`chunks`, `question`, `answer`). Their documents are one knowledge base, whose index the work folder keeps. "
    "Compared with several hops are one hop, and one hop that reads as many chunks. How to read it: docs/hops.md.",
    examples=(
        "stillroom bench hops --questions data/musique_s.json",
        "stillroom bench hops --questions data/musique_s.json --hops 2 --limit 50 --output hops.json",
        "stillroom bench hops --questions eval.jsonl --model ./model --reuse off --reuse exact --reuse anywhere",
    ),
)

SAVINGS_HELP = help_text(
    "Count the prompt tokens that reuse saves when searches return the same passages again.",
    "Compared are prefix caching, prefix caching with reordered passages (Cache-Craft's SET-CACHE), and reuse at any "
    "position. The knowledge tree makes the decisions; no KV is computed. A trace is JSON with `retrieved_docs` (a "
    "list of texts per request), or JSON lines with one such list each. Also counts how often the searches return the "
    "same passages, alone and in the same order. Results are deterministic, because nothing is timed. How to read it: "
    "docs/chunk-reuse.md.",
    examples=(
        "stillroom bench savings --trace rag.json",
        "stillroom bench savings --trace one.json --trace two.jsonl --capacity 0.2 --ratio 0.15 --output savings.json",
    ),
)

SUPPORT_HELP = help_text(
    "Measure how often the support check of citations is right.",
    "Questions that people asked about passages become statements, true ones and false ones. Prints precision and "
    "recall of each mark, with and without the embedder. How to read it: docs/citations.md.",
    examples=(
        "stillroom bench support --data data/reading-qa",
        "stillroom bench support --data data/reading-qa --part choose --output support.json",
    ),
)


CONTEXTS_HELP = help_text(
    "Measure answers by the context in which the KV of chunks was computed: alone, behind similar chunks, in their "
    "document.",
    "A line of the file has `documents` (lists of chunks), `retrieved` and `needed` (pairs of document and chunk), "
    "`question`, `answer`, and optionally `kind` and `distance`; or `chunks` and `needed_chunks` of one document. Each "
    "question is asked with the search result in order, shuffled, and without the chunk that names its subject. How to "
    "read it: docs/prepared.md.",
    examples=(
        "stillroom bench contexts --questions eval.jsonl",
        "stillroom bench contexts --questions long.jsonl --model ./model --window 8 --output contexts.json",
    ),
)

LOOKING_HELP = help_text(
    "Measure how well a model ranks candidates by looking at their prepared KV, beside search and a cross-encoder.",
    "The candidates of a question in a file (see `stillroom bench contexts --help`) are the chunks that it needs and "
    "others of the same and of other documents; those of a data set are what the search finds. The question is read "
    "behind each candidate apart, with KV computed alone and in its document. Scores are the question's likelihood, "
    "the certainty of the answer, and attention; heads are chosen on other questions. How to read it: "
    "docs/prepared.md.",
    examples=(
        "stillroom bench looking --questions eval.jsonl",
        "stillroom bench looking --dataset data/xquad --model ./model --limit 100 --output looking.json",
    ),
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands to `stillroom bench`."""
    add_command(app, "retrieval", options.RetrievalOptions, _retrieval, RETRIEVAL_HELP)
    add_command(app, "follow-ups", options.FollowUpOptions, _follow_ups, FOLLOW_UPS_HELP)
    add_command(app, "index", options.IndexOptions, _index, INDEX_HELP, ["config"])
    add_command(app, "filters", options.FilterOptions, _filters, FILTERS_HELP, ["config"])
    add_command(app, "questions", options.QuestionOptions, _questions, QUESTIONS_HELP)
    add_command(app, "runtime", options.RuntimeOptions, _runtime, RUNTIME_HELP, ["config"])
    add_command(app, "neighbours", options.NeighboursOptions, _neighbours, NEIGHBOURS_HELP, ["config"])
    add_command(app, "engines", options.EnginesOptions, _engines, ENGINES_HELP)
    add_command(app, "lookup", options.LookupOptions, _lookup, LOOKUP_HELP, ["config"])
    add_command(
        app,
        "fixed-shapes",
        options.FixedShapesOptions,
        _fixed_shapes,
        FIXED_SHAPES_HELP,
        ["config", "work_dir"],
    )
    add_command(app, "answers", options.EndToEndOptions, _end_to_end, ANSWERS_HELP)
    add_command(app, "hops", options.HopsOptions, _hops, HOPS_HELP)
    add_command(app, "quality", options.AnswerOptions, _answers, QUALITY_HELP, ["config", "work_dir"])
    add_command(app, "contexts", options.ContextsOptions, _contexts, CONTEXTS_HELP, ["config", "work_dir"])
    add_command(app, "looking", options.LookingOptions, _looking, LOOKING_HELP)
    add_command(app, "support", options.SupportOptions, _support, SUPPORT_HELP, ["config", "work_dir", "compare"])
    add_command(app, "savings", options.SavingsOptions, _savings, SAVINGS_HELP, ["config", "work_dir", "compare"])


def _needs_metrics() -> None:
    if find_spec("pytrec_eval") is None:
        raise UsageError("relevance metrics are not installed; run: pip install 'stillroom[bench]'")


def _follow_ups(chosen: options.FollowUpOptions, call: Call) -> "BenchResult":
    _needs_metrics()
    from stillroom_bench.quality.follow_ups import run_follow_ups

    return run_follow_ups(chosen, call.work_dir, call.settings(), call.say)


def _retrieval(chosen: options.RetrievalOptions, call: Call) -> "BenchResult":
    _needs_metrics()
    from stillroom_bench.quality.retrieval_quality import run_quality

    return run_quality(chosen, call.work_dir, call.settings(), call.say)


def _index(chosen: options.IndexOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.index import run_index

    return run_index(chosen, call.work_dir, call.say)


def _filters(chosen: options.FilterOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.filters import run_filters

    return run_filters(chosen, call.work_dir, call.say)


def _questions(chosen: options.QuestionOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.hot_questions import run_questions

    return run_questions(chosen, call.work_dir, call.settings(), call.say_run)


def _runtime(chosen: options.RuntimeOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.runtime import run_runtime

    return run_runtime(chosen, call.work_dir, on_progress=call.say)


def _neighbours(chosen: options.NeighboursOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.neighbours import run_neighbours

    return run_neighbours(chosen, call.work_dir, on_progress=call.say)


def _engines(chosen: options.EnginesOptions, call: Call) -> "BenchResult":
    if chosen.experiment == "split":
        call.refuse_unused("with --experiment split", "num_engines", "num_requests", "zipf", "share")
    from stillroom_bench.quality.engines import run_engines

    return run_engines(chosen, call.work_dir, call.settings(), call.say)


def _lookup(chosen: options.LookupOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.lookup import run_lookup

    return run_lookup(chosen, call.work_dir, on_progress=call.say)


def _fixed_shapes(chosen: options.FixedShapesOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.fixed_shapes import run_fixed_shapes

    return run_fixed_shapes(chosen, call.say)


def _savings(chosen: options.SavingsOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.savings import run_savings

    return run_savings(chosen, call.say)


def _support(chosen: options.SupportOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.support import run_support

    return run_support(chosen, call.say)


def _contexts(chosen: options.ContextsOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.contexts import run_contexts

    return run_contexts(chosen, call.say)


def _looking(chosen: options.LookingOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.looking import run_looking

    return run_looking(chosen, call.work_dir, call.settings(), call.say)


def _end_to_end(chosen: options.EndToEndOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.end_to_end_answers import run_answers

    return run_answers(chosen, call.work_dir, call.settings(), call.say)


def _hops(chosen: options.HopsOptions, call: Call) -> "BenchResult":
    from stillroom_bench.quality.hops import run_hops

    return run_hops(chosen, call.work_dir, call.settings(), call.say)


def _answers(chosen: options.AnswerOptions, call: Call) -> "BenchResult":
    from stillroom.answer_quality.arms import RATIOS, SELECTORS
    from stillroom.answer_quality.asking import QualityOptions, bench_runtime

    def on_progress(done: int, total: int) -> None:
        if done % 25 == 0 or done == total:
            call.say(f"{done} of {total} questions")

    if unknown := set(chosen.selectors) - set(SELECTORS):
        raise UsageError(f"unknown selectors {', '.join(sorted(unknown))}; known are {', '.join(SELECTORS)}")
    quality_options = QualityOptions(
        chosen.questions,
        chosen.num_questions,
        bench_runtime(chosen.model),
        ratios=chosen.ratios or RATIOS,
        selectors=chosen.selectors or SELECTORS,
        alphas=chosen.alphas,
        focus_window=chosen.focus_window,
        has_unturned=chosen.has_unturned,
        context="shuffled" if chosen.is_shuffled else "foreign",
        num_chunks=chosen.num_chunks,
        max_words=chosen.max_words,
        seed=chosen.seed,
        max_tokens=chosen.max_tokens,
    )
    from stillroom_bench.quality.answers import run_quality

    return run_quality(quality_options, kept=chosen.kept, on_progress=on_progress)
