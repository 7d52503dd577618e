"""A server of Stillroom as child processes: when it is ready, how it answers, and what memory it takes."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stillroom.errors import EngineError
from stillroom.supervision.child_process import ChildProcess

START_SECONDS = 600.0
"""Longest wait until a server is ready."""
_ANSWER_SECONDS = 300.0
_STOP_SECONDS = 60.0
_NUM_LOG_LINES = 10
"""Last lines of the log in an error."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer, with its times as a client sees them."""

    text: str
    first_token_seconds: float
    """From sending the question to the first piece of text."""
    stream_seconds: float
    """From the first piece of text to the last one."""
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was kept."""


class ServedStillroom:
    """`stillroom serve` on a free port of this machine. Close it, or use it as a context manager."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the server, and wait until it answers questions.

        Args:
            arguments: of `stillroom serve`, without `--json` and `--port`.
            environment: variables beside those of this process.

        Raises:
            EngineError: it ended, or was not ready in time.
        """
        self._log: deque[str] = deque(maxlen=_NUM_LOG_LINES)
        began = time.perf_counter()
        self._process = ChildProcess(
            ["serve", "--json", "--port", "0", *arguments], environment, on_log=self._log.append
        )
        is_ready = self._process.wait_until_ready(START_SECONDS)
        self.start_seconds = time.perf_counter() - began
        """From the start of the process until it was ready."""
        if not is_ready:
            self._process.stop(_STOP_SECONDS)
            raise EngineError(f"a server was not ready; the end of its log: {' '.join(self._log) or 'empty'}")
        assert self._process.url is not None
        self._client = httpx.Client(base_url=self._process.url, timeout=_ANSWER_SECONDS, trust_env=False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: str, num_tokens: int) -> TimedAnswer:
        """Ask a question and read the answer of exactly `num_tokens` tokens. Thread-safe.

        Raises:
            EngineError: there was no complete answer.
        """
        body = {
            "messages": [{"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
        }
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise EngineError(f"a question was refused with HTTP {response.status_code}: {response.read()[:500]!r}")
            return timed_answer((line, time.perf_counter() - began) for line in response.iter_lines())

    def metrics(self) -> dict[str, float]:
        """Return the server's metrics: values by name, summed over labels."""
        text = self._client.get("/metrics").raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found: dict[str, float] = dict.fromkeys((sample.name for sample in samples), 0.0)
        for sample in samples:
            found[sample.name] += sample.value
        return found

    def close(self) -> None:
        """Stop the server and its engines. Idempotent."""
        self._client.close()
        self._process.stop(_STOP_SECONDS)

    def __enter__(self) -> "ServedStillroom":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def timed_answer(lines: Iterable[tuple[str, float]]) -> TimedAnswer:
    """Read the events of a streamed answer.

    Args:
        lines: with the seconds since the question was sent.

    Raises:
        EngineError: an event is an error, or the stream ends without the number of tokens.
    """
    texts: list[str] = []
    first = last = math.nan
    usage: dict[str, Any] | None = None
    for line, seconds in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise EngineError(f"an answer failed: {event['error'].get('message')}")
        usage = event.get("usage") or usage
        text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if text:
            first, last = (seconds if math.isnan(first) else first), seconds
            texts.append(text)
    if usage is None or math.isnan(first):
        raise EngineError("a stream ended before its answer was complete")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return TimedAnswer("".join(texts), first, last - first, usage["completion_tokens"], usage["prompt_tokens"], cached)


def engine_processes(server: int) -> list[int]:
    """Return the engines among the child processes of a server. Linux only; elsewhere none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(parent) == server and state != "Z" and b"\0engine\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def memory_of(pid: int) -> tuple[int, int] | None:
    """Return the memory of a process in bytes: resident, and resident with shared pages divided among the processes
    that share them. None if the system does not tell."""
    resident, proportional = _kibibytes(pid, "status", "VmRSS:"), _kibibytes(pid, "smaps_rollup", "Pss:")
    return None if resident is None or proportional is None else (1024 * resident, 1024 * proportional)


def _kibibytes(pid: int, file: str, name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return None
