"""The page of all commands, read from the commands themselves, so that it cannot drift.

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

Results go to stdout; progress, notes and errors go to stderr, so every command can be piped. Settings that a command
has no flag for come from `stillroom.toml` or the environment: [configuration.md](configuration.md).

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | it failed; the message says what to do. `add`: some files could not be read, the others are indexed |
| 2 | the call was wrong: an unknown flag, an impossible value, a path that does not exist, an option out of range |
| 130 | Ctrl-C; the message says what is kept and how to go on |
| 141 | the reader of stdout went away, as with `stillroom list \\| head -1` |
| 143 | SIGTERM (`serve` stops gracefully instead, with 0), or the terminal was closed |

With `--json` an error is one object on stderr: `{"error": {"type": ..., "message": ...}}`. A stack trace is shown only
with `STILLROOM_DEBUG=1` in the environment.

`stillroom --install-completion` sets up completion for your shell; `stillroom --version` shows the version.
"""


def render() -> str:
    """The whole page, in Markdown."""
    sections = [_section(path, command) for path, command in commands()]
    return "\n".join([_HEAD, *sections])


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that can be run, with its words: `bench retrieval`."""
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
