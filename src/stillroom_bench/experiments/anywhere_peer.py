"""Client of a peer runtime of `stillroom bench anywhere`, which runs in its own process (`anywhere_worker.py`)."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from stillroom.core.prompt import Segment
from stillroom.errors import UsageError
from stillroom_bench.experiments.anywhere_engine import ANSWER_TOKENS, PromptReply
from stillroom_bench.experiments.anywhere_worker import PEERS
from stillroom_bench.experiments.experiment_options import SYSTEM_TOKENS
from stillroom_bench.instrument.worker import WorkerProcess

_WORKER = Path(__file__).parent / "anywhere_worker.py"
_LEAST_PIECE = 32
"""Minimum piece length of KVBoost in tokens."""


class Peer:
    """A peer runtime in its own process."""

    def __init__(self, name: str, python: str, work_dir: Path, chunk_tokens: int) -> None:
        """
        Args:
            python: Python executable that has the runtime installed.

        Raises:
            UsageError: the peer is unknown, or does not support chunks of this length.
        """
        if name not in PEERS:
            raise UsageError(f"unknown peer {name}; known are {', '.join(PEERS)}")
        self._piece_tokens = math.gcd(SYSTEM_TOKENS, chunk_tokens)
        if self._piece_tokens < _LEAST_PIECE:
            raise UsageError(
                f"{name} caches pieces of one length of at least {_LEAST_PIECE} tokens; "
                f"--chunk-tokens must be a multiple of {_LEAST_PIECE}"
            )
        self.name = name
        self._command = [python, str(_WORKER), name]
        self._log = work_dir / f"anywhere-{name}.log"
        self._process: WorkerProcess | None = None

    def start(self, model: Sequence[str], cache_bytes: int) -> None:
        """
        Args:
            model: folder of the checkpoint, dtype, and number of threads.

        Raises:
            UsageError: the process does not start.
        """
        settings = {"cache_bytes": cache_bytes, "piece_tokens": self._piece_tokens}
        self._process = WorkerProcess(self.name, [*self._command, *model, json.dumps(settings)], self._log)
        try:
            self._process.wait()
        except UsageError:
            self.close()
            raise

    def ask(self, segments: Sequence[Segment]) -> PromptReply:
        return self._ask(segments, reuses=True)

    def ask_in_full(self, segments: Sequence[Segment]) -> PromptReply:
        return self._ask(segments, reuses=False)

    def _ask(self, segments: Sequence[Segment], *, reuses: bool) -> PromptReply:
        assert self._process is not None
        prompt = [token for segment in segments for token in segment.token_ids]
        found = self._process.ask(
            {
                "prompt": prompt,
                "num_keepable": len(prompt) - len(segments[-1].token_ids),
                "num_tokens": ANSWER_TOKENS,
                "reuses": reuses,
            }
        )
        return PromptReply(found["seconds"], tuple(found["token_ids"]), found["num_cached"])

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
