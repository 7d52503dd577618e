"""Exit codes, errors and help of every command, and that help loads nothing heavy."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stillroom
from stillroom.errors import (
    ConfigError,
    EmptyKnowledgeBaseError,
    EngineError,
    KnowledgeBaseNotFoundError,
    ModelNotFoundError,
    UnknownDocumentError,
)
from tests import forked
from tests.cli.harness import Opened, Run
from tests.server.fakes import FakeStillroom, until

COMMANDS = ["add", "remove", "list", "search", "ask", "serve", "bench", "bench retrieval"]
MODULES = ("stillroom.cli.main", "stillroom.rag.as_json", "tests.server.fakes", "pydantic")
"""What the programs of these tests import."""


def launch(*args: str, **options: Any) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "stillroom.cli.main", *args]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)


def test_version(run: Run) -> None:
    assert run("--version").out == f"stillroom {stillroom.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(run: Run, command: str) -> None:
    result = run(*command.split(), "--help")

    assert result.code == 0
    assert command == "bench" or f"  stillroom {command} " in result.out


def test_no_command_prints_help_and_exits_2(run: Run) -> None:
    result = run()

    assert result.code == 2
    assert "Usage: stillroom" in result.out


def test_help_imports_nothing_heavy() -> None:
    """Help must be fast."""
    commands = [[], *(command.split() for command in COMMANDS)]
    code = (
        "import sys\nfrom stillroom.cli.main import run\n"
        f"for command in {commands!r}:\n"
        "    assert run([*command, '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'faiss', 'fastapi', 'transformers', 'sentence_transformers'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["serach"], "Did you mean 'search'?"),
        (["search"], "Missing argument"),
        (["search", "x", "--nope"], "No such option"),
        (["search", "x", "-k", "0"], "--top-k"),
        (["search", "x", "--mode", "magic"], "magic"),
        (["ask"], "Missing argument"),
        (["ask", "x", "--top-p", "0"], "above 0 and at most 1"),
        (["ask", "x", "--temperature", "-1"], "at least 0"),
        (["add", "nowhere.md"], "does not exist"),
        (["add", ""], "a path is empty"),
        (["search", "x", "--where", ""], "the filter is empty"),
        (["ask", "x", "--where", "  "], "the filter is empty"),
        (["serve", "--port", "70000"], "--port"),
        (["list", "--config", "nowhere.toml"], "no such file"),
    ],
)
def test_wrong_call_exits_2_with_one_line_and_no_stack_trace(
    run: Run, opened: Opened, args: list[str], complaint: str
) -> None:
    result = run(*args)

    assert result.code == 2
    assert result.out == ""
    assert complaint in result.err
    assert "Traceback" not in result.err
    assert result.err.startswith("error: ")
    assert opened.calls == []


def test_wrong_call_as_json(run: Run, opened: Opened) -> None:
    result = run("search", "--json")

    assert (result.code, result.out) == (2, "")
    assert json.loads(result.err)["error"]["type"] == "UsageError"


def test_json_flag_after_dashes_is_an_argument(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    fake.texts = {}

    result = run("ask", "--", "--json")

    assert result.err.startswith("error: ")


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EmptyKnowledgeBaseError("it is empty"), 1),
        (EngineError("it broke"), 1),
        (OSError(28, "No space left on device"), 1),
        (ConfigError("it does not exist"), 2),
        (KnowledgeBaseNotFoundError("there is none"), 2),
        (ModelNotFoundError("there is none"), 2),
        (UnknownDocumentError("there is none"), 2),
    ],
)
def test_exit_code_of_each_kind_of_error(
    run: Run, opened: Opened, fake: FakeStillroom, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(fake, "search", fail)

    text, as_json = run("search", "x"), run("search", "x", "--json")

    assert (text.code, as_json.code) == (code, code)
    assert text.err == f"error: {failure}\n"
    expected = {"type": type(failure).__name__, "message": str(failure)}
    assert json.loads(as_json.err) == {"error": expected}
    assert (text.out, as_json.out) == ("", "")
    assert fake.is_closed


def test_internal_error_is_one_line_unless_debugging(
    run: Run, opened: Opened, fake: FakeStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "search", lambda *_, **__: 1 // 0)

    plain = run("search", "x")
    monkeypatch.setenv("STILLROOM_DEBUG", "1")
    debugging = run("search", "x")

    assert (plain.code, debugging.code) == (1, 1)
    assert len(plain.err.splitlines()) == 1
    assert "internal error: ZeroDivisionError" in plain.err
    assert "STILLROOM_DEBUG=1" in plain.err
    assert "Traceback" in debugging.err


def test_interrupt_exits_130_and_says_what_is_kept(
    run: Run, opened: Opened, fake: FakeStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "search", interrupt)
    monkeypatch.setattr(fake, "add", interrupt, raising=False)
    monkeypatch.setattr(fake, "remove", interrupt, raising=False)
    Path("a.md").touch()

    result, adding, as_json = run("search", "x"), run("add", "a.md"), run("search", "x", "--json")

    assert (result.code, adding.code, as_json.code) == (130, 130, 130)
    assert result.err == "stopped. Nothing was changed and nothing is lost; run the same command again.\n"
    assert "Finished files are kept" in adding.err
    assert "removed so far stay removed" in run("remove", "a.md").err
    assert json.loads(as_json.err)["error"]["type"] == "Interrupted"
    assert fake.is_closed


def test_closed_stdout_exits_141_silently() -> None:
    code = (
        "import sys\nfrom stillroom.cli import main, opening\nfrom tests.server.fakes import FakeStillroom\n"
        "opening.open_stillroom = lambda *_, **__: FakeStillroom()\n"
        "sys.argv = ['stillroom', 'ask', '-', '--quiet']\nmain.main()\n"
    )
    root = Path(__file__).resolve().parents[2]
    pipe = subprocess.PIPE
    command = [*forked.command(*MODULES), code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=root) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"how do I rotate keys?\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"how do I rotate keys?\n"
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            for _ in range(1000):
                process.stdin.write(b"how do I rotate keys?\n")
                process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        assert process.wait(30) == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize("args", [pytest.param(["list"], marks=pytest.mark.slow), ["list", "--json"], ["ask", "why?"]])
@pytest.mark.parametrize(
    ("redirection", "reason"), [("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_unwritable_stdout_is_an_error(args: list[str], redirection: str, reason: str) -> None:
    is_closed = redirection.endswith("-")  # which an interpreter finds when it starts
    interpreter = [sys.executable, "-c"] if is_closed else forked.command(*MODULES)
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *interpreter, OVER_A_FAKE_STILLROOM, *args]
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(shell, capture_output=True, text=True, cwd=root, check=False)
    assert found.returncode == 1 and len(found.stderr.splitlines()) == 1
    assert f"stdout cannot be written: {reason}" in found.stderr


def test_closed_standard_streams_become_the_null_device() -> None:
    command = [sys.executable, "-c", OVER_A_FAKE_STILLROOM, "ask", "-", "why?"]
    root = Path(__file__).resolve().parents[2]
    shell = ["sh", "-c", '"$@" <&- 2>&-', "sh", *command]
    found = subprocess.run(shell, capture_output=True, text=True, cwd=root, check=False)
    assert found.returncode == 0 and found.stdout.startswith("Question: why?\n")


def test_a_note_begins_on_a_new_line() -> None:
    code = (
        "import logging\nfrom stillroom.cli import console, main\nmain.run(['--version'])\n"
        "console.write('half a line')\nlogging.getLogger('x').warning('first')\nconsole.note('second')\n"
    )
    both, pipe = subprocess.STDOUT, subprocess.PIPE
    shown = subprocess.run([sys.executable, "-c", code], stdout=pipe, stderr=both, text=True, check=True).stdout
    _, half, first, second = shown.splitlines()
    assert (half, first, second) == ("half a line", "warning: first", "second")
    apart = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert apart.stdout.endswith("\nhalf a line") and not apart.stderr.startswith("\n")


OVER_A_FAKE_STILLROOM = (
    "import sys\nfrom stillroom.cli import main, opening\nfrom tests.server.fakes import FakeStillroom\n"
    "opening.open_stillroom = lambda *_, **__: FakeStillroom()\nmain.main()\n"
)


def run_over_a_fake(*args: str | bytes, encoding: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    """Run a command in its own process, with standard streams of this encoding."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    root = Path(__file__).resolve().parents[2]
    command = [*forked.command(*MODULES), OVER_A_FAKE_STILLROOM, *args]
    return subprocess.run(command, input=stdin, capture_output=True, cwd=root, env=environment, check=False)


