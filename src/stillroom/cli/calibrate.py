"""`stillroom calibrate`: measure the times of computing and loading KV, or the recompute share that keeps quality."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli import opening
from stillroom.cli.console import duration, line, note, print_json, size
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, ModelOption, QuietOption, help_text
from stillroom.cli.progress import counting
from stillroom.errors import UsageError

if TYPE_CHECKING:
    from stillroom.config.settings import StillroomConfig
    from stillroom.kvcache.tree.cost_model import CostProfile

HELP = help_text(
    "Measure how long computing and loading KV takes on this machine, and save the times.",
    "Stillroom uses the times to choose between loading and recomputing KV, and to choose which KV to keep. They are "
    "saved per model and machine and used from the next start on. Without them, each start measures a few for about a "
    "second. Which kernels are the fastest is measured again too. Run nothing else on the machine meanwhile. The "
    "bundled reader has no KV; name another model with --model.",
    "With --quality it measures answers for reuse.mode=anywhere instead: it asks the questions of a file with an "
    "increasing share of tokens recomputed, until the answers reach that share of a full prefill's right answers "
    "(without answers in the file, of its answers). It saves nothing and prints the settings (docs/chunk-reuse.md).",
    examples=(
        "stillroom calibrate",
        "stillroom calibrate --model ./models/qwen2.5-0.5b --kb ./kb",
        "stillroom calibrate --json | jq .seconds",
        "stillroom calibrate --quality 0.95 --questions questions.jsonl",
    ),
)


def calibrate(  # noqa: PLR0913  one parameter per flag
    model: ModelOption = None,
    kb: KbOption = DEFAULT_KB,
    repeat: Annotated[int, typer.Option("--repeat", min=1, metavar="N", help="Runs of each measurement.")] = 5,
    quality: Annotated[
        float | None,
        typer.Option(
            "--quality", min=0.0, max=1.0, metavar="SHARE", help="Share of a full prefill's quality to reach."
        ),
    ] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", metavar="FILE", exists=True, help="Questions, as for `bench quality`.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Most questions to ask.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    settings = opening.load_settings(config, {"runtime.model": model})
    if (quality is None) != (questions is None):
        raise UsageError("--quality and --questions need each other; give both or neither")
    if quality is not None and questions is not None:
        _find_alpha(settings, questions, quality, limit, as_json=as_json, quiet=quiet)
        return
    from stillroom.backends.engine_building import calibrate_model
    from stillroom.ops import crossovers

    crossovers.forget()
    if not (quiet or as_json):
        note(f"loading {settings.runtime.model} ...")
    with counting("measuring", is_shown=not (quiet or as_json)) as on_progress:
        profile, path = calibrate_model(settings, kb, repeat=repeat, on_progress=on_progress)
    if as_json:
        print_json({"path": str(path), **_payload(profile)})
        return
    _show(profile)
    line(f"saved in {path}")


def _find_alpha(
    settings: "StillroomConfig", questions: Path, desired: float, limit: int | None, *, as_json: bool, quiet: bool
) -> None:
    from stillroom.answer_quality.alpha import ALPHAS, find_alpha
    from stillroom.answer_quality.asking import QualityOptions

    scope = QualityOptions(questions, limit, settings.runtime, settings.reuse, alphas=ALPHAS)
    with counting("asking", is_shown=not (quiet or as_json)) as on_progress:
        choice = find_alpha(scope, desired, on_progress=on_progress)
    if as_json:
        print_json({"alpha": choice.alpha, "cells": [cell._asdict() for cell in choice.cells]})
    else:
        what = "share of a full prefill's right answers" if choice.has_answers else "answers equal to a full prefill's"
        line(f"{'alpha':>8}  {'recomputed':>14}  {what}")
        for cell in choice.cells:
            line(f"{cell.alpha:>8g}  {cell.mean_overhead:>14.1%}  {cell.quality:.3f}")
    if choice.alpha is None:
        raise UsageError(f"no alpha up to {ALPHAS[-1]:g} reaches {desired:g}; use reuse.mode=exact for this model")
    if not as_json:
        line("To use it, keep all other settings of [runtime] and [reuse], and set:")
        line(f'  [reuse]\n  mode = "anywhere"\n  recompute_budget = "cfo"\n  alpha = {choice.alpha:g}')


def _payload(profile: "CostProfile") -> dict[str, Any]:
    return {
        "cached": list(profile.cached),
        "new": list(profile.new),
        "seconds": [list(row) for row in profile.seconds],
        "links": {
            tier.label: {"latency_seconds": link.latency_seconds, "bytes_per_second": link.bytes_per_second}
            for tier, link in profile.links.items()
        },
    }


def _show(profile: "CostProfile") -> None:
    line("T(cached, new): time to the first token, by cached tokens (rows) and new tokens (columns)")
    line("".join([f"{'':>8}", *(f"{new:>10,}" for new in profile.new)]))
    for cached, row in zip(profile.cached, profile.seconds, strict=True):
        line("".join([f"{cached:>8,}", *(f"{duration(seconds):>10}" for seconds in row)]))
    for tier, link in profile.links.items():
        line(f"{tier.label} to device: {size(link.bytes_per_second)}/s, {duration(link.latency_seconds)} latency")
