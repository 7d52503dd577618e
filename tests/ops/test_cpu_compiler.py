"""Compiled kernels have the declared parallel loops, in any order of compiling, and cached code is of one process."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core.cpu_options import ParallelOptions

from stillroom.ops import cpu_compiler, cpu_kernels, cpu_products, cpu_row_attention
from tests.fakes import random_checkpoint

IN_A_PROCESS_OF_ITS_OWN = """
import inspect, re
import numpy as np
from stillroom.ops import cpu_panels, cpu_products
from stillroom.ops.cpu_kernels import rms_norm

def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)

rms_norm(ones(2, 8), ones(8), 1e-5, ones(2, 8))
for dtype in (np.float32, np.int8):
    cpu_products.linear_scaled(ones(5, 8), ones(3, 8, dtype=dtype), ones(3), ones(5, 3), 1)
cpu_products._dot_products(ones(5, 32), ones(3, 16, dtype=np.uint32), ones(5, 3), 1)
for is_wide in (True, False):
    out = ones(5, 16, dtype=np.float32 if is_wide else np.uint16)
    cpu_panels.panel_products(ones(5, 32, dtype=np.uint16), ones(16, 16, dtype=np.uint32), out, is_wide, 1)
for kernel in (rms_norm, cpu_products.linear_scaled, cpu_products._dot_products, cpu_panels.panel_products):
    written = inspect.getsource(kernel.py_func).count("numba.prange(")
    for code in kernel.inspect_llvm().values():
        assert len(set(re.findall("__numba_parfor_gufunc_0x[0-9a-f]+", code))) == written, kernel
"""


@pytest.mark.slow  # compiles every kernel again
def test_only_prange_loops_are_parallel(tmp_path: Path) -> None:
    """Results do not show it: numba reads beyond the end of a too small buffer, and discards what it reads."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN], env=environment, check=True, timeout=300)


@pytest.mark.slow
def test_starting_numba_leaves_the_number_of_threads_as_it_was() -> None:
    code = (
        "import torch\nfrom stillroom.ops.cpu_kernels import use_threads\n"
        "assert [use_threads(), use_threads(), torch.get_num_threads()] == [1, 1, 1]"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


def test_a_long_compilation_is_announced_once_and_shows_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 0.1, 1.0, 1.2, 2.0, 9.0, 10.0, 19.0])
    notice = cpu_compiler.CompilerNotice(lambda: next(times))
    event = SimpleNamespace(data={"dispatcher": cpu_kernels.rms_norm})

    notice.on_start(event)
    notice.on_start(event)  # a kernel that the first one calls
    notice.on_end(event)
    assert not caplog.records
    notice.on_end(event)  # 1.2 seconds so far
    for _ in range(2):
        notice.on_start(event)
        notice.on_end(event)

    announced, *counts = [record.getMessage() for record in caplog.records]
    assert "compiling kernels for this processor, once for each type of weights" in announced
    assert counts == [
        "2 kernels are compiled, the last is rms_norm (8 s)",
        "3 kernels are compiled, the last is rms_norm (17 s)",
    ]


def test_options_are_those_of_every_kernel() -> None:
    kernels: list[Any] = [cpu_kernels.rms_norm, cpu_row_attention.attend_rows, cpu_products.linear_scaled]
    intended = dict.fromkeys(ParallelOptions.__slots__, False) | {"enabled": True, "prange": True}
    for kernel in kernels:
        for _ in range(2):
            assert ParallelOptions(kernel.targetoptions["parallel"])._get_values() == intended


TWO_MODELS_AT_ONCE = """
import sys, threading
from pathlib import Path
import numba
from tests.engine.harness import Run, engine_on, request

def work(number):
    run = Run(engine_on(Path(sys.argv[1])))
    for index in range(4):
        run.submit(request(f"r{index}", [[3 + number, 5], [7] * 40], max_tokens=30))
    run.finish()

work(0)
assert numba.threading_layer() == "workqueue"
threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_two_models_can_compute_at_once_with_numbas_workqueue(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=2)
    environment = os.environ | {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", TWO_MODELS_AT_ONCE, str(tmp_path)], env=environment, check=True, timeout=300)


def test_two_processes_that_cache_one_kernel_do_not_mix_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes compile one kernel for different types at the same time."""
    file: Any = cpu_products.linear_scaled._cache._cache_file  # type: ignore[attr-defined]
    if cpu_products.linear_scaled.stats.cache_path is None:  # type: ignore[attr-defined]
        pytest.skip("there is no folder to keep code in")
    kept: dict[str, str] = {}
    index: dict[str, str] = {}
    both = Barrier(2)

    def load_index() -> dict[str, str]:
        found = dict(index)
        with suppress(BrokenBarrierError):
            both.wait(0.2)  # times out if they take turns
        return found

    monkeypatch.setattr(file, "_load_index", load_index)
    monkeypatch.setattr(file, "_save_index", index.update)
    monkeypatch.setattr(file, "_save_data", kept.__setitem__)
    Path(file._index_path).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: file.save(key, f"code for {key}"), ("float32", "int8")))
    assert {key: kept[name] for key, name in index.items()} == {
        "float32": "code for float32",
        "int8": "code for int8",
    }
