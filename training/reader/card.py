"""Writes the reader's model card and its attribution."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.attribution import LINKS
from training.data.sources import PEOPLE
from training.reader.examples import is_held_out, is_held_out_passage, read_rows, technical_files
from training.reader.recurring import ENCYCLOPAEDIC
from training.reader.train import Recipe

OTHERS = [one for one in ENCYCLOPAEDIC if one not in PEOPLE]
"""Sources of texts from which questions are made."""

_HEAD = """---
language: en
pipeline_tag: question-answering
license: cc-by-sa-4.0
base_model: sentence-transformers/all-MiniLM-L6-v2
---
# Stillroom's bundled reader

An extractive question-answering model of 22 million parameters for English. It reads a question and passages, and
marks the words of a passage that answer it, or refuses. It writes no text of its own: an answer is a part of a
passage. Scores of different passages can be compared. The architecture is that of
[all-MiniLM-L6-v2](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) (BERT, 6 layers, hidden size 384,
12 heads), with one linear head for the start and the end of an answer. Weights are bfloat16. The file lacks the
word embeddings: they are those of all-MiniLM-L6-v2, unchanged, and Stillroom reads them from the installed package
of its embedder.

`config.json` has the sizes, the threshold below which Stillroom answers "The documents do not say.", and the
SHA-256 of the word embeddings.
"""

_LIMITS = """English only. Passages longer than some 300 words are cut. An answer is one run of words of one
passage: the reader does not count, compare, combine passages or answer yes or no. It marks the
likeliest words even if a passage is wrong; the threshold catches a part of these cases, as the
table above says. Questions about code, and passages that are mostly code or tables, are answered
less well than prose. A question in words that the passage lacks is often refused, or answered from
another passage: compare the rows of paraphrased questions with the same questions in their first words."""

_LICENCE = """The weights derive from all-MiniLM-L6-v2 (Apache-2.0) and are licensed under CC BY-SA 4.0, as a part of
the training data is. [ATTRIBUTION.md](ATTRIBUTION.md) names all works with their licences."""

_HELD_OUT = """No question of these sets was in training: xquad is held out completely, one title in 25 of
reading-qa and one technical passage in 8 by a hash. One source, QED, is a part of Natural
Questions: do not read figures on Natural Questions as those of unseen data."""


@dataclass(frozen=True, slots=True)
class SourceCount:
    name: str
    licence: str
    num_passages: int
    num_questions: int
    num_held_out: int
    """Questions that are kept for evaluation."""


def count(reading_qa: Path, questions: Path, more: Path | None = None) -> list[SourceCount]:
    """Count passages and questions of the sources of reading-qa, of our own about them, and of the technical ones."""
    passages = {row["_id"]: row for row in read_rows(reading_qa / "passages.jsonl")}
    asked = [passages[row["passage"]] for row in read_rows(reading_qa / "questions.jsonl")]
    found = []
    for source in PEOPLE:
        own = [row for row in asked if row["source"] == source.name]
        num_held = sum(is_held_out(row["title"]) for row in own)
        num_passages = sum(row["source"] == source.name for row in passages.values())
        found.append(SourceCount(source.name, source.licence, num_passages, len(own), num_held))
    if more is not None:
        own = list(read_rows(more))
        num_passages = len({row["passage"] for row in own})
        found.append(SourceCount("our own about passages of the above", "Apache-2.0", num_passages, len(own), 0))
    rows = [row for file in technical_files(questions) for row in read_rows(file)]
    held = sum(len(row["questions"]) for row in rows if is_held_out_passage(row["text"]))
    total = sum(len(row["questions"]) for row in rows)
    return [*found, SourceCount("technical questions", "see ATTRIBUTION.md", len(rows), total, held)]


def read_report(path: Path) -> dict[str, Any] | None:
    """Read a report; None if there is none."""
    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def card(
    counts: Sequence[SourceCount],
    log: Sequence[Mapping[str, Any]],
    evaluation: Mapping[str, Any] | None,
    threshold: Mapping[str, Any] | None,
) -> str:
    """Return the card as Markdown.

    Args:
        log: log of the run.
        evaluation: report of `evaluate`; None: the card says that there was none.
        threshold: report of `threshold`; None: the same.
    """
    recipe: Mapping[str, Any] = next((line["recipe"] for line in log if "recipe" in line), {})
    runs = [line for line in log if "run" in line and "recipe" in line]
    made = next((line["questions"] for line in runs if line["examples"] == "made"), 0)
    sections = {
        "## Quality": "\n".join(_quality(evaluation)),
        "## Refusals": "\n".join(_refusals(threshold)),
        "## Training data": "\n".join(_data(counts, recipe.get("skipped", Recipe().skipped), made)),
        "## Training": "\n".join(_runs(runs, log)) if runs else _run(recipe, log),
        "## Limits": _LIMITS,
        "## Licence": _LICENCE,
    }
    return _HEAD + "".join(f"\n{title}\n\n{text.strip()}\n" for title, text in sections.items())


def _quality(report: Mapping[str, Any] | None) -> Iterator[str]:
    if report is None:
        yield "Not evaluated."
        return
    yield "Each question over the passage that answers it. Intervals resample titles."
    yield ""
    yield "| set | questions | titles | exact match | F1 | quoted sentence holds the answer |"
    yield "|---|---|---|---|---|---|"
    for row in report["sets"]:
        cells = " | ".join(_interval(one) for one in row["figures"])
        yield f"| {row['set']} | {row['questions']:,} | {row['titles']:,} | {cells} |"
    yield ""
    yield _HELD_OUT


def _refusals(report: Mapping[str, Any] | None) -> Iterator[str]:
    if report is None:
        yield "No threshold was chosen."
        return
    yield (
        f"The threshold is {report['threshold']}, chosen on the whole sets, which weigh the same. Each question is "
        f"read over {report['passages']} passages: the one that answers it and those that a search finds, and then "
        "only the latter. Confidence is fitted on these sets, too; its error is the mean difference from the share "
        "of right answers, with and without the passage."
    )
    yield ""
    columns = "set|questions|answered|answered, and the quote holds the answer|refused without the passage"
    yield f"| {columns.replace('|', ' | ')} | error of confidence |"
    yield "|---|---|---|---|---|---|"
    for row in report["sets"]:
        if row["figures"]:
            cells = [*(_interval(one) for one in row["figures"]), f"{row['calibration error']:.3f}"]
            yield f"| {row['set']} | {row['questions']:,} | {' | '.join(cells)} |"


def _interval(one: Mapping[str, Any]) -> str:
    return f"{one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})"


def _data(counts: Sequence[SourceCount], skipped: Sequence[str], num_made: int) -> Iterator[str]:
    yield "Questions that people wrote about passages, each with the exact answer."
    yield ""
    yield "| source | licence | passages | questions in training | held out |"
    yield "|---|---|---|---|---|"
    for one in counts:
        trained = 0 if one.name in skipped else one.num_questions - one.num_held_out
        yield f"| {one.name} | {one.licence} | {one.num_passages:,} | {trained:,} | {one.num_held_out:,} |"
    yield ""
    yield (
        f"Passages of {' and '.join(skipped)} serve only as wrong passages. A wrong passage is one that a search finds "
        "for a question and that does not hold the answer; in a part of the steps only it is shown, so that the model "
        "learns to refuse."
    )
    if num_made:
        yield ""
        yield (
            f"Before them came {num_made:,} questions made from text by rules: a sentence whose name, number or phrase "
            "is replaced by a blank or a question word, over a passage of the same article that holds it too, without "
            "that sentence (Glass and others 2020). Articles of xquad and held-out titles are not among them."
        )


def _runs(runs: Sequence[Mapping[str, Any]], log: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describe runs of `device-train` and the mean of their weights."""
    yield (
        "Several runs on a GPU. A step has questions with one or two passages of 64 to 200 tokens, cut between "
        "sentences; all weights except the word embeddings are trained, by AdamW in bfloat16 products. Starts, ends "
        "and whole answers are normalised over all passages of a question and the choice of no answer (shared "
        "normalisation, Clark and Gardner 2018; whole answers: Fajcik and others 2021). Where there are teachers, a "
        "part of the loss is the cross entropy with the mean of their probabilities."
    )
    yield ""
    columns = "run|questions|starts with|teachers|their share of the loss|steps|questions a step|learning rate|dropout"
    yield f"| {columns.replace('|', ' | ')} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in runs:
        recipe, teachers = one["recipe"], ", ".join(one["teachers"])
        asked = f"{one['questions']:,} {'made from text' if one['examples'] == 'made' else 'by people, technical'}"
        taught = f"{recipe['taught']:g}" if teachers else ""
        sizes = f"{one['steps']:,} | {recipe['groups_per_step']} | {recipe['learning_rate']:g} | {recipe['dropout']:g}"
        yield f"| {one['run']} | {asked} | {one['first'] or 'all-MiniLM-L6-v2'} | {teachers} | {taught} | {sizes} |"
    means = [line for line in log if "mean" in line]
    for line in means:
        shares = line["mean"]
        is_equal = len(set(shares.values())) == 1
        parts = ", ".join(run if is_equal else f"{part:g} of {run}" for run, part in shares.items())
        yield ""
        yield f"{'The bundled weights' if line is means[-1] else line['name']}: the mean of {parts}."
    if means:
        yield ""
        yield "The held-out sets chose what the means hold; xquad chose nothing."


