"""`python -m training reader`: prepare, train, bundle, threshold, evaluate, card."""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make the bundled reader.")

READING_QA, XQUAD = "data/reading-qa", "data/xquad"
BUNDLE = Path("src/stillroom/models/bundled/reader")
RUN = Path("training/build/reader")
_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_TOP_PAD_": "67108864"}
"""Settings of glibc's allocator: memory stays with the process between steps, which makes them 1.5 times as fast."""
_MINUTES_BETWEEN_CHECKPOINTS = 5

Shared = Annotated[Path, typer.Option(help="The folder with the data.")]
Questions = Annotated[Path, typer.Option(help="Folder of the technical questions.")]
Prepared = Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, or float32 where the processor does not multiply bfloat16.")]
SHARED, QUESTIONS, PREPARED = Path("../shared"), Path("training/reader/questions"), RUN
MORE = Path("training/reader/people.jsonl")
More = Annotated[Path | None, typer.Option(help="Further questions about the passages of reading-qa.")]
TRAINED = Path("training/build/reader/checkpoint.pt")
PACKED = RUN / "packed"


def needs_large_heap(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the process trains a reader without the allocator's settings."""
    return list(arguments[:2]) == ["reader", "train"] and not _HEAP.keys() <= environment.keys()


def restart_with_large_heap() -> None:
    """Run the same command again with the settings; the allocator reads them when a process starts."""
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**_HEAP, **os.environ})


def _say(line: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(line))


def _embedder() -> Path:
    from stillroom.retrieval.model_files import PACKAGED_MODEL, ModelFiles

    return ModelFiles(PACKAGED_MODEL).folder


def _dtype(name: str, threads: int) -> "torch.dtype":
    import torch

    torch.set_num_threads(threads)
    if name not in ("bfloat16", "float32"):
        raise ValueError(f"unknown dtype {name!r}; use bfloat16 or float32")
    found: torch.dtype = getattr(torch, name)
    return found


@app.command()
def prepare(
    shared: Shared = SHARED,
    questions: Questions = QUESTIONS,
    out: Annotated[Path, typer.Option(help="Folder to write; complete files in it are kept.")] = PREPARED,
    threads: Threads = 2,
    dtype: Dtype = "bfloat16",
) -> None:
    """Search wrong passages for every question with the embedder."""
    from training.reader import neighbours
    from training.reader.examples import technical_files
    from training.reader.train import SPEC

    embed = neighbours.embedder(_embedder(), SPEC, _dtype(dtype, 1), _say, threads)
    for line in neighbours.prepare(shared / READING_QA, technical_files(questions), out, embed):
        _say(line)


@app.command()
def train(  # noqa: PLR0913  options of a command
    shared: Shared = SHARED,
    questions: Questions = QUESTIONS,
    prepared: Prepared = PREPARED,
    more: More = MORE,
    out: Annotated[Path, typer.Option(help="Folder of the run; resumes from its checkpoint.")] = RUN,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole run; default: the recipe's.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop with a checkpoint after this many minutes.")] = None,
    threads: Threads = 2,
    technical_weight: Annotated[
        float | None, typer.Option(min=0, help="How often a technical question is asked in an epoch.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the head, the order of the data and dropout.")] = 0,
) -> None:
    """Train until the steps or the time end, or until Ctrl-C; the same command resumes. Prints JSON lines.

    Exits with 0 when the run is complete, and with 3 when it can be resumed.
    """
    import torch

    from training.reader import examples
    from training.reader.neighbours import PEOPLE, read_neighbours
    from training.reader.train import SPEC, Recipe, Trainer, from_encoder, read_encoder

    torch.set_num_threads(1)  # each thread computes a micro-batch of its own
    options = {"num_steps": steps, "technical_weight": technical_weight, "seed": seed}
    recipe = Recipe(**{name: value for name, value in options.items() if value is not None})  # type: ignore[arg-type]
    folder = shared / READING_QA
    neighbours = read_neighbours(prepared / PEOPLE, sum(1 for _ in examples.read_rows(folder / "questions.jsonl")))
    files = examples.technical_files(questions)
    coder = examples.Coder(_embedder() / "tokenizer.json")
    found = examples.read_examples(folder, files, coder, neighbours, recipe.skipped, recipe.technical_weight, more)
    model = from_encoder(read_encoder(_embedder()), SPEC, seed)
    trainer = Trainer(model, found, recipe, out, threads)
    run_training(trainer, minutes)
    raise typer.Exit(0 if trainer.is_done else 3)


