"""The fastest number of threads is chosen, and only the engine's thread keeps an OpenMP team."""

import threading
from pathlib import Path

import pytest
import torch

from stillroom.backends import calibration
from stillroom.backends.assembly import kv_shape
from stillroom.backends.calibration import CalibrationTarget, step_seconds
from stillroom.backends.engine_building import build_engine
from stillroom.backends.num_threads import candidates, choose
from stillroom.config.settings import QueryCacheConfig, ReuseConfig, RuntimeConfig, StillroomConfig
from stillroom.core.clock import SystemClock
from stillroom.models.loader import load_own_decoder
from stillroom.rag.stillroom import Stillroom
from tests.fakes import random_checkpoint
from tests.ops.test_thread_pools import needs_teams, num_system_threads
from tests.server.fakes import until

pytestmark = pytest.mark.microworld


def test_candidates_are_repeated_halves() -> None:
    assert [candidates(most) for most in (1, 2, 6, 16)] == [[1], [2, 1], [6, 3, 1], [16, 8, 4, 2, 1]]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({4: [1.0, 4.0], 2: [2.0, 8.0], 1: [4.0, 16.0]}, 4),
        ({4: [8.0, 9.0], 2: [2.0, 8.0], 1: [4.0, 16.0]}, 2),
        ({4: [100.0, 100.0], 2: [100.0, 90.0], 1: [1.0, 20.0]}, 1),
        ({4: [1.0, 1.0], 2: [0.99, 0.98], 1: [2.0, 2.0]}, 4),
        ({4: [0.0], 2: [0.0], 1: [0.0]}, 4),
    ],
)
def test_fewer_threads_are_chosen_only_if_clearly_faster(times: dict[int, list[float]], chosen: int) -> None:
    assert choose(list(times), times.__getitem__) == chosen


def test_measurement_stays_within_the_kv_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With one block, 64 tokens would be written past the end of the KV memory."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=2)
    decoder = load_own_decoder(tmp_path, device="cpu", dtype="float32")
    per_token = kv_shape(decoder).bytes_per_token
    lengths: list[int] = []

    def measured(target: CalibrationTarget, num_cached: int, num_new: int) -> float:
        lengths.append(num_cached + num_new)
        return step_seconds(target, num_cached, num_new)

    monkeypatch.setattr(calibration, "step_seconds", measured)
    try:
        torch.set_num_threads(2)
        for block_size in (4, 16):
            config = RuntimeConfig(block_size=block_size, kv_bytes=block_size * per_token, num_threads=0)
            build_engine(decoder, config, SystemClock(), reuse=ReuseConfig(), fingerprint=bytes(32), tunes_threads=True)
            assert max(lengths) == block_size
            lengths.clear()
    finally:
        torch.set_num_threads(before)


@needs_teams
def test_only_the_engine_keeps_an_openmp_team(tmp_path: Path) -> None:
    """Each asking thread adds itself to the process's threads, and no team."""
    (tmp_path / "a.txt").write_text("The capital of Ardun is Belmar .")
    off = QueryCacheConfig(max_tokens=0)  # each question is embedded
    config = StillroomConfig(query_cache=off, runtime=RuntimeConfig(num_threads=2))
    with Stillroom.open(tmp_path / "kb", config=config) as stillroom:
        stillroom.add(tmp_path / "a.txt")
        stillroom.ask("What is the capital of Ardun ?")
        before, leave = num_system_threads(), threading.Event()
        asked = [threading.Event() for _ in range(3)]

        def ask(number: int) -> None:
            stillroom.search("What is the capital of Ardun ? " * 40 + str(number))
            asked[number].set()
            leave.wait(30)

        callers = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        try:
            for caller, done in zip(callers, asked, strict=True):
                caller.start()
                assert done.wait(30)
            until(lambda: num_system_threads() <= before + len(callers))  # an embedder's thread may still be ending
        finally:
            leave.set()
            for caller in callers:
                if caller.ident is not None:
                    caller.join()
