"""The command `stillroom`: its commands, its exit codes, and how it fails.

Exit codes: 0 done; 1 it failed; 2 the call was wrong and has to be changed; 130 interrupted by Ctrl-C; 141 the reader
of stdout went away; 143 SIGTERM or SIGHUP. A user's mistake never shows a stack trace; STILLROOM_DEBUG=1 does.
Reference: docs/cli.md
"""

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stillroom.cli import add, ask, cache, calibrate, console, documents, explain, keys, plan, search, serve, verify
from stillroom.core.panics import ENDINGS
from stillroom.errors import (
    ConfigError,
    KnowledgeBaseNotFoundError,
    ModelNotFoundError,
    StillroomError,
    UsageError,
)
from stillroom.telemetry.logs import configure_logging

FAILED, WRONG_CALL, INTERRUPTED, TERMINATED, NO_READER = 1, 2, 130, 143, 141

COMMANDS_GROUP = "stillroom.commands"
"""Entry points of other packages, each a `typer.Typer` of commands: `stillroom_bench` registers `bench`."""

_WRONG_CALLS = (ConfigError, UsageError, KnowledgeBaseNotFoundError, ModelNotFoundError)
"""Errors that only another call can mend: a wrong value, or the name of something that is not there."""

_RESUME = {
    "add": "Finished files are kept; run the same command again to do the rest.",
    "remove": "What was removed stays so; run the same command again to do the rest.",
    "verify": "What was repaired stays so; run the same command again to do the rest.",
    "bench": "Samples are lost; indexes and embeddings are kept. Run the same command again to measure anew.",
}
_RESUME_DEFAULT = "Nothing was changed and nothing is lost; run the same command again."


class _InterruptedError(Exception):
    """Ctrl-C, with what to say about it."""


class _NoReaderError(Exception):
    """The other end of stdout was closed, as `| head` does."""


class _Commands(TyperGroup):
    """The top command. Ends of a run that are no errors are taken here, before Typer makes its own of them."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _InterruptedError(_RESUME.get(str(ctx.invoked_subcommand), _RESUME_DEFAULT)) from None
        except BrokenPipeError:
            raise _NoReaderError from None


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from stillroom import __version__

        print(f"stillroom {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The commands, in the order in which one meets them."""
    app = typer.Typer(cls=_Commands, name="stillroom", no_args_is_help=False, pretty_exceptions_enable=False)

    @app.callback(
        invoke_without_command=True,
        help="Answer questions from your own documents: index them, search them, ask, and serve.",
    )
    def top(
        ctx: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
        ] = False,
    ) -> None:
        if ctx.invoked_subcommand is None:
            print(ctx.get_help())
            raise typer.Exit(WRONG_CALL)

    app.command("add", help=add.HELP)(add.add)
    app.command("remove", help=documents.REMOVE_HELP)(documents.remove)
    app.command("list", help=documents.LIST_HELP)(documents.list_)
    app.command("digest", help=documents.DIGEST_HELP)(documents.digest)
    app.command("verify", help=verify.HELP)(verify.verify)
    app.command("search", help=search.HELP)(search.search)
    app.command("ask", help=ask.HELP)(ask.ask)
    app.command("serve", help=serve.HELP)(serve.serve)
    app.command("explain", help=explain.HELP)(explain.explain)
    app.command("calibrate", help=calibrate.HELP)(calibrate.calibrate)
    app.command("plan", help=plan.HELP)(plan.plan)
    app.add_typer(cache.app, name="cache", help="The KV that is kept on disk.")
    app.add_typer(keys.app, name="keys", help="Who may ask a server, and as which tenant.")
    for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda entry: entry.name):
        app.add_typer(entry.load(), name=entry.name)
    return app


def main() -> None:
    """The console entry: everything about the process, then `run`."""
    _open_what_is_closed()
    # file names may hold any bytes, and one line of stdin that is no text does not stop the others
    errors = (sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")
    for stream, how in errors:
        with contextlib.suppress(AttributeError):  # a replaced stream may not have it
            stream.reconfigure(errors=how)  # type: ignore[union-attr]
    if not sys.warnoptions and not _is_debugging():
        warnings.simplefilter("ignore")  # for developers of libraries, not for people who ask a question
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under `nohup` it stays ignored
        signal.signal(signal.SIGHUP, _terminate)
    sys.exit(_flushed(run(sys.argv[1:])))


def _open_what_is_closed() -> None:
    """Standard streams that the caller closed: no file that is opened may get such a number, and be written to by a
    library that means the stream. Of what is missing stdin is empty, and stderr goes nowhere."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _flushed(code: int) -> int:
    """The exit code, once stdout has taken everything or turned out to take no more."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would complain at exit
        return code or (NO_READER if isinstance(error, BrokenPipeError) else FAILED)
    return code


def _terminate(*_: object) -> None:
    """SIGTERM and a closed terminal unwind like any exception, so that files are closed and servers say goodbye."""
    sys.exit(TERMINATED)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Does not touch the process's own state, except for logging."""
    as_json = "--json" in _before_dashes(args)
    configure_logging("DEBUG" if _is_debugging() else "WARNING", as_json=as_json, before=console.begin_note)
    try:
        command = typer.main.get_command(build_app())
        code: int | None = command.main(args=list(args), prog_name="stillroom", standalone_mode=False)
        return code or 0
    except _NoReaderError:
        return NO_READER
    except _InterruptedError as stop:
        console.error("Interrupted", f"stopped. {stop}", as_json=as_json)
        return INTERRUPTED
    except ENDINGS:
        raise
    except BaseException as error:  # a native library may raise one that does not derive from Exception
        if _is_debugging():
            traceback.print_exception(error)
        kind, message, code = _explain(error)
        console.error(kind, message if as_json else f"error: {message}", as_json=as_json)
        return code


def _before_dashes(args: Sequence[str]) -> Sequence[str]:
    """What comes before `--`: only there is a word that begins with dashes an option."""
    return args[: list(args).index("--")] if "--" in args else args


def _is_debugging() -> bool:
    return os.environ.get("STILLROOM_DEBUG", "") not in ("", "0")


def _explain(error: BaseException) -> tuple[str, str, int]:
    """Type and message of an error, and the exit code that says whose turn it is."""
    if isinstance(error, StillroomError):
        code = WRONG_CALL if isinstance(error, _WRONG_CALLS) else FAILED
        return type(error).__name__, str(error), code
    format_message = getattr(error, "format_message", None)
    if callable(format_message):  # Typer's own errors: a wrong flag, a missing argument
        command = getattr(getattr(error, "ctx", None), "command_path", "stillroom")
        return "UsageError", f"{str(format_message()).rstrip('.')}. See: {command} --help", WRONG_CALL
    if isinstance(error, (OSError, console.OutputError)):
        return "OSError", str(error), FAILED
    hint = "" if _is_debugging() else "; set STILLROOM_DEBUG=1 to see where, and please report it"
    return "InternalError", f"internal error: {type(error).__name__}: {error}{hint}".replace("\n", " "), FAILED


if __name__ == "__main__":
    main()
