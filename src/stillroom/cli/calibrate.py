"""`stillroom calibrate`: measure what computing and loading KV costs here, and keep it for every later run."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli import room
from stillroom.cli.console import duration, line, note, print_json, size
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, ModelOption, QuietOption, help_text
from stillroom.cli.progress import counting

if TYPE_CHECKING:
    from stillroom.kvcache.cost_model import CostProfile

HELP = help_text(
    "Measure what computing and loading KV costs on this machine, and keep it.",
    "By these times Stillroom chooses between loading kept KV and computing it again, and which KV is worth keeping. "
    "The times are kept for the model and the machine, and used from the next start on. Without them each start "
    "measures a few for about a second. Leave the machine alone meanwhile.",
    examples=(
        "stillroom calibrate",
        "stillroom calibrate --model ./models/qwen2.5-0.5b --kb ./kb",
        "stillroom calibrate --json | jq .seconds",
    ),
)


def calibrate(
    model: ModelOption = None,
    kb: KbOption = DEFAULT_KB,
    repeat: Annotated[int, typer.Option("--repeat", min=1, metavar="N", help="Runs of each point.")] = 5,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    settings = room.settings(config, {"runtime.model": model})
    from stillroom.rag.generator import calibrate_model

    if not (quiet or as_json):
        note(f"loading {settings.runtime.model} ...")
    with counting("measuring", is_shown=not (quiet or as_json)) as tell:
        profile, path = calibrate_model(settings, kb, repeat=repeat, on_progress=tell)
    if as_json:
        print_json({"path": str(path), **_payload(profile)})
        return
    _show(profile)
    line(f"kept in {path}")


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
    line("T(cached, new): time to the first token, by tokens that are cached (down) and new (across)")
    line("".join([f"{'':>8}", *(f"{new:>10,}" for new in profile.new)]))
    for cached, row in zip(profile.cached, profile.seconds, strict=True):
        line("".join([f"{cached:>8,}", *(f"{duration(seconds):>10}" for seconds in row)]))
    for tier, link in profile.links.items():
        line(f"{tier.label} to device: {size(link.bytes_per_second)}/s, {duration(link.latency_seconds)} to begin")
