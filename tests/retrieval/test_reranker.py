"""Reranking with a small cross-encoder of random weights; the oracle is sentence-transformers' own prediction."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stillroom.config.settings import SearchConfig, StillroomConfig
from stillroom.core.clock import SystemClock
from stillroom.errors import ModelError, ModelNotFoundError, UnsupportedModelError, UsageError
from stillroom.retrieval.model_files import PACKAGED_MODEL
from stillroom.retrieval.reranker import Reranker, by_score, is_settled, load_cross_encoder
from tests.fakes import ManualClock, byte_tokenizer, random_checkpoint, random_cross_encoder
from tests.retrieval.conftest import MODES, MakeFile, OpenKb

QUERY = "How often do we change keys?"
TEXTS = [f"Key {number} of the vault is rotated. " * (1 + number % 5) for number in range(11)]


class TickingClock(ManualClock):
    """Each reading of the clock takes a second."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_cross_encoder(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def reranker(model: Path) -> Reranker:
    return Reranker(str(model), SystemClock())


def predicted(model: Path, texts: Sequence[str], query: str = QUERY) -> list[float]:
    """Return sentence-transformers' score of each pair, alone."""
    oracle = loaded(model)
    return [float(oracle.predict([(query, text)], show_progress_bar=False)[0]) for text in texts]


@functools.cache
def loaded(model: Path) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(model), device="cpu")


def settings(model: Path, **options: object) -> StillroomConfig:
    return StillroomConfig(search=SearchConfig(reranker=str(model), **options))  # type: ignore[arg-type]


# Scores


def test_scores_are_those_of_sentence_transformers(model: Path, reranker: Reranker) -> None:
    texts = [*TEXTS, "", "\u4f60\u597d", "the vault " * 600]
    scores = reranker.score(QUERY, texts)
    assert scores == pytest.approx(predicted(model, texts), abs=1e-5)
    assert len({round(score, 4) for score in scores}) > 5
    assert reranker.score_all(QUERY, texts * 4) == pytest.approx(scores * 4, abs=1e-5)


def test_equal_calls_give_equal_scores_with_any_number_of_threads(reranker: Reranker) -> None:
    expected = reranker.score(QUERY, TEXTS)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert reranker.score(QUERY, TEXTS) == expected
    finally:
        torch.set_num_threads(num_threads)


def test_long_query_is_cut_as_sentence_transformers_cuts_it(model: Path, reranker: Reranker) -> None:
    query = "how often do we change the keys " * 200
    assert reranker.score(query, TEXTS[:2]) == pytest.approx(predicted(model, TEXTS[:2], query), abs=1e-5)


def test_time_budget_ends_the_reading_after_whole_batches(model: Path, reranker: Reranker) -> None:
    timed = Reranker(str(model), TickingClock(), reranker)
    full = reranker.score(QUERY, TEXTS)
    for budget_s, num_read in ((1.0, 4), (2.0, 8), (3.0, 11), (0.0, 11)):
        assert timed.score(QUERY, TEXTS, budget_s) == full[:num_read]


def test_reranker_that_others_keep_busy_reads_nothing(reranker: Reranker) -> None:
    with reranker._weights.running:
        assert reranker.score(QUERY, TEXTS, 0.001) == []
    assert len(reranker.score(QUERY, TEXTS, 60.0)) == len(TEXTS)


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(1, 4), st.integers(0, 5))
def test_settled_means_that_the_last_scores_are_not_among_the_first(
    scores: list[int], top_k: int, patience: int
) -> None:
    first = by_score(scores)[:top_k]
    before = by_score(scores[: max(len(scores) - patience, 0)])[:top_k]
    assert is_settled(scores, top_k, patience) == (patience > 0 and len(before) == top_k and before == first)


def test_patience_ends_the_reading(reranker: Reranker) -> None:
    full = reranker.score(QUERY, TEXTS)
    found = reranker.score(QUERY, TEXTS, is_stable=lambda scores: is_settled(scores, 1, 2))
    assert found == full[: len(found)] and is_settled(found, 1, 2) == (len(found) < len(full))


# Searches


@pytest.fixture
def keys(make_file: MakeFile, docs: Path) -> Path:
    for number, text in enumerate(TEXTS):
        make_file(f"key{number}.md", f"# Key {number}\n\n{text}\n")
    return docs


def test_results_are_in_the_order_of_the_oracle(open_kb: OpenKb, model: Path, keys: Path) -> None:
    plain, kb = open_kb(), open_kb(settings(model, rerank_candidates=8, rerank_budget_s=0.0))
    plain.add([keys])
    for mode in MODES:
        fused = plain.search(QUERY, mode=mode, top_k=8).results
        found = kb.search(QUERY, mode=mode, top_k=3)
        expected = predicted(model, [scored.chunk.indexed_text for scored in fused])
        assert [scored.chunk for scored in found.results] == [fused[at].chunk for at in by_score(expected)][:3]
        for scored, score in zip(found.results, sorted(expected, reverse=True), strict=False):
            assert scored.score == scored.scores["reranker"] == pytest.approx(score, abs=1e-5)
            assert set(scored.scores) >= ({"dense", "sparse", "reranker"} if mode == "hybrid" else {mode, "reranker"})
        assert found.num_reranked == 8 and found.rerank_seconds > 0
        assert len(kb.search(QUERY, mode=mode, top_k=10).results) == 10
        assert not any("reranker" in scored.scores for scored in fused)


