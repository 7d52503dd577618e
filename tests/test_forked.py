"""Programs that are forked end with the exit codes of their own, however soon they end."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.forked import command

ENDS = {"os._exit(0)": 0, "os._exit(3)": 3, "sys.exit('text')": 1, "os.kill(os.getpid(), 9)": -9, "os.abort()": -6}


@pytest.mark.parametrize("end", ENDS)
def test_exit_codes_are_those_of_the_program(end: str) -> None:
    program = [*command("json"), f"import os, sys; {end}"]

    def code(_: int) -> int:
        return subprocess.run(program, check=False, stderr=subprocess.DEVNULL).returncode

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(code, range(16))) == {ENDS[end]}
