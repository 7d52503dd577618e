"""Engines and a front under a real Ray Serve. Skipped without Ray, which is no dependency of the tests."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_no_other_module_imports_ray() -> None:
    sources = [path for path in (ROOT / "src").rglob("*.py") if "import ray" in path.read_text(encoding="utf-8")]
    assert [path.name for path in sources] == ["ray_serve.py"]
    assert len(sources[0].read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs stillroom[cluster]")
def test_ray_replaces_a_killed_engine_and_ends_all_processes(tmp_path: Path) -> None:
    kb = tmp_path / "kb"
    add = [sys.executable, "-m", "stillroom.cli.main", "add", str(ROOT / "examples/gazetteer"), "--kb", str(kb), "-q"]
    subprocess.run(add, check=True, cwd=ROOT)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(free.getsockname()[1]) for free in (one, other)]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path()}
    program = [sys.executable, str(ROOT / "tests/supervision/ray_program.py"), str(kb), *ports]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=environment)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    first, answer, second, again, end = told
    assert first["engine"] != second["engine"] and answer == again == {"answer": "Beritine"}
    assert end == {"num_processes": 2, "num_left": 0}


def path() -> str:
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