def test_last_stage_is_the_reranked_search(open_kb: OpenKb, model: Path, keys: Path) -> None:
    plain, kb = open_kb(), open_kb(settings(model))
    plain.add([keys])
    for num_stages in (1, 2, 3, 8):
        *provisional, last = kb.search_staged(QUERY, num_stages=num_stages)
        assert last.results == kb.search(QUERY).results and last.num_reranked == 11
        assert len(provisional) < num_stages and not any(one.num_reranked for one in provisional)
        if provisional:
            assert provisional[-1].results == plain.search(QUERY).results
    assert list(kb.search_staged("nothing", where="path = none"))[-1].results == ()


def test_candidates_after_the_budget_follow_in_fused_order(open_kb: OpenKb, model: Path, keys: Path) -> None:
    plain, kb = open_kb(), open_kb(settings(model, rerank_budget_s=1.0))
    plain.add([keys])
    assert kb._reranker is not None
    kb._reranker._clock = TickingClock()
    found, fused = kb.search(QUERY, top_k=6), plain.search(QUERY, top_k=6).results
    assert found.num_reranked == 4
    assert {scored.chunk.chunk_id for scored in found.results[:4]} == {scored.chunk.chunk_id for scored in fused[:4]}
    assert found.results[4:] == fused[4:]


def test_rerank_seconds_do_not_count_the_loading(
    open_kb: OpenKb, model: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb = open_kb(settings(model))
    kb.add([keys])
    clock = ManualClock()
    kb._active.current().search._clock = clock

    def load_slowly(name: str) -> Any:
        clock.advance(20.0)
        return load_cross_encoder(name)

    monkeypatch.setattr("stillroom.retrieval.reranker.load_cross_encoder", load_slowly)
    found = kb.search(QUERY)
    assert clock.monotonic() >= 20.0 and (found.num_reranked, found.rerank_seconds) == (11, 0.0)


# Errors


def test_other_models_are_refused(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "decoder", "Llama", num_hidden_layers=1)
    byte_tokenizer().save_pretrained(tmp_path / "decoder")
    cases = {
        str(tmp_path / "decoder"): "is a LlamaForCausalLM, a language model and not a cross-encoder",
        PACKAGED_MODEL: "is a BertModel, not a cross-encoder",
        str(random_cross_encoder(tmp_path / "labels", num_labels=3)): "gives 3 scores",
    }
    for model, message in cases.items():
        with pytest.raises(UnsupportedModelError, match=message):
            Reranker(model, SystemClock()).score(QUERY, TEXTS)


def test_missing_and_damaged_models_are_named_with_the_setting(tmp_path: Path, model: Path) -> None:
    damaged = random_cross_encoder(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"damaged")
    for name in (str(tmp_path / "nowhere"), "some/absent-model", str(damaged), str(tmp_path)):
        with pytest.raises(ModelNotFoundError, match=r"search\.reranker"):
            Reranker(name, SystemClock()).score(QUERY, TEXTS)


def test_scores_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    folder = random_cross_encoder(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "classifier.bias": torch.full_like(weights["classifier.bias"], torch.nan)}, folder / "w")
    (folder / "w").rename(folder / "model.safetensors")
    with pytest.raises(ModelError, match="NaN"):
        Reranker(str(folder), SystemClock()).score(QUERY, TEXTS)


def test_model_saved_by_sentence_transformers_is_read(tmp_path: Path, model: Path) -> None:
    loaded(model).save_pretrained(str(tmp_path / "saved"))
    config = tmp_path / "saved" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": None}))
    assert Reranker(str(tmp_path / "saved"), SystemClock()).score(QUERY, TEXTS[:2]) == pytest.approx(
        predicted(model, TEXTS[:2]), abs=1e-5
    )


def test_scores_of_models_without_an_activation_are_from_0_to_1(tmp_path: Path, model: Path) -> None:
    folder = random_cross_encoder(tmp_path / "identity")
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config.json").write_text(json.dumps(config))
    outputs = torch.tensor(predicted(folder, TEXTS))
    assert outputs.min() < 0
    assert Reranker(str(folder), SystemClock()).score(QUERY, TEXTS) == pytest.approx(
        outputs.sigmoid().tolist(), abs=1e-5
    )


def test_knowledge_base_without_a_reranker_says_which_setting_it_needs(open_kb: OpenKb) -> None:
    with pytest.raises(UsageError, match=r"search\.reranker"):
        open_kb().rerank(QUERY, TEXTS)
