"""Whether a process has used the memory that it was allowed."""

import subprocess
import sys

import pytest

from stillroom.retrieval.intake.process_limits import has_used_memory

FULL = """
from stillroom.retrieval.intake.process_limits import has_used_memory, limit_memory
limit_memory(40 << 20)
before, held = has_used_memory(), []
try:
    while True:
        held.append(bytearray(1 << 20))
except MemoryError:
    print(before, has_used_memory(), flush=True)
    input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_process_near_its_limit_is_known_from_inside_and_from_outside() -> None:
    command = [sys.executable, "-c", FULL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["False", "True"]
        assert has_used_memory(process.pid)
        process.communicate("\n")
    assert not has_used_memory() and not has_used_memory(process.pid)
