"""Tests `stillroom bench attention`: sums over a weight matrix made by hand, and a few questions of microworld."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from stillroom.answer_quality.asking import bench_runtime
from stillroom.answer_quality.questions import load_questions
from stillroom.backends.engine_building import load_configured
from stillroom.errors import UsageError
from stillroom.kvcache.tree.chunk_scores import context_impact
from stillroom.models.bundled_models import MICROWORLD
from stillroom_bench.experiments.chunk_attention import among_equals, chunk_attention, deviations, run_attention
from stillroom_bench.experiments.experiment_options import AttentionOptions
from stillroom_bench.quality.prompt_reader import PromptReader
from tests.bench.test_quality import ROWS


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    return PromptReader(load_configured(bench_runtime(MICROWORLD)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_sums_leave_out_a_tokens_own_key_and_count_each_earlier_chunk() -> None:
    """A prompt of a system token, a chunk of one token and a chunk of two."""
    weights_TT = np.array(
        [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.2, 0.3, 0.5, 0.0], [0.1, 0.1, 0.2, 0.6]], np.float32
    )
    one = chunk_attention(weights_TT, [range(1, 2), range(2, 4)], 1)

    assert (one.inter, one.intra) == pytest.approx((0.4, 0.2))
    assert one.impact == pytest.approx(context_impact(0.4 / 2, 0.2 / 4)), "Eq. 9: per pair of tokens"
    assert one.top_shares == pytest.approx((0.75, 0.75, 0.75)), "one of two tokens has 0.3 of 0.4"
    assert one.overlap == 0.5, "0.3 exceeds 0.2, 0.1 does not"


def test_tokens_with_most_attention_are_counted_up_to_the_next_whole_one() -> None:
    weights_TT = np.zeros((11, 11), np.float32)
    weights_TT[1:, 0] = np.arange(1, 11)
    tops = chunk_attention(weights_TT, [range(1), range(1, 11)], 1).top_shares

    assert tops == pytest.approx((10 / 55, 19 / 55, 27 / 55))


def test_ranks_among_prompts_of_one_size_do_not_depend_on_the_others() -> None:
    ranks = among_equals(np.array([5.0, 1.0, 9.0, 3.0, 3.0]), np.array([2, 2, 8, 8, 8]))

    assert ranks.tolist() == pytest.approx([0.75, 0.25, 5 / 6, 1 / 3, 1 / 3])


def test_weights_are_those_of_the_model_and_sum_to_one(reader: PromptReader, path: Path) -> None:
    question = load_questions(path)[0]
    chunks, weights_TT = reader.attention(question.chunks, question.question)

    assert weights_TT.sum(axis=1) == pytest.approx(np.ones(len(weights_TT)), abs=1e-5)
    assert not np.triu(weights_TT, 1).any()
    assert len(chunks) == 4 and chunks[0].start > 0 and chunks[-1].stop < len(weights_TT)


def test_hidden_states_move_only_with_other_chunks(reader: PromptReader, path: Path) -> None:
    question = load_questions(path)[0]
    moved = deviations(reader, question, 3)

    assert moved.shape == (3,) and (moved > 1e-3).all()
    assert deviations(reader, question, 2) == pytest.approx(moved[:2]), "the nearest chunks come first"


def test_surprisal_is_that_of_the_models_own_distribution(reader: PromptReader) -> None:
    token_ids = [5, 9, 7, 9]
    found = reader.surprisal(token_ids)

    probabilities_TV = torch.softmax(reader._decoder.logits(reader.hidden_states(token_ids[:2])), dim=-1)
    assert found[0] == 0 and found[2] == pytest.approx(-math.log(float(probabilities_TV[-1, 7])), abs=1e-4)


def test_report_has_every_table_and_questions_without_two_chunks_are_refused(path: Path, tmp_path: Path) -> None:
    tables = run_attention(AttentionOptions(path, num_before=2)).tables
    sums, tops, moves, answers = tables.values()

    assert (sums[0]["questions"], sums[0]["chunks"]) == (3, 5)
    assert [row["tokens with most"] for row in tops] == ["10%", "20%", "30%"]
    assert [(row["chunks before"], row["questions"]) for row in moves] == [(1, 1), (2, 1)]
    assert [row["questions"] for row in answers] == [2, 1, 3]
    alone = tmp_path / "alone.jsonl"
    alone.write_text(json.dumps({"chunks": ["A ."], "question": "B ?"}) + "\n")
    with pytest.raises(UsageError, match="two chunks"):
        run_attention(AttentionOptions(alone))
