"""Tests `stillroom bench lookup` on a tiny shape."""

from pathlib import Path

from stillroom_bench.quality.lookup import run_lookup
from stillroom_bench.quality.quality_options import LookupOptions
from stillroom_bench.quality.runtime import Shape
from tests.rag.test_calibration import TickingClock

TINY = Shape(997, 32, 48, 2, 4, 2, 8)


def test_quoting_answers_accept_proposed_tokens_and_others_propose_few(tmp_path: Path) -> None:
    options = LookupOptions(dtype="float32", length=64, answer_length=40, run_length=20, num_requests=2, repeat=1)
    result = run_lookup(options, tmp_path, shape=TINY, clock=TickingClock())
    kinds = ("quotes all", "quotes half", "quotes nothing")
    assert set(result.samples.values) == {f"{kind}/{name}" for kind in kinds for name in ("off", "on")}
    assert result.samples.of("quotes all/on", "accepted_tokens")[0] > 0
    assert all("accepted_tokens" not in result.samples.values[f"{kind}/off"] for kind in kinds)
    assert [row["answer"] for row in result.tables["with lookup against without"]] == list(kinds)
