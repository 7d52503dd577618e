"""`stillroom search`, `ask` and `explain` with a reranker."""

from pathlib import Path

import pytest

from stillroom.config.settings import SearchConfig, Speculation, SpeculationConfig, StillroomConfig
from stillroom.rag.stillroom import Stillroom
from tests.cli.harness import Run
from tests.fakes import random_cross_encoder
from tests.server.knowledge import QUESTION, write_knowledge

pytestmark = pytest.mark.microworld


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_cross_encoder(tmp_path_factory.mktemp("reranking") / "model")


@pytest.fixture(scope="module")
def kb(model: Path) -> Path:
    folder = model.parent / "kb"
    with Stillroom.open(folder) as stillroom:
        stillroom.add(write_knowledge(model.parent / "docs"))
    return folder


def test_commands_rank_by_the_reranker_and_say_so(
    run: Run, kb: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run("search", QUESTION, "--kb", kb, "--json").json
    monkeypatch.setenv("STILLROOM_SEARCH__RERANKER", str(model))
    found = run("search", QUESTION, "--kb", kb, "--json").json
    answer = run("ask", QUESTION, "--kb", kb, "--max-tokens", 4, "--json").json

    ids = [one["chunk_id"] for one in found["results"]]
    scores = [one["scores"]["reranker"] for one in found["results"]]
    assert scores == sorted(scores, reverse=True) == [one["score"] for one in found["results"]]
    assert set(ids) == {one["chunk_id"] for one in plain["results"]}
    assert (found["num_reranked"], plain["num_reranked"]) == (len(ids), 0)
    assert found["timing"]["rerank_seconds"] > 0 == plain["timing"]["rerank_seconds"]
    assert [one["chunk_id"] for one in answer["sources"]] == ids
    assert f"reranker {scores[0]:.4g}" in run("search", QUESTION, "--kb", kb).out
    assert f"reranker {scores[0]:.4f}" in run("explain", "--kb", kb).out


def test_missing_reranker_exits_2_and_names_the_setting(
    run: Run, kb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STILLROOM_SEARCH__RERANKER", str(tmp_path / "nowhere"))
    result = run("search", QUESTION, "--kb", kb)
    assert result.code == 2 and "check search.reranker" in result.err


@pytest.mark.slow
def test_speculation_with_a_reranker_changes_no_answer(kb: Path, model: Path) -> None:
    answers = {}
    modes: tuple[Speculation, ...] = ("off", "on")
    for mode in modes:
        config = StillroomConfig(
            search=SearchConfig(reranker=str(model)),
            speculation=SpeculationConfig(mode=mode),
        )
        with Stillroom.open(kb, config=config) as stillroom:
            answers[mode] = [stillroom.ask(question) for question in (QUESTION, "What did Cirik Prurs choose ?")]
    for off, on in zip(answers["off"], answers["on"], strict=True):
        assert (on.token_ids, on.text) == (off.token_ids, off.text)
        assert [one.chunk_id for one in on.sources] == [one.chunk_id for one in off.sources]
        assert all("reranker" in source.scores for source in on.sources)
    assert all(one.speculation.num_stages > 1 for one in answers["on"])
