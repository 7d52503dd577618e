"""Tests `stillroom bench prepared` at a tiny size."""

from pathlib import Path

import pytest

from stillroom.core.ids import ChunkId
from stillroom.errors import UsageError
from stillroom_bench.experiments.experiment_options import PreparedBenchOptions
from stillroom_bench.experiments.prepared import EXACT, FULL, BenchDocuments, run_prepared
from stillroom_bench.quality.runtime import Shape

SHAPE = Shape(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2)
PLACES = ("host", "disk")
ARMS = [
    *(FULL, EXACT, "prepared, from device"),
    *(f"prepared, {bits} bits, from {place}" for bits in (16, 8, 4) for place in PLACES),
]


def test_every_arm_answers_new_questions_from_its_own_tier(tmp_path: Path) -> None:
    """The benchmark itself asserts that chunks come from the tier of the arm."""
    options = PreparedBenchOptions(
        num_documents=3, document_chunks=2, num_chunks=3, chunk_tokens=20, repeat=2, num_beside=0, dtype="float32"
    )
    result = run_prepared(options, tmp_path, shape=SHAPE)
    assert list(result.samples.values) == ARMS and result.baseline == FULL
    costs, answers = result.tables.values()
    assert [row["arm"] for row in costs] == ARMS[1:] == [row["arm"] for row in answers]
    exact = next(row for row in answers if row["arm"] == EXACT)
    assert set(exact.values()) == {EXACT, "2 of 2"}, "exact reuse changes no token"


@pytest.mark.slow  # waits until the engine counts as idle, for every question
def test_questions_beside_preparing_are_timed(tmp_path: Path) -> None:
    options = PreparedBenchOptions(chunk_tokens=20, repeat=1, num_beside=2, dtype="float32")
    result = run_prepared(options, tmp_path, shape=SHAPE)
    idle, preparing = result.tables["Time to first token of prepared questions beside preparing"]
    assert idle["questions"] == preparing["questions"] == 2 and "ratio of p95" in preparing


def test_chunks_before_are_those_of_the_same_document() -> None:
    documents = BenchDocuments(2, 3)
    found = documents.chunks_before([ChunkId(0), ChunkId(2), ChunkId(4)], 99)
    assert found == {0: (), 2: (0, 1), 4: (3,)}


def test_prompt_of_more_chunks_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="--documents"):
        PreparedBenchOptions(num_documents=2, document_chunks=1, num_chunks=3)
