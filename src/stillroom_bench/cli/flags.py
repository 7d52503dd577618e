"""Makes a command of `stillroom bench` from an option class: one flag per field, plus the shared flags."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from stillroom.cli import opening
from stillroom.cli.console import note
from stillroom.cli.options import ConfigOption, JsonOption, QuietOption, expanded
from stillroom.config.places import cache_root
from stillroom.config.settings import StillroomConfig
from stillroom.errors import UsageError
from stillroom_bench.cli.delivery import CompareOption, Delivery, HtmlOption, OutputOption, deliver, must_compare
from stillroom_bench.instrument.option_flags import Flag

if TYPE_CHECKING:
    from stillroom_bench.instrument.bench_report import BenchResult

_METAVARS = {int: "N", float: "X", str: "NAME"}

WorkDirOption = Annotated[
    Path | None,
    typer.Option(
        "--work-dir",
        metavar="DIR",
        callback=expanded,
        help="Folder that keeps indexes and embeddings between runs; default: the user's cache folder.",
    ),
]
_SHARED: dict[str, tuple[Any, Any]] = {
    "work_dir": (WorkDirOption, None),
    "output": (OutputOption, None),
    "html": (HtmlOption, None),
    "compare": (CompareOption, None),
    "config": (ConfigOption, None),
    "as_json": (JsonOption, False),
    "quiet": (QuietOption, False),
}
"""Parameter -> its flag and default."""


@dataclass(frozen=True, slots=True)
class Call:
    """Context and shared flags of one invocation of a benchmark."""

    context: typer.Context
    work_dir: Path
    config: Path | None
    compare: Path | None
    is_quiet: bool

    def say(self, text: str) -> None:
        """Print progress unless `--quiet` is given."""
        if not self.is_quiet:
            note(text)

    def say_run(self, arm: str, repetition: int) -> None:
        """Print the arm that runs now; negative repetitions are warm-up."""
        self.say(f"{'warming up' if repetition < 0 else f'run {repetition + 1}'}: {arm}")

    def settings(self) -> StillroomConfig:
        return opening.load_settings(self.config)

    def is_given(self, name: str) -> bool:
        """Return whether the flag of this field was given."""
        source = self.context.get_parameter_source(name)
        return source is not None and source.name != "DEFAULT"

    def refuse_unused(self, context: str, *names: str) -> None:
        """Refuse flags that have no effect.

        Args:
            context: the reason, such as `with --drift`.
            names: names of fields whose flags have no effect.

        Raises:
            UsageError: one of the flags was given.
        """
        for parameter in self.context.command.params:
            if parameter.name in names and self.is_given(str(parameter.name)):
                raise UsageError(f"{parameter.opts[0]} has no effect {context}; omit it")

    def must_compare(self, benchmark: str) -> None:
        """Check that `--compare` names a result of this benchmark; raises UsageError otherwise."""
        must_compare(self.compare, benchmark)


Run = Callable[[Any, Call], "BenchResult"]


def add_command(
    app: typer.Typer, name: str, options: type[Any], run: Run, help: str, without: Sequence[str] = ()
) -> None:
    """Add the command that runs one benchmark.

    Args:
        options: option class of the benchmark.
        run: called with an instance of `options`.
        without: shared flags that the command omits: `work_dir`, `compare` or `config`.
    """
    own = {field.name: (_option(field, kind), _default(field)) for field, kind in _flags(options)}
    shared = {key: value for key, value in _SHARED.items() if key not in without}

    def command(context: typer.Context, **given: Any) -> None:
        chosen = {key: given[key] for key in own if given[key] is not None}
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()}
        compare = given.get("compare")
        folder = given.get("work_dir") or cache_root() / "bench"
        call = Call(context, folder, given.get("config"), compare, given["quiet"])
        result = run(options(**values), call)
        deliver(result, Delivery(given["as_json"], given["output"], given["html"], compare))

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
    for key, (kind, default) in (own | shared).items():
        parameters.append(inspect.Parameter(key, keyword, default=default, annotation=kind))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=help)(command)


def _flags(options: type[Any]) -> Iterable[tuple[Field[Any], Any]]:
    kinds = get_type_hints(options)
    return [(field, kinds[field.name]) for field in fields(options) if "flag" in field.metadata]


def _default(field: Field[Any]) -> Any:
    """Return the default of the command's parameter; None for a tuple, whose default the option class supplies."""
    if field.default is MISSING:
        return inspect.Parameter.empty
    return None if isinstance(field.default, tuple) else field.default


def _option(field: Field[Any], kind: Any) -> Any:
    """Return the parameter's Typer annotation."""
    flag: Flag = field.metadata["flag"]
    element, is_many = (get_args(kind)[0], True) if get_origin(kind) is tuple else (kind, False)
    plain = (
        next((kind for kind in get_args(element) if kind is not NoneType), element)
        if _is_optional(element)
        else element
    )
    base = str if get_origin(plain) is Literal and flag.metavar else plain
    settings: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar or _metavar(plain, flag)}
    if flag.min is not None or flag.max is not None:
        as_number = int if plain is int else float
        settings |= {side: as_number(end) for side in ("min", "max") if (end := getattr(flag, side)) is not None}
    if plain is Path:
        settings |= {"exists": True, "file_okay": flag.path != "folder", "dir_okay": flag.path != "file"}
    if is_many:
        settings |= {"callback": distinct, "help": f"{flag.help.rstrip('.')}; can be repeated.{_shown(field)}"}
    names = [flag.name or f"--{field.name.replace('_', '-')}"]
    annotation: Any = list[base] if is_many else base  # type: ignore[valid-type]
    if _is_optional(element) or (is_many and field.default is not MISSING):
        annotation = annotation | None
    if plain is bool:
        settings.pop("metavar")
    return Annotated[annotation, typer.Option(*names, **settings)]


def _is_optional(kind: Any) -> bool:
    return NoneType in get_args(kind)


def _metavar(kind: Any, flag: Flag) -> str | None:
    if kind is Path:
        return "FILE" if flag.path == "file" else "DIR"
    return "SHARE" if kind is float and flag.max == 1.0 else _METAVARS.get(kind)


def _shown(field: Field[Any]) -> str:
    """Return the help text of a repeatable flag's default."""
    if field.default is MISSING or not field.default:
        return ""
    values = (f"{value:g}" if isinstance(value, float) else str(value) for value in field.default)
    return f" Default: {', '.join(values)}."


def distinct(values: list[Any] | None) -> list[Any] | None:
    """Drop duplicates: numbers are equal if their arm names are, paths if they resolve to the same file."""

    def key(value: object) -> object:
        return value.resolve() if isinstance(value, Path) else f"{value:g}" if isinstance(value, float) else value

    found: dict[object, Any] = {}
    for value in values or ():
        found.setdefault(key(value), value)
    return values and list(found.values())