@pytest.mark.parametrize(
    "encoding", ["ascii", *(pytest.param(name, marks=pytest.mark.slow) for name in ("latin-1", "utf-8"))]
)
def test_json_output_is_valid_in_every_encoding(encoding: str) -> None:
    query = "caf\u00e9 \u20ac \U0001f600"
    found = run_over_a_fake("search", query, "--json", encoding=encoding)
    assert json.loads(found.stdout)["query"] == query
    failed = run_over_a_fake("serach", query, "--json", encoding=encoding)
    assert json.loads(failed.stderr)["error"]["type"] == "UsageError"


def test_undecodable_question_does_not_stop_the_others() -> None:
    lines = b"first one\ncaf\xe9\nlast one\n"
    found = run_over_a_fake("ask", "-", "--quiet", encoding="utf-8", stdin=lines)
    assert found.returncode == 2 and found.stdout == b"first one\nlast one\n"
    assert b"the question is not UTF-8 text" in found.stderr and b"internal" not in found.stderr


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(("search", b"caf\xe9"), marks=pytest.mark.slow),
        ("ask", b"caf\xe9"),
        pytest.param(("search", "x", "--where", b"a = \xe9"), marks=pytest.mark.slow),
    ],
)
def test_undecodable_arguments_exit_2(args: tuple[str | bytes, ...]) -> None:
    found = run_over_a_fake(*args, encoding="utf-8")
    assert found.returncode == 2 and b"is not UTF-8 text" in found.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 143, marks=pytest.mark.slow)],
)
def test_signals_end_a_command_without_a_stack_trace(number: int, code: int, tmp_path: Path) -> None:
    program = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & has it ignored
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # and so has nohup
        "from stillroom.cli import main, opening\nfrom tests.server.fakes import FakeStillroom\n"
        "class Closing(FakeStillroom):\n"
        "    def close(self): print('closed', file=sys.stderr)\n"
        "opening.open_stillroom = lambda *_, **__: Closing()\n"
        "sys.argv = ['stillroom', 'ask', '-', '--quiet']\nmain.main()\n"
    )
    root = Path(__file__).resolve().parents[2]
    pipe = subprocess.PIPE
    command = [*forked.command(*MODULES), program]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=root) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write("ready?\n")
        process.stdin.flush()
        process.stdout.readline()
        os.kill(process.pid, number)
        until(lambda: process.poll() is not None)
        assert process.returncode == code
        errors = process.stderr.read()
    assert errors.startswith("closed")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_signal_while_a_model_loads_does_not_abort_the_process() -> None:
    code = (
        "import os, signal, torch\n"
        "from stillroom.cli import main\n"
        "from stillroom.ops.thread_pools import run_in_short_lived_thread\n"
        "def load():\n"
        "    weights = torch.ones(300, 300)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while True:\n"
        "        torch.tanh(weights @ weights)\n"
        "main.run = lambda args: run_in_short_lived_thread(load)\n"
        "main.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (143, "")
