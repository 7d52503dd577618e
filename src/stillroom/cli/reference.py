"""Generator of docs/cli.md from the commands themselves.

python -m stillroom.cli.reference > docs/cli.md
"""

import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from stillroom.cli.main import build_app

_HEAD = """\
# Command line

<!-- Generated: python -m stillroom.cli.reference > docs/cli.md -->

Every command prints results to stdout, and progress, notes and errors to stderr, so results can be piped. Settings
without a flag come from `stillroom.toml` or the environment: [configuration.md](configuration.md).

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed; the message says what to do. `add`: some files could not be read, the others are indexed |
| 2 | the call must be changed: an unknown flag, an invalid value, a path that does not exist |
| 130 | Ctrl-C; the message says what is kept and how to continue |
| 141 | stdout was closed by its reader, as by `stillroom list \\| head -1` |
| 143 | SIGTERM, or the terminal was closed; `serve` stops gracefully on SIGTERM and returns 0 |

With `--json` an error is one object on stderr: `{"error": {"type": ..., "message": ...}}`. Stack traces are shown only
with `STILLROOM_DEBUG=1` in the environment.

`stillroom --install-completion` installs completion for your shell; `stillroom --version` prints the version.
"""


def render() -> str:
    sections = [_section(path, command) for path, command in commands()]
    return "\n".join([_HEAD, *sections])


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its path, such as `bench retrieval`."""
    yield from _commands_of(typer.main.get_command(build_app()), ())


def _commands_of(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands_of(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def _section(path: str, command: Any) -> str:
    text, _, examples = command.help.partition("\b\nExamples:\n")
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join([f"stillroom {path}", "[OPTIONS]", *(_usage(argument) for argument in arguments)])
    lines = [f"## `stillroom {path}`", "", "```", usage.strip(), "```", "", _flow(text), "", "```sh"]
    lines += [example.strip() for example in examples.strip().splitlines()]
    lines += ["```", "", "| argument or option | meaning |", "|---|---|"]
    lines += [_row(parameter) for parameter in command.params]
    return "\n".join(lines) + "\n"


def _flow(text: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, 118) for paragraph in text.strip().split("\n\n"))


def _usage(argument: Any) -> str:
    name = f"{argument.metavar}..." if argument.nargs == -1 else str(argument.metavar)
    return name if argument.required or argument.nargs == -1 else f"[{name}]"


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar}`"
    elif not parameter.is_flag:
        names += f" `{parameter.metavar}`"
    meaning = parameter.help
    if parameter.envvar:
        meaning += f" Environment: `{parameter.envvar}`."
    if parameter.default not in (None, "") and not parameter.required and not parameter.is_flag:
        meaning += f" Default: `{parameter.default}`."
    escaped = (text.replace("|", r"\|") for text in (names, meaning))
    return "| " + " | ".join(escaped) + " |"


if __name__ == "__main__":
    print(render(), end="")
