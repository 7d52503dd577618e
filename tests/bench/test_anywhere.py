"""Tests `stillroom bench anywhere` with a tiny model: every tier, shuffled questions, peers."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.experiments.anywhere import FULL, run_anywhere
from stillroom_bench.experiments.anywhere_engine import Answers, PromptReply
from stillroom_bench.experiments.experiment_options import AnywhereBenchOptions
from stillroom_bench.quality.runtime import Shape

TINY = Shape(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
SCOPE = AnywhereBenchOptions(
    num_chunks=3,
    chunk_tokens=20,
    question_tokens=8,
    ratios=(0.0, 0.25),
    num_lasting=24,
    num_documents=8,
    dtype="float32",
    repeat=2,
)


def test_every_tier_and_ratio_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    result = run_anywhere(SCOPE, tmp_path, shape=TINY, on_progress=said.append)
    arms = {f"from {tier}, {ratio} computed again" for tier in ("device", "host", "disk") for ratio in ("0%", "25%")}
    assert set(result.samples.values) == {FULL, *arms}
    assert all(len(result.samples.of(arm, "ttft_seconds")) == 2 for arm in (FULL, *arms))
    assert set(result.samples.of("from disk, 25% computed again", "recomputed_tokens")) == {15.0}
    assert set(result.samples.of("from host, 0% computed again", "recomputed_tokens")) == {0.0}
    rows = result.tables["Shuffled questions, by hundreds"]
    assert [row["questions"] for row in rows] == ["to 24"]
    assert float(rows[0]["tokens not computed"].rstrip("%")) > 30
    assert any("shuffled" in line for line in said)
    assert {row["arm"] for row in result.tables["Answers beside a full prefill"]} == arms
    assert rows[0]["same 4 tokens"].endswith(" of 3"), "every tenth question runs with a full prefill"


def test_replies_are_compared_with_a_full_prefill_of_the_same_runtime() -> None:
    answers = Answers()
    for arm, *replies in (("full", (1, 2), (3, 4), (5, 6)), ("ours", (1, 2), (3, 0), (0, 6))):
        for repetition, token_ids in enumerate(replies, start=-1):
            answers.add(arm, repetition, PromptReply(0.1, tuple(token_ids), 0))
    row = {"arm": "ours", "same first token": "1 of 2", "same 4 tokens": "0 of 2"}
    assert answers.rows({"ours": "full"}) == [row], "warm-up replies are not counted"


PACKAGE = """
from enum import Enum
from types import SimpleNamespace

pytestmark = pytest.mark.usefixtures("one_thread")


class GenerationMode(str, Enum):
    BASELINE = "baseline"
    CHUNK_KV_REUSE = "chunk_kv_reuse"


class KVBoost:
    def __init__(self, model, tokenizer, *, max_cache_bytes, chunk_size, device):
        assert max_cache_bytes > 0 and chunk_size == 32 and device == "cpu" and model.config.vocab_size == 300
        self.tokenizer, self.kept = tokenizer, set()

    def generate(self, prompt, max_new_tokens, mode, cacheable_prefix_len, on_token):
        tokens = self.tokenizer.encode(prompt)
        assert len(tokens) - cacheable_prefix_len == 8
        kept = 0
        if mode == GenerationMode.CHUNK_KV_REUSE:
            pieces = [tuple(tokens[at : at + 32]) for at in range(0, cacheable_prefix_len, 32)]
            kept = 32 * sum(piece in self.kept for piece in pieces)
            self.kept.update(pieces)
        answer = [tokens[0], kept, 0, 0][:max_new_tokens]
        for token in answer:
            on_token(token)
        return SimpleNamespace(output_text=self.tokenizer.decode(answer), cached_tokens=kept)
"""


@pytest.mark.slow  # starts processes that import torch
def test_peer_gets_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvboost.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scope = replace(SCOPE, chunk_tokens=32, ratios=(0.0,), num_lasting=12)
    result = run_anywhere(replace(scope, peers=(f"kvboost={sys.executable}",)), tmp_path, shape=TINY)
    assert not result.notes
    assert len(result.samples.of("kvboost", "ttft_seconds")) == 2
    assert result.samples.of("kvboost", "kept_tokens") == [128.0, 128.0], "the system prompt and three chunks"
    assert result.samples.of(f"kvboost, {FULL}", "kept_tokens") == [0.0, 0.0]
    rows = {row["arm"]: row for row in result.tables["Answers beside a full prefill"]}
    assert rows["kvboost"] == {"arm": "kvboost", "same first token": "2 of 2", "same 4 tokens": "0 of 2"}
    (row,) = result.tables["Shuffled questions to kvboost"]
    assert float(row["tokens it had kept"].rstrip("%")) > 30 and row["same first token"] == "2 of 2"
    (tmp_path / "kvboost.py").write_text("raise ImportError")
    result = run_anywhere(replace(scope, peers=(f"kvboost={sys.executable}",)), tmp_path, shape=TINY)
    assert [note.partition(" stopped")[0] for note in result.notes] == ["kvboost: left out, kvboost"]


def test_unknown_peer_and_unsupported_chunk_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown peer other; known are kvboost"):
        run_anywhere(replace(SCOPE, peers=("other=python",)), tmp_path, shape=TINY)
    with pytest.raises(UsageError, match="must be a multiple of 32"):
        run_anywhere(replace(SCOPE, peers=("kvboost=python",)), tmp_path, shape=TINY)


def test_too_few_documents_are_refused() -> None:
    with pytest.raises(UsageError, match="3 documents are too few for prompts of 5"):
        AnywhereBenchOptions(num_lasting=100, num_documents=3)