def _run(recipe: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> str:
    if not recipe:
        return "The run has no log."
    steps = max(int(line.get("step", 0)) for line in log)
    losses = [line["loss"] for line in log if "loss" in line]
    loss = f" The loss of the last steps was {losses[-1]:.2f} nats per question." if losses else ""
    notes = "".join(f" {line['note']}" for line in log if "note" in line)
    return (
        f"{steps:,} steps of {recipe['groups_per_step']} questions with one or two passages of at most "
        f"{recipe['max_tokens']} tokens, cut between sentences; all weights except the word embeddings. AdamW, "
        f"learning rate {recipe['learning_rate']}, linear to 0 over the last {recipe['decay_share']:.0%} of the steps, "
        f"dropout {recipe['dropout']}, seed {recipe['seed']}; technical questions {recipe['technical_weight']:g} times "
        "in an epoch. Starts and ends are normalised over all passages of a question and the choice of no answer "
        f"(shared normalisation, Clark and Gardner 2018), and so are whole answers, whose start and end are "
        f"joined by a product (Fajcik and others 2021).{loss}{notes}"
    )


def attribution(questions: Path) -> str:
    """Return the attribution as Markdown: the model that the weights derive from, and the works of the data."""
    text = (questions / "README.md").read_text(encoding="utf-8")
    lines = [
        "# Attribution",
        "",
        "The weights derive from all-MiniLM-L6-v2 by the sentence-transformers project (Apache-2.0), whose encoder is",
        "MiniLM by Microsoft. They were trained on questions about passages of these works, cut into shorter ones, and",
        "on questions made from their sentences.",
        "",
        "| work | licence |",
        "|---|---|",
        *(f"| {source.credit} | [{source.licence}]({LINKS[source.licence]}) |" for source in (*PEOPLE, *OTHERS)),
        "",
        "Technical questions were written for this project about excerpts of these works, and about texts of its own:",
        "",
        text[text.index("| source |") :].strip(),
    ]
    return "\n".join(lines) + "\n"
