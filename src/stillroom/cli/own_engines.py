"""`stillroom serve --replicas N`: the engines that a server starts for itself, and the settings of both."""

import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stillroom.config.environment import as_environment
from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import SystemClock
from stillroom.errors import UsageError
from stillroom.models.bundled_models import reader_folder, short_name
from stillroom.supervision.child_log import log_again
from stillroom.supervision.child_process import ChildProcess
from stillroom.supervision.replicas import Replicas
from stillroom.supervision.shares import gpu_of, share_of

SECRET = "STILLROOM_CLUSTER__SECRET"
_OF_THE_FRONT = (
    "engine",
    "cluster",
    "server.host",
    "server.port",
    "server.keys_file",
    "server.mcp",
    "server.access_log",
)
_STOP_SECONDS = 15.0
"""For an engine to end, besides `server.grace_s`."""


class NoEngines:
    """Stands for the engines of a server that has none of its own."""

    def start(self, progress: Callable[[str], None]) -> None:
        pass

    def terminate(self) -> None:
        pass

    def close(self) -> None:
        pass


def engines_of(
    kb: Path, settings: StillroomConfig, num_engines: int | None
) -> tuple[Replicas | NoEngines, StillroomConfig]:
    """Return a server's own engines, not started yet, and the server's settings as their front.

    Args:
        num_engines: None: it has no engines of its own, and its settings stay as they are.

    Raises:
        UsageError: the settings name another engine, or a model that generates no text.
    """
    if num_engines is None:
        return NoEngines(), settings
    if settings.engine.kind != "builtin":
        raise UsageError(
            f"--replicas starts engines of its own, and engine.kind = {settings.engine.kind!r} names others; leave out "
            "one of them"
        )
    if reader_folder(settings.runtime.model):
        raise UsageError(
            f"--replicas needs a model that generates text, and {short_name(settings.runtime.model)} quotes documents; "
            "name one that generates, such as --model bundled:microworld for a trial"
        )
    secret = settings.cluster.secret or secrets.token_urlsafe(32)
    num_gpus = _num_gpus(settings.runtime.device)
    share = share_of(settings, num_engines, num_cores=_num_cores(), num_gpus=num_gpus)
    environment = as_environment(share, leave_out=_OF_THE_FRONT)
    environment |= {SECRET: secret, "STILLROOM_SERVER__ACCESS_LOG": "false"}  # the front logs each request
    arguments = ["engine", "--json", "--kb", str(kb), "--host", "127.0.0.1", "--port", "0"]

    def launch(number: int) -> ChildProcess:
        gpu = gpu_of(number, os.environ.get("CUDA_VISIBLE_DEVICES"), num_gpus)
        return ChildProcess(arguments, environment | gpu, on_log=lambda line: log_again(f"engine {number + 1}", line))

    engines = Replicas(launch, num_engines, SystemClock(), settings.server.grace_s + _STOP_SECONDS)
    front = replace(
        settings,
        engine=replace(settings.engine, kind="cluster", urls=engines.address),
        cluster=replace(settings.cluster, secret=secret),
    )
    return engines, front


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_gpus(device: str) -> int:
    """Return the number of GPUs that engines on this device use; 0: none."""
    if device not in ("auto", "cuda"):
        return 0
    import torch

    return torch.cuda.device_count()
