"""`stillroom plan`: split memory between vector index and kept KV to meet a latency target."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli import opening
from stillroom.cli.console import line, note, print_json
from stillroom.cli.options import (
    DEFAULT_KB,
    ConfigOption,
    JsonOption,
    KbOption,
    ModelOption,
    QuietOption,
    as_bytes,
    as_seconds,
    help_text,
)
from stillroom.cli.progress import counting
from stillroom.config.load import CONFIG_FILE, settings
from stillroom.errors import UsageError
from stillroom.models.bundled_models import MICROWORLD, reader_folder

if TYPE_CHECKING:
    from stillroom.config.settings import StillroomConfig
    from stillroom.planner.forecast import Forecaster
    from stillroom.planner.inputs import PlanInputs
    from stillroom.planner.nodes import NodesForecast
    from stillroom.planner.planner import Plan
    from stillroom.planner.splits import Budgets, Split
    from stillroom.retrieval.knowledge_base import KnowledgeBase

MISSED = 1

_NO_KV = (
    "the reader keeps no KV, so there is no memory for KV to plan. Name the model that will answer: --model "
    f"(runtime.model) with a checkpoint's folder, a hub name, or {MICROWORLD} for a trial. Without a model, the reader "
    "answers and needs no plan"
)

HELP = help_text(
    "Split device, host and disk memory between vector index and kept KV to meet a latency target.",
    "It times searches for the workload's questions, takes the model's costs (stillroom calibrate), asks a few "
    "questions alone and beside searches, and simulates the workload with the engine's own scheduler and caches for "
    "every split of a grid. It prints the best split with the "
    "predicted times to the first token, the rate it sustains, the effect of halving or doubling each part, what to "
    "buy next, and what preparing documents gains. If no split meets the target, it prints why and by how much, and "
    "the exit code is 1. Method: docs/planning.md.",
    "It plans for the model that answers (--model, or runtime.model of the settings), which must generate text: the "
    "bundled reader, which answers without a model, keeps no KV.",
    "Questions come from --questions, else from the request log, else from the documents. Write sizes as 512MiB or "
    "4GiB, times as 300ms or 1.5s.",
    examples=(
        "stillroom plan --slo-ttft 300ms --rate 4 --model ./models/qwen2.5-0.5b",
        "stillroom plan -m MODEL --slo-ttft 1.5s --slo-percentile 99 --ram 8GiB",
        "stillroom plan -m MODEL --slo-ttft 300ms --questions asked.jsonl",
        "stillroom plan -m MODEL --slo-ttft 300ms --trace arrivals.csv --apply",
        "stillroom plan -m MODEL --slo-ttft 300ms --rate 4 --validate",
        "stillroom plan -m MODEL --slo-ttft 300ms --rate 40 --nodes 8",
        "stillroom plan -m MODEL --slo-ttft 300ms --json | jq .chosen",
    ),
)

SizeOption = str | None


def plan(  # noqa: PLR0913  one parameter per flag
    slo_ttft: Annotated[
        str, typer.Option("--slo-ttft", metavar="TIME", help="Target time to the first token, search included.")
    ],
    percentile: Annotated[
        float,
        typer.Option(
            "--slo-percentile", min=1.0, max=100.0, metavar="P", help="Share of requests that must meet it, in %."
        ),
    ] = 95.0,
    rate: Annotated[float, typer.Option("--rate", min=1e-3, metavar="N", help="Requests per second.")] = 1.0,
    kb: KbOption = DEFAULT_KB,
    model: ModelOption = None,
    device: Annotated[
        SizeOption,
        typer.Option(
            "--device-memory", metavar="SIZE", help="Device memory for KV and lists of the index; default: as now."
        ),
    ] = None,
    ram: Annotated[
        SizeOption,
        typer.Option("--ram", metavar="SIZE", help="Host memory for lists of the index and KV; default: as now."),
    ] = None,
    disk: Annotated[
        SizeOption,
        typer.Option("--disk", metavar="SIZE", help="Disk space for lists of the index and KV; default: as now."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option("--questions", metavar="FILE", exists=True, help="Questions, one per line, as text or JSON."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            exists=True,
            help="Arrival times, scaled to --rate: .csv with TIMESTAMP, or .jsonl with timestamp.",
        ),
    ] = None,
    zipf: Annotated[
        float,
        typer.Option(
            "--zipf", min=0.0, max=4.0, metavar="S", help="Zipf exponent of the popularity of questions; 0: equal."
        ),
    ] = 0.8,
    requests: Annotated[
        int,
        typer.Option("--requests", min=1, metavar="N", help="Measured requests; as many run before them as warm-up."),
    ] = 300,
    different: Annotated[int, typer.Option("--different", min=2, metavar="N", help="Most different questions.")] = 200,
    answer_tokens: Annotated[
        int | None,
        typer.Option("--answer-tokens", min=1, metavar="N", help="Tokens per answer; default: as logged, or 64."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            max=128,
            metavar="N",
            help="Also simulate 1, 2 and N machines with the planned memory each, behind a router (docs/cluster.md).",
        ),
    ] = None,
    tier_speed: Annotated[
        SizeOption,
        typer.Option(
            "--tier-speed",
            metavar="SIZE",
            help="With --nodes: also simulate them with a KV tier that they share, of so many bytes per second.",
        ),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write the plan to the settings file.")] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Also run the workload in real time with the planned settings.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed of the validation's draws.")] = 0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    target_seconds = as_seconds("--slo-ttft", slo_ttft)
    wanted = {"--device-memory": device, "--ram": ram, "--disk": disk}
    sizes = {flag: as_bytes(flag, text) for flag, text in wanted.items()}
    tier_bytes = _tier_bytes(nodes, tier_speed)
    loaded = opening.load_settings(config, {"runtime.model": model})
    if loaded.engine.kind != "builtin":
        raise UsageError(f"engine.kind={loaded.engine.kind} manages its own KV; plan needs engine.kind=builtin")
    if reader_folder(loaded.runtime.model) is not None:
        raise UsageError(_NO_KV)
    is_quiet = quiet or as_json

    from stillroom.cli.plan_report import show, show_nodes
    from stillroom.core.clock import SystemClock
    from stillroom.planner.accuracy import accuracy_file, load_accuracy
    from stillroom.planner.choice import Target
    from stillroom.planner.forecast import Forecaster
    from stillroom.planner.inputs import measure_inputs
    from stillroom.planner.plan_json import plan_as_json
    from stillroom.planner.planner import make_plan
    from stillroom.planner.workload import questions_of, workload
    from stillroom.retrieval.knowledge_base import KnowledgeBase

    clock = SystemClock()
    with closing(KnowledgeBase.open(kb, loaded, clock=clock)) as opened:
        asked = questions_of(opened, questions, different, seed)
        load = workload(asked, requests, rate, zipf=zipf, trace=trace, seed=seed)
        tokens = answer_tokens or asked.answer_tokens or min(64, loaded.generation.max_tokens)
        with counting("searching", is_shown=not is_quiet) as on_progress:
            notify = (lambda _: None) if is_quiet else note
            inputs = measure_inputs(opened, loaded, asked, load, tokens, clock, notify, on_progress)
        notify("asking a few questions, alone and beside searches")
        inputs = _with_overheads(opened, loaded, inputs)
    forecaster = Forecaster(inputs)
    budgets, now = _budgets(sizes, loaded, forecaster)
    with counting("simulating", is_shown=not is_quiet) as on_progress:
        found = make_plan(forecaster, budgets, Target(target_seconds, percentile), now, on_progress)
    on_nodes = _on_nodes(forecaster, found, nodes, tier_bytes, is_quiet=is_quiet)
    known = None if inputs.profile_path is None else load_accuracy(accuracy_file(inputs.profile_path))
    payload = plan_as_json(found, inputs, known, on_nodes)
    if not as_json:
        show(found, inputs, asked, tokens, known)
        show_nodes(on_nodes, found)
    if validate:
        payload["validation"] = _validate(kb, config, model, found, forecaster, tokens, as_json=as_json)
    if apply:
        payload["changes"] = _apply(config or Path(CONFIG_FILE), found, as_json=as_json)
    if as_json:
        print_json(payload)
    if not found.is_feasible:
        raise typer.Exit(MISSED)


def _with_overheads(kb: "KnowledgeBase", config: "StillroomConfig", inputs: "PlanInputs") -> "PlanInputs":
    """Measure what real questions cost beyond search and steps. Nothing is written: KV stays off the disk, and the
    questions out of the request log."""
    from stillroom.core.clock import SystemClock
    from stillroom.planner.overheads import observe, with_overheads
    from stillroom.rag.stillroom import Stillroom
    from stillroom.telemetry.metrics import Metrics

    clock = SystemClock()
    quiet = replace(
        config, reuse=replace(config.reuse, disk_bytes=0), speculation=replace(config.speculation, mode="off")
    )
    with closing(Stillroom(kb, quiet, Metrics(), clock)) as stillroom:
        stillroom.records.stop()
        return with_overheads(inputs, observe(stillroom, kb, inputs.texts, inputs.workload.warm, clock))


def _tier_bytes(nodes: int | None, tier_speed: str | None) -> int | None:
    if tier_speed is None:
        return None
    if nodes is None:
        raise UsageError("--tier-speed is that of a tier which several machines share; give --nodes too")
    if not (found := as_bytes("--tier-speed", tier_speed)):
        raise UsageError("--tier-speed is 0; give more, or leave it out for machines without a shared tier")
    return found


def _on_nodes(
    forecaster: "Forecaster", found: "Plan", nodes: int | None, tier_bytes: int | None, *, is_quiet: bool
) -> "list[NodesForecast]":
    """Simulate several machines with the planned memory."""
    if nodes is None:
        return []
    from stillroom.planner.nodes import forecast_nodes

    with counting("simulating machines", is_shown=not is_quiet) as on_progress:
        return forecast_nodes(forecaster, found.chosen.split, found.target, nodes, tier_bytes, on_progress)


def _budgets(
    sizes: dict[str, int | None], config: "StillroomConfig", forecaster: "Forecaster"
) -> "tuple[Budgets, Split]":
    """Return the memory that may be used, and the current split."""
    from stillroom.planner.splits import Budgets, Split

    lists = forecaster.list_bytes
    hot_bytes = config.index.hot_bytes
    index = forecaster.inputs.index
    has_devices = index is not None and bool(index.devices)
    device_bytes = config.index.device_bytes if has_devices else 0
    device_lists = forecaster.least_device_bytes(device_bytes)
    now = Split(
        device_kv=config.runtime.kv_bytes,
        host_kv=config.reuse.host_bytes,
        disk_kv=config.reuse.disk_bytes,
        host_lists=forecaster.list_bytes_within(hot_bytes or lists, device_lists),
        disk_lists=lists,
        device_lists=device_lists,
        num_devices=forecaster.num_devices,
    )

    def given(flag: str, default: int) -> int:
        size = sizes[flag]
        return default if size is None else size

    shares_device = index is not None and index.shares_device
    device = given("--device-memory", now.device_kv + (device_lists if shares_device else 0))
    budgets = Budgets(
        device=device,
        ram=given("--ram", now.ram),
        disk=given("--disk", now.disk_kv + lists),
        device_lists=device if shares_device else device_bytes,
        shares_device=shares_device,
    )
    return budgets, now


def _apply(file: Path, found: "Plan", *, as_json: bool) -> list[dict[str, Any]]:
    from stillroom.config.edit import edit_file
    from stillroom.planner.splits import split_settings

    if not found.is_feasible:
        raise UsageError("nothing was written, because no split meets the target; see the plan for what would meet it")
    values = split_settings(found.chosen.split)
    changes = edit_file(file, values)
    for path in values:
        if (name := settings()[path].env_name) in os.environ:
            note(f"the environment variable {name} overrides {file}; unset it to use the plan")
    if not as_json:
        for change in changes:
            before = "not set" if change.before is None else change.before
            line(f"{file}: {change.path} = {change.after} (was {before})")
        if not changes:
            line(f"{file} has these values already")
    return [{"setting": change.path, "before": change.before, "after": change.after} for change in changes]


def _validate(  # noqa: PLR0913
    kb: Path,
    config: Path | None,
    model: str | None,
    found: "Plan",
    forecaster: "Forecaster",
    answer_tokens: int,
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Run the workload with the planned settings and compare it with the prediction."""
    from stillroom.cli.plan_report import show_validation
    from stillroom.core.clock import SystemClock
    from stillroom.planner.accuracy import accuracy_file, accuracy_of, save_accuracy
    from stillroom.planner.splits import split_settings
    from stillroom.planner.validation import measure

    inputs = forecaster.inputs
    predicted = forecaster.forecast(found.chosen.split)
    values = split_settings(found.chosen.split)
    loaded = opening.load_settings(config, {"runtime.model": model, **values})
    with opening.open_stillroom(kb, loaded) as opened:
        opened.records.stop()  # keep the workload out of the request log
        prepares = loaded.reuse.mode == "prepared"
        measured = measure(opened, inputs.texts, inputs.workload, answer_tokens, SystemClock(), prepares=prepares)
    accuracy = accuracy_of(predicted, measured, inputs.workload.rate)
    if inputs.profile_path is not None:
        save_accuracy(accuracy_file(inputs.profile_path), accuracy)
    if not as_json:
        show_validation(predicted, measured)
    return {"predicted": predicted.as_json(), "measured": measured.as_json(), "accuracy": accuracy.as_json()}