@app.command()
def pack(
    shared: Shared = SHARED,
    questions: Questions = QUESTIONS,
    prepared: Prepared = PREPARED,
    more: More = MORE,
    technical_weight: Annotated[
        float | None, typer.Option(min=0, help="How often a technical question is asked in an epoch.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = PACKED,
) -> None:
    """Write all that `device-train` reads: examples, held-out examples, questions made from text, first weights."""
    from training.reader import examples, packed
    from training.reader.neighbours import PEOPLE, read_neighbours
    from training.reader.recurring import make_questions, read_articles
    from training.reader.train import SPEC, Recipe, from_encoder, read_encoder

    folder, files, recipe = shared / READING_QA, examples.technical_files(questions), Recipe()
    coder = examples.Coder(_embedder() / "tokenizer.json")
    neighbours = read_neighbours(prepared / PEOPLE, sum(1 for _ in examples.read_rows(folder / "questions.jsonl")))
    out.mkdir(parents=True, exist_ok=True)
    weight = recipe.technical_weight if technical_weight is None else technical_weight
    asked = examples.read_examples(folder, files, coder, neighbours, recipe.skipped, weight, more)
    held = examples.read_held_out(folder, files, coder, neighbours, recipe.skipped)
    made = make_questions(read_articles(shared / "data"), coder)
    for name, found in (("asked", asked), ("made", made), *held.items()):
        packed.write_examples(out / f"{name}.npz", found)
        _say({"file": name, "passages": len(found.passages), "questions": len(found.questions)})
    packed.write_weights(out / "first.pt", from_encoder(read_encoder(_embedder()), SPEC, 0).state_dict())


@app.command()
def device_train(  # noqa: PLR0913  options of a command
    out: Annotated[Path, typer.Option(help="Weights to write.")],
    examples: Annotated[
        str, typer.Option(help="asked: questions by people; made: questions made from text.")
    ] = "asked",
    data: Annotated[Path, typer.Option(help="Folder that `pack` wrote.")] = PACKED,
    first: Annotated[Path | None, typer.Option(help="Weights to start with; default: the embedder's.")] = None,
    teacher: Annotated[list[Path] | None, typer.Option(help="Weights of a reader that teaches; repeatable.")] = None,
    taught: Annotated[float, typer.Option(min=0, max=1, help="Share of the loss that comes from teachers.")] = 0.0,
    seconds: Annotated[float, typer.Option(help="End, with a learning rate of 0, after this time.")] = 60.0,
    steps: Annotated[int, typer.Option(help="End after these steps.")] = 100_000,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 4e-4,
    groups: Annotated[int, typer.Option(help="Questions of a step.")] = 64,
    averaged: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the run, at its end, whose mean weights are the result.")
    ] = 0.0,
    dropout: Annotated[float, typer.Option(min=0, max=0.9, help="Of attention and inner layer.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of the order of the data and dropout.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    workers: Annotated[int, typer.Option(min=1, help="Processes that make batches.")] = 4,
) -> None:
    """Train on a GPU without texts and packages, then measure over held-out passages. Prints JSON lines."""
    from dataclasses import asdict

    from stillroom.models.reader_model import ReaderModel
    from training.reader import device_train, packed
    from training.reader.train import SPEC

    def load(path: Path) -> ReaderModel:
        model = ReaderModel(SPEC)
        model.load_state_dict(packed.read_weights(path))
        return model.to(device)

    recipe = device_train.DeviceRecipe(
        num_steps=steps,
        seconds=seconds,
        learning_rate=rate,
        groups_per_step=groups,
        taught=taught,
        seed=seed,
        dropout=dropout,
        averaged=averaged,
    )
    model = load(first or data / "first.pt")
    found = packed.read_examples_file(data / f"{examples}.npz")
    num_steps = device_train.train_on_device(model, found, recipe, [load(one) for one in teacher or ()], _say, workers)
    packed.write_weights(out, {name: tensor.cpu() for name, tensor in model.state_dict().items()})
    about: dict[str, Any] = {
        "examples": examples,
        "questions": len(found.questions),
        "first": first.stem if first else None,
    }
    about["teachers"] = [one.stem for one in teacher or ()]
    _say({"run": out.stem, "steps": num_steps, **about, "recipe": asdict(recipe)})
    for path in sorted(data.glob("held-*.npz")):
        measured = device_train.measure(model, packed.read_examples_file(path))
        _say({"run": out.stem, "set": path.stem, **{name: round(value, 4) for name, value in measured.items()}})


@app.command()
def average(
    weights: Annotated[list[Path], typer.Argument(help="Weights that `device-train` wrote, of runs with one start.")],
    share: Annotated[
        list[float] | None, typer.Option(min=0, help="Share of each in the mean, in order; default: equal.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Checkpoint to write, for `bundle` and `evaluate`.")] = TRAINED,
    for_device: Annotated[bool, typer.Option(help="Write weights that `device-train` reads instead.")] = False,
) -> None:
    """Average weights ("model soups", Wortsman and others 2022, https://arxiv.org/abs/2203.05482).

    Log lines of the runs (`device-train`) belong into `log.jsonl` beside the checkpoint: `card` reads them.
    """
    import torch

    from training.reader.packed import mean_weights, read_weights, write_weights
    from training.reader.train import SPEC, from_encoder, read_encoder

    shares = share or [1.0] * len(weights)
    if len(shares) != len(weights):
        raise ValueError(f"{len(shares)} shares for {len(weights)} files of weights; give --share once for each")
    state = mean_weights([read_weights(one) for one in weights], shares)
    out.parent.mkdir(parents=True, exist_ok=True)
    if for_device:
        write_weights(out, state)
    else:
        words = from_encoder(read_encoder(_embedder()), SPEC, 0).state_dict()["words.weight"]  # they were rounded
        torch.save({"model": state | {"words.weight": words}}, out)
    _say({"name": out.stem, "mean": {one.stem: value for one, value in zip(weights, shares, strict=True)}})


def run_training(trainer: Any, minutes: float | None) -> None:
    """Train with a log and checkpoints, until the run or the time ends, or until Ctrl-C or SIGTERM."""
    from dataclasses import asdict

    from stillroom_bench.instrument.environment import record_environment
    from training.checkpoint import Log, read_log
    from training.signals import stopped_by_signals

    log = Log(trainer.out, trainer.step)
    if not any("recipe" in line for line in read_log(trainer.out)):
        about = {"recipe": asdict(trainer.recipe), "questions": len(trainer.examples.questions)}
        log.write({"step": trainer.step, **about, "environment": asdict(record_environment())})
    saved = time.monotonic()
    timer = threading.Timer(60 * (minutes or 0), trainer.stop)
    timer.daemon = True
    if minutes is not None:
        timer.start()
    with stopped_by_signals(trainer.stop):
        for line in trainer.run():
            rounded = {name: round(value, 6) for name, value in line.items()}
            log.write(rounded)
            _say(rounded)
            now = time.monotonic()
            if now - saved > 60 * _MINUTES_BETWEEN_CHECKPOINTS:
                trainer.save()
                saved = now
    timer.cancel()
    trainer.save()
    _say({"step": trainer.step, "done": trainer.is_done})


@app.command()
def bundle(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint of the run.")] = TRAINED,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = BUNDLE,
) -> None:
    """Write the weights in bfloat16 without word embeddings, and their config; the threshold becomes 0."""
    from training.reader.bundle import bundle as write
    from training.reader.train import SPEC

    folder = write(checkpoint, _embedder(), out, SPEC)
    _say({"folder": str(folder), "bytes": (folder / "model.safetensors").stat().st_size})


@app.command()
def threshold(  # noqa: PLR0913  options of a command
    shared: Shared = SHARED,
    questions: Questions = QUESTIONS,
    prepared: Prepared = PREPARED,
    model: Annotated[
        Path, typer.Option(help="The bundle; threshold and confidence are written to its config.")
    ] = BUNDLE,
    out: Annotated[Path, typer.Option(help="JSON report to write.")] = RUN / "threshold.json",
    passages: Annotated[int, typer.Option(min=1, max=7, help="Passages of a question.")] = 5,
    answered: Annotated[float, typer.Option(min=0, max=1, help="Share to answer of those with their passage.")] = 0.9,
    threads: Threads = 2,
    dtype: Dtype = "bfloat16",
) -> None:
    """Choose the score below which the reader refuses, on held-out titles of reading-qa and technical passages."""
    from stillroom.models.reader import load_reader
    from training.reader import held_out
    from training.reader.examples import technical_files
    from training.reader.neighbours import embedder
    from training.reader.paraphrases import in_other_words
    from training.reader.threshold import choose, read_sets, report, write_scale
    from training.reader.train import SPEC, Recipe

    reader = load_reader(model, _embedder(), _dtype(dtype, threads))
    sets = {
        "reading-qa, held-out titles": held_out.people(shared / READING_QA, prepared, Recipe().skipped),
        "technical, held-out passages": held_out.technical(technical_files(questions), prepared),
    }
    embed = embedder(_embedder(), SPEC, _dtype(dtype, threads))
    outcomes = read_sets(reader, sets, passages, embed)
    chosen = choose(outcomes, answered)
    write_scale(model, chosen)
    outcomes |= read_sets(reader, in_other_words(sets), passages, embed)
    _write(out, report(outcomes, chosen, passages))


@app.command()
def evaluate(  # noqa: PLR0913  options of a command
    shared: Shared = SHARED,
    questions: Questions = QUESTIONS,
    prepared: Prepared = PREPARED,
    model: Annotated[Path, typer.Option(help="The bundle, or the checkpoint of a run.")] = BUNDLE,
    out: Annotated[Path, typer.Option(help="JSON report to write.")] = RUN / "evaluation.json",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions per set, drawn at random; default: all.")] = None,
    threads: Threads = 2,
    dtype: Dtype = "bfloat16",
) -> None:
    """Answer held-out questions over their passage: exact match, F1, quoted sentence, scores of right and wrong."""
    import random

    from training.reader import held_out
    from training.reader.evaluate import evaluate as evaluated
    from training.reader.evaluate import open_reader
    from training.reader.examples import technical_files
    from training.reader.paraphrases import in_other_words
    from training.reader.train import SPEC, Recipe

    reader = open_reader(model, _embedder(), SPEC, _dtype(dtype, threads))
    sets = {
        "xquad": held_out.xquad(shared / XQUAD),
        "reading-qa, held-out titles": held_out.people(shared / READING_QA, prepared, Recipe().skipped),
        "technical, held-out passages": held_out.technical(technical_files(questions), prepared),
    }
    rows = []
    for name, asked in {**sets, **in_other_words(sets)}.items():
        few = asked if limit is None or limit >= len(asked) else random.Random(1).sample(asked, limit)
        rows.append(evaluated(reader, name, few))
        _say(rows[-1])
    _write(out, {"sets": rows})


@app.command()
def card(
    shared: Shared = SHARED,
    questions: Questions = QUESTIONS,
    run: Annotated[Path, typer.Option(help="Folder of the run, with the reports.")] = RUN,
    model: Annotated[Path, typer.Option(help="The bundle; README.md and ATTRIBUTION.md are written.")] = BUNDLE,
) -> None:
    """Write the model card and the attribution from the run's log and the reports."""
    from training.checkpoint import read_log
    from training.reader import card as cards

    counts = cards.count(shared / READING_QA, questions, MORE)
    reports = {name: cards.read_report(run / f"{name}.json") for name in ("evaluation", "threshold")}
    text = cards.card(counts, read_log(run), reports["evaluation"], reports["threshold"])
    (model / "README.md").write_text(text, encoding="utf-8")
    (model / "ATTRIBUTION.md").write_text(cards.attribution(questions), encoding="utf-8")


def _write(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _say(report)
