"""A process of Stillroom that a service under Ray runs, and the arguments of that service. Imports no part of Ray."""

from pydantic import BaseModel

from stillroom.errors import EngineError
from stillroom.supervision.child_process import ChildProcess, described_end


class Options(BaseModel, extra="forbid"):
    """Arguments of `serve run stillroom.supervision.ray_serve:app`."""

    model: str
    kb: str = ""
    """Empty: `STILLROOM_KB` of the nodes. A folder needs its whole path."""
    engines: int = 2
    cpus: float = 1.0
    """Of each engine, which computes with as many threads."""
    gpus: float = 0.0
    """Of each engine."""
    host: str = "127.0.0.1"
    """Address that engines listen on; `node`: that of their node, which needs `STILLROOM_CLUSTER__SECRET`."""
    front_port: int = 0
    """Port of a front on this machine; 0: none."""
    list_url: str = "http://127.0.0.1:8000/"
    """Where that front reads the list of engines."""

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return the arguments of a command of `stillroom`."""
        kb = ["--kb", self.kb] if self.kb else []
        return [name, "--json", "--model", self.model, *kb, *arguments]


class ServedProcess:
    """A process whose service ends with it. Its log is that of the service."""

    def __init__(self, command: list[str]) -> None:
        self._process = ChildProcess(command, {})

    def ready_url(self) -> str:
        """Wait until the process is ready, and return its address.

        Raises:
            EngineError: it ended before.
        """
        if not self._process.wait_until_ready():
            self._process.reap()
            self.check()
        assert self._process.url is not None
        return self._process.url

    def check(self) -> None:
        """Raises EngineError: the process has ended."""
        if not self._process.is_running:
            end = described_end(self._process.reap())
            raise EngineError(f"process {self._process.pid} ended with {end}; its message stands above in the log")

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop, and kill it if it has not ended in time."""
        self._process.stop(timeout_s)
