"""Reuse of KV through the facade: within a process, in the next one, and at other positions."""

import dataclasses
from pathlib import Path

import pytest

from stillroom.config.settings import ReuseConfig, SpeculationConfig, StillroomConfig, TraceConfig
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import KV_FOLDER
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.telemetry.trace import TRACE_FILE, TraceLog
from tests.kvstore.nodes import record, sealed
from tests.rag.countries import ALWAYS, ask

pytestmark = pytest.mark.microworld


def test_second_question_and_next_process_reuse_exact_kv(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb", config=ALWAYS) as stillroom:
        stillroom.add(docs)
        first, second = ask(stillroom), ask(stillroom)
        metrics = stillroom.metrics.render().decode()
    with Stillroom.open(tmp_path / "kb", config=ALWAYS) as stillroom:
        third = ask(stillroom)
    off = dataclasses.replace(ALWAYS, reuse=ReuseConfig(mode="off"))
    with Stillroom.open(tmp_path / "kb", config=off) as stillroom:
        fourth = ask(stillroom)

    assert len({answer.token_ids for answer in (first, second, third, fourth)}) == 1
    assert first.reuse.num_cached_tokens == 0
    question = first.reuse.segments[-1].num_tokens
    assert second.reuse.num_device_tokens == third.reuse.num_disk_tokens == first.reuse.num_prompt_tokens - question
    assert {segment.reason for segment in first.reuse.segments[:-1]} == {"never seen"}
    assert {segment.reason for segment in fourth.reuse.segments} == {"reuse is off"}
    assert 'stillroom_kv_cache_verify_failures_total{reason="checksum",tier="disk"} 0.0' in metrics
    assert f'stillroom_kv_cache_hit_tokens_total{{tier="device"}} {float(second.reuse.num_device_tokens)}' in metrics


def test_keep_zero_removes_earlier_records_with_the_first_question(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(docs)
        ask(stillroom)
    with Stillroom.open(tmp_path / "kb", config=StillroomConfig(trace=TraceConfig(keep=0))) as stillroom:
        assert len(stillroom.records.recent()) == 1, "nothing is removed before the first question"
        ask(stillroom)
        assert stillroom.records.recent() == []
    assert b"Ardun" not in (tmp_path / "kb" / TRACE_FILE).read_bytes()


def test_every_answer_can_be_explained_later(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(docs)
        answers = [ask(stillroom), ask(stillroom, "What is the river of Corvia ?")]
    log = TraceLog(tmp_path / "kb" / TRACE_FILE, keep=0)
    for answer, question in zip(
        answers, ("What is the capital of Ardun ?", "What is the river of Corvia ?"), strict=True
    ):
        found = log.get(answer.request_id)
        assert found is not None
        trace, timing = found[2], answer.timing
        assert timing.queue_seconds is not None and timing.load_seconds is not None
        assert timing.prefill_seconds is not None
        phases = (timing.retrieval_seconds, timing.queue_seconds, timing.load_seconds, timing.prefill_seconds)
        assert min(phases) >= 0.0 and sum(phases) == pytest.approx(timing.ttft_seconds)
        assert (trace["question"], trace["text"]) == (question, answer.text)
        assert [segment["num_tokens"] for segment in trace["reuse"]["segments"]] == [
            segment.num_tokens for segment in answer.reuse.segments
        ]
        assert [source["document"] for source in trace["sources"]] == [source.document for source in answer.sources]
    log.close()


@pytest.mark.parametrize("is_loaded", [True, False])
def test_removing_a_document_drops_its_kv(docs: Path, tmp_path: Path, is_loaded: bool) -> None:
    """With and without a loaded model in the process that removes the document."""
    kv = tmp_path / "kb" / KV_FOLDER
    with Stillroom.open(tmp_path / "kb", config=ALWAYS) as stillroom:
        stillroom.add(docs)
        first = ask(stillroom)
        order = [Path(source.document).stem for source in first.sources]
        if is_loaded:
            stillroom.remove(str(docs / f"{order[1]}.txt"))
    if not is_loaded:
        with Stillroom.open(tmp_path / "kb") as stillroom:
            stillroom.remove(str(docs / f"{order[1]}.txt"))

    assert len(list(kv.rglob("*.kv"))) == 2, "the system prompt and the document before it"

    with Stillroom.open(tmp_path / "kb", config=ALWAYS) as stillroom:
        again = ask(stillroom)
        assert [Path(source.document).stem for source in again.sources] == [order[0], order[2]]
        assert [segment.reason for segment in again.reuse.segments[:2]] == ["hit", "hit"]
        assert again.reuse.segments[2].source == "computed"


def test_further_samples_compute_no_prompt(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(docs)
        answers = stillroom.ask_several("What is the capital of Ardun ?", 3)
        for answer in answers[1:]:
            assert answer.reuse.num_cached_tokens == answer.reuse.num_prompt_tokens
            assert {segment.reason for segment in answer.reuse.segments} == {"computed by another sample"}
        assert stillroom.num_free_blocks == stillroom.num_blocks, "cached blocks that no request uses count as free"


def test_document_is_reused_at_another_position_if_configured(tmp_path: Path) -> None:
    """Uses words of the bundled model's vocabulary; all other words are one token to it."""
    docs = tmp_path / "people"
    docs.mkdir()
    (docs / "pis.txt").write_text("Pis Jurs later moved to Ranholm . Pis Jurs studied grammar .")
    (docs / "kala.txt").write_text("Kala Broster was born in Glanwick . By trade she was a clerk .")
    (docs / "mulo.txt").write_text("Mulo Trallow bought the ship Pisent . Mulo Trallow was born in Sanwick .")
    anywhere = ReuseConfig(mode="anywhere", load="always", recompute_ratio=0.2, audit_share=1.0)
    alone = SpeculationConfig(mode="off")  # speculative prompts would be counted too
    with Stillroom.open(tmp_path / "kb", config=StillroomConfig(reuse=anywhere, speculation=alone)) as stillroom:
        stillroom.add(docs)
        first = ask(stillroom, "Where did Pis Jurs move later ?")
        other = ask(stillroom, "Where was Kala Broster born ?")
        metrics = stillroom.metrics.render().decode()
    assert [source.document for source in first.sources] != [source.document for source in other.sources]
    exact = StillroomConfig(reuse=ReuseConfig(mode="off"))
    with Stillroom.open(tmp_path / "kb", config=exact) as stillroom:
        assert ask(stillroom, "Where was Kala Broster born ?").text == other.text == "Glanwick"

    placed = [segment for segment in other.reuse.segments if segment.reason == "placed"]
    assert placed and other.reuse.num_recomputed_tokens == sum(segment.num_recomputed for segment in placed)
    num_placed = sum(segment.num_tokens for segment in placed)
    assert other.reuse.num_recomputed_tokens == -(-num_placed // 5) and other.reuse.recompute_ratio == 0.2
    assert f"stillroom_kv_cache_placed_tokens_total {float(num_placed)}" in metrics
    assert f"stillroom_kv_cache_repaired_tokens_total {float(other.reuse.num_recomputed_tokens)}" in metrics
    assert "stillroom_recompute_ratio 0.2" in metrics
    log = TraceLog(tmp_path / "kb" / TRACE_FILE, keep=0)
    found = log.get(other.request_id)
    log.close()
    assert found is not None and found[2]["reuse"]["num_recomputed_tokens"] == other.reuse.num_recomputed_tokens


def placed(answer: Answer) -> set[str | None]:
    return {segment.chunk_id for segment in answer.reuse.segments if segment.reason == "placed"}


def test_filter_applies_to_all_that_stored_kv_has_seen_at_the_time_of_the_question(tmp_path: Path) -> None:
    """Metadata may change after the KV was computed, in both directions."""
    docs = tmp_path / "people"
    docs.mkdir()
    (docs / "pis.txt").write_text("Pis Jurs later moved to Ranholm . Pis Jurs studied grammar .")
    (docs / "kala.txt").write_text("Kala Broster was born in Glanwick . By trade she was a clerk .")
    (docs / "mulo.txt").write_text("Mulo Trallow bought the ship Pisent . Mulo Trallow was born in Sanwick .")
    anywhere = ReuseConfig(mode="anywhere", load="always", recompute_ratio=0.0, audit_share=0.0)
    config = StillroomConfig(reuse=anywhere, speculation=SpeculationConfig(mode="off"))
    not_hr = AskOptions(where="team != hr")
    with Stillroom.open(tmp_path / "kb", config=config) as stillroom:
        stillroom.add(docs)
        first = ask(stillroom, "Where did Pis Jurs move later ?")
        assert Path(first.sources[0].document).stem == "pis", "the others are computed after it"
        stillroom.add(docs / "pis.txt", metadata={"team": "hr"})
        filtered = stillroom.ask("Where was Kala Broster born ?", not_hr)
        assert {Path(source.document).stem for source in filtered.sources} == {"kala", "mulo"}
        assert filtered.text == "Glanwick" and not placed(filtered)
        stillroom.add(docs / "pis.txt", metadata={"team": None})
        assert placed(stillroom.ask("Which ship did Mulo Trallow buy ?", not_hr))


@pytest.mark.parametrize("is_loaded", [True, False])
def test_removing_a_document_drops_its_kv_of_other_models(docs: Path, tmp_path: Path, is_loaded: bool) -> None:
    with Stillroom.open(tmp_path / "kb", config=ALWAYS) as stillroom:
        stillroom.add(docs)
        chunk_ids = [stillroom.chunks_of(document.document_id)[0].chunk_id for document in stillroom.documents()]
        if is_loaded:
            stillroom.warm_up()
        other = DiskStore(tmp_path / "kb" / KV_FOLDER, b"other model" + bytes(21))
        for number, chunk_id in enumerate(chunk_ids):
            assert other.write(record(number, chunk=chunk_id), *sealed(number))
        stillroom.remove(str(docs / "corvia.txt"))
        assert len(list(other.folder.rglob("*.kv"))) == len(chunk_ids) - 1
        other.close()
