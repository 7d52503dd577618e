"""Runs `vllm_program.py` under the Python that has vLLM."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("vllm_program.py")


class VllmProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(
        self, prompts: Sequence[Sequence[int]], *, num_tokens: int = 16, salt: str = "", resets: bool = True
    ) -> dict[str, Any]:
        """Run a round; see `vllm_program.py`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        question = {"prompts": [list(one) for one in prompts], "num_tokens": num_tokens, "salt": salt, "resets": resets}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        assert reply, "vLLM has ended; its messages are above"
        found: dict[str, Any] = json.loads(reply)
        return found


@contextmanager
def started(python: str, folder: Path, dtype: str, extra: dict[str, Any] | None) -> Iterator[VllmProcess]:
    """Start vLLM with the connector, or alone if `extra` is None."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("STILLROOM_VLLM_PATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    command = [python, str(PROGRAM), str(folder), dtype, json.dumps(extra)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, cwd=folder
    ) as process:
        yield VllmProcess(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(600) == 0
