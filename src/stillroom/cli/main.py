"""The command `stillroom`: its commands, exit codes and error messages.

Exit codes: 0 done; 1 failed; 2 the call must be changed; 130 Ctrl-C; 141 stdout was closed by its reader; 143 SIGTERM
or SIGHUP. `server/error_kinds.py` maps exceptions to 1 and 2. Stack traces are shown with STILLROOM_DEBUG=1 only.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from stillroom.cli import (
    add,
    ask,
    cache,
    calibrate,
    console,
    documents,
    engine,
    explain,
    keys,
    mcp,
    migrate,
    plan,
    prepare,
    reembed,
    search,
    serve,
    show,
    verify,
)
from stillroom.core.panics import ENDINGS
from stillroom.errors import StillroomError
from stillroom.server.error_kinds import FAILED, WRONG_CALL, kind_of
from stillroom.telemetry.logs import configure_logging

INTERRUPTED, TERMINATED, NO_READER = 130, 143, 141

COMMANDS_GROUP = "stillroom.commands"
"""Entry points of other packages, each a `typer.Typer` of commands: `stillroom_bench` registers `bench`."""

_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "add": (add.add, add.HELP),
    "remove": (documents.remove, documents.REMOVE_HELP),
    "list": (documents.list_, documents.LIST_HELP),
    "show": (show.show, show.HELP),
    "digest": (documents.digest, documents.DIGEST_HELP),
    "verify": (verify.verify, verify.HELP),
    "reembed": (reembed.reembed, reembed.HELP),
    "migrate": (migrate.migrate, migrate.HELP),
    "search": (search.search, search.HELP),
    "ask": (ask.ask, ask.HELP),
    "serve": (serve.serve, serve.HELP),
    "engine": (engine.engine, engine.HELP),
    "mcp": (mcp.mcp, mcp.HELP),
    "explain": (explain.explain, explain.HELP),
    "prepare": (prepare.prepare, prepare.HELP),
    "calibrate": (calibrate.calibrate, calibrate.HELP),
    "plan": (plan.plan, plan.HELP),
}
"""Function and help text of each command of this package but `cache` and `keys`."""

_ONE_THREAD = frozenset({"search", "list", "show", "explain"})
"""Commands whose matrix products are too small for several threads, which would spin for longer than the products."""

_RESUME = {
    "add": "Finished files are kept; run the same command again to do the rest.",
    "remove": "Documents removed so far stay removed; run the same command again to do the rest.",
    "prepare": "What was computed so far is kept; run the same command again to do the rest.",
    "reembed": "Searches use the present embedder. What was embedded so far is kept; run the same command again to do "
    "the rest.",
    "verify": "Repairs made so far are kept; run the same command again to do the rest.",
    "bench": "Samples are lost; indexes and embeddings are kept. Run the same command again to repeat the measurement.",
}
_RESUME_DEFAULT = "Nothing was changed and nothing is lost; run the same command again."


class _InterruptedError(Exception):
    """Ctrl-C. The message says what is kept and what to run next."""


class _NoReaderError(Exception):
    """The reader of stdout closed it, as `| head` does."""


class _Commands(TyperGroup):
    """The top command. Handles Ctrl-C and a closed stdout before Typer does."""

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


def build_app(only: str = "") -> typer.Typer:
    """Return the application; `--help` lists the commands in this order.

    Args:
        only: if it is a command of this package, build no other one. Building all takes longer than most of them.
    """
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

    for name in [only] if only in _COMMANDS else _COMMANDS:
        function, help_text = _COMMANDS[name]
        app.command(name, help=help_text)(function)
    if only in _COMMANDS:
        return app
    app.add_typer(cache.app, name="cache", help="Show, check or remove the KV kept on disk.")
    app.add_typer(keys.app, name="keys", help="Add, list or remove API keys of a server.")
    _add_plugins(app)
    return app


def _add_plugins(app: typer.Typer) -> None:
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda entry: entry.name):
        app.add_typer(entry.load(), name=entry.name)


def main() -> None:
    """Entry point of the console script: set up the process, then call `run`."""
    _open_closed_streams()
    # file names may hold any bytes, and an undecodable line of stdin must not stop the others
    errors = (sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")
    for stream, how in errors:
        with contextlib.suppress(AttributeError):  # a replaced stream may not have it
            stream.reconfigure(errors=how)  # type: ignore[union-attr]
    if not sys.warnoptions and not _is_debugging():
        warnings.simplefilter("ignore")  # warnings of libraries are of no use to users
    if set(sys.argv[1:2]) <= _ONE_THREAD:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under `nohup` it stays ignored
        signal.signal(signal.SIGHUP, _terminate)
    try:
        code = run(sys.argv[1:])
    except SystemExit as ending:  # SIGTERM or SIGHUP
        code = int(ending.code or 0)
    _exit_with(_flushed(code))


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that the caller closed.

    Otherwise the next opened file would get the stream's number, and libraries would write to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free number
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _flushed(code: int) -> int:
    """Flush stdout and return the exit code; a failed flush makes exit code 0 a failure."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # prevents the interpreter's own message at exit
        return code or (NO_READER if isinstance(error, BrokenPipeError) else FAILED)
    return code


def _exit_with(code: int) -> NoReturn:
    """End the process, also while a thread of an interrupted command still loads a model.

    The end of the interpreter unwinds such a thread, which aborts the process if it is in native code. Ending at once
    leaves files as after a kill, which loses nothing (docs/durability.md).
    """
    if any(thread.daemon and thread.name.startswith("stillroom-") for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _terminate(*_: object) -> None:
    """End with an exception on SIGTERM and SIGHUP, so that files are closed and the server stops gracefully."""
    sys.exit(TERMINATED)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Changes no process state except logging."""
    as_json = "--json" in _before_dashes(args)
    is_dated = _is_debugging() or args[:1] in (["serve"], ["engine"])
    level = "DEBUG" if _is_debugging() else "WARNING"
    configure_logging(level, as_json=as_json, is_dated=is_dated, before=console.begin_note)
    try:
        command = typer.main.get_command(build_app(args[0] if args else ""))
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
    """Return the arguments before `--`, the only ones that can be options."""
    return args[: list(args).index("--")] if "--" in args else args


def _is_debugging() -> bool:
    return os.environ.get("STILLROOM_DEBUG", "") not in ("", "0")


def _explain(error: BaseException) -> tuple[str, str, int]:
    if isinstance(error, StillroomError):
        return type(error).__name__, str(error), kind_of(error).exit_code
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
