"""Generates the model card: description, quality, training data, training run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from training.data.sources import EXCLUDED, SOURCES
from training.data.worlds import SILENT
from training.evaluation.report import as_markdown

_HEAD = """---
language: en
library_name: transformers
pipeline_tag: text-generation
license: cc-by-sa-4.0
---
"""


def card(
    name: str, manifest: Mapping[str, Any], log: Sequence[Mapping[str, Any]], report: Mapping[str, Any] | None
) -> str:
    """Return the card as Markdown with the front matter of model hubs.

    Args:
        manifest: manifest of the data.
        log: log of the run.
        report: report of the evaluation; None: the card says that there was none.

    Raises:
        ValueError: manifest, log and report are of different data.
    """
    begin = next(line for line in log if "recipe" in line)
    if any(of["data"] != manifest["digest"] for of in (begin, report) if of is not None):
        raise ValueError("run, evaluation and data do not belong together; train, export and evaluate with this data")
    sections = {
        f"# {name}": _what(begin),
        "## How good it is": _how_good(report),
        "## What it learned from": _data(manifest),
        "## How it was made": _run(begin, log, manifest),
    }
    return _HEAD + "\n\n".join(f"{title}\n\n{text.strip()}" for title, text in sections.items()) + "\n"


def _what(begin: Mapping[str, Any]) -> str:
    shape = begin["recipe"]["shape"]
    return (
        f"A Llama of {begin['parameters'] / 1e6:.1f} million parameters ({shape['num_layers']} layers, hidden size "
        f"{shape['hidden_size']}, {shape['num_heads']} query and {shape['num_kv_heads']} key/value heads, context "
        f"{shape['max_positions']:,}, byte-level BPE of {shape['vocab_size']:,}), trained from scratch to answer "
        f'English questions from one to six retrieved chunks with a span of their text, or with "{SILENT}" It has '
        "almost no knowledge of its own and no other purpose.\n\n"
        "Stillroom makes its prompt from its chat template: the chunks, each between `<document>` and "
        "`</document>` with its heading, then `Question: ...`. Decode greedily; an answer ends with `<|im_end|>`."
    )


def _how_good(report: Mapping[str, Any] | None) -> str:
    if report is None:
        return "Not evaluated."
    return as_markdown(report) + (
        "\nxquad: questions about Wikipedia articles over their paragraph and the four others that "
        "BM25 ranks next. Unanswerable: the same questions over five such paragraphs without the answer. microworld: "
        "generated worlds whose persons, companies, towns, ships and rivers do not occur in training "
        "(for names of two words, the pair; each word may occur in others). Intervals resample documents and worlds. "
        "Stillroom's engine computed the answers greedily in float32."
    )


def _data(manifest: Mapping[str, Any]) -> str:
    counts = manifest["counts"]["train"]
    licences = ", ".join(dict.fromkeys(source.licence for source in SOURCES))
    return (
        f"{sum(counts['passages'].values()):,} passages ({counts['characters'] / 1e6:.1f} million characters), "
        f"{counts['questions by people']:,} questions by people and {counts['worlds']:,} generated worlds. Every step "
        "draws from these: sentences with a blank, questions made from sentences by rules, replaced numbers, dates "
        f"and names, and questions without an answer. Licences: {licences}; "
        f"[ATTRIBUTION.md](ATTRIBUTION.md) names the works. Excluded: {', '.join(EXCLUDED)}.\n\n"
        f"Held-out documents, with every passage that shares more than two runs of eight words with them: "
        f"{', '.join(manifest['held out'])}."
    )


def _run(begin: Mapping[str, Any], log: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> str:
    recipe = begin["recipe"]
    steps = max(int(line.get("step", 0)) for line in log)
    tokens = steps * recipe["num_rows"] * recipe["row_tokens"]
    held = [line["held out"] for line in log if "held out" in line]
    return (
        f"{steps:,} steps of {recipe['num_rows']} rows of {recipe['row_tokens']:,} tokens, {tokens / 1e6:.0f} million "
        f"tokens in all, on {begin['device']}; AdamW, learning rate {recipe['learning_rate']}, schedule "
        f"{recipe['schedule']}, seed {recipe['seed']}. Data {manifest['digest'][:16]}, commit "
        f"{begin['environment']['commit']}. Last scores on held-out batches (nats per token; share of answers whose "
        f"every token is predicted given those before): {json.dumps(held[-1]) if held else 'none'}."
    )
