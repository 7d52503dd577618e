"""Questions in several hops through the facade: the bundled reader, a decoder, a model that is held to JSON, and a
server elsewhere."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.config.settings import EngineConfig, RuntimeConfig, SearchConfig, StillroomConfig
from stillroom.errors import DeadlineExceededError, UsageError
from stillroom.rag import hop_reading
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.hops import Hop, HopEnd
from stillroom.rag.stillroom import Stillroom
from tests.fakes import byte_tokenizer, random_checkpoint
from tests.server.fakes import until
from tests.server.harness import serving
from tests.server.knowledge import QUESTION, write_knowledge

TEXTS = {
    "song": "Night Train is a song that the band The Lamps recorded in 1984.",
    "band": "Mara Visser leads The Lamps and plays the organ.",
    "cheese": "Gouda ripens on shelves of pine for at least four weeks.",
    "ferry": "The ferry to Texel leaves every hour and takes twenty minutes.",
}
TWO_FACTS = "Who leads the band that recorded Night Train?"
ENDLESS = AskOptions(max_tokens=1500, min_tokens=1400, temperature=50.0, seed=1, hops=3)
"""Every reading is long."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder = tmp_path_factory.mktemp("hops")
    (folder / "docs").mkdir()
    for name, text in TEXTS.items():
        (folder / "docs" / f"{name}.md").write_text(text, encoding="utf-8")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(folder / "docs")
        yield stillroom


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    random_checkpoint(folder, "Llama", num_hidden_layers=2, eos_token_id=1, max_position_embeddings=4096)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder = tmp_path_factory.mktemp("hops")
    runtime, search = RuntimeConfig(model=str(checkpoint)), SearchConfig(hop_question="answer")
    with Stillroom.open(folder / "kb", config=StillroomConfig(runtime=runtime, search=search)) as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        yield stillroom
        until(lambda: stillroom.num_free_blocks == stillroom.num_blocks > 0)


def files(answer: Answer) -> list[str]:
    return [Path(source.document).stem for source in answer.sources]


def test_second_hop_finds_what_one_search_does_not(reader: Stillroom) -> None:
    once = reader.ask(TWO_FACTS, AskOptions(top_k=1))
    assert (files(once), once.hops) == (["song"], ())

    seen: list[Hop] = []
    answer = reader.ask(TWO_FACTS, AskOptions(top_k=1, hops=2, on_hop=seen.append))
    assert files(answer) == ["song", "band"]
    assert answer.highlight is not None and answer.text[slice(*answer.highlight)] == "Mara Visser"
    first, second = answer.hops
    assert (first.question, first.answer, first.end) == (TWO_FACTS, "The Lamps", None)
    assert (second.question, second.answer, second.end) == ("Who leads The Lamps?", None, HopEnd.LIMIT)
    assert tuple(seen) == answer.hops and {hop.request_id for hop in seen} == {answer.request_id}
    record = reader.records.get(answer.request_id)
    assert [hop["question"] for hop in record["hops"]] == [first.question, second.question]
    assert record["question"] == TWO_FACTS


def test_answer_of_an_earlier_hop_is_kept_if_the_last_one_has_none(reader: Stillroom) -> None:
    """One search finds both documents; what is left of the question then has no answer."""
    answer = reader.ask(TWO_FACTS, AskOptions(hops=2))
    assert answer.text == reader.ask(TWO_FACTS).text and "Mara Visser leads The Lamps" in answer.text
    assert len(answer.hops) == 2 and answer.hops[1].question != TWO_FACTS


def test_one_hop_is_a_question_without_hops(reader: Stillroom) -> None:
    plain, one = (reader.ask(TWO_FACTS, AskOptions(hops=hops)) for hops in (None, 1))
    assert (one.text, one.sources, one.hops) == (plain.text, plain.sources, ())


def test_setting_is_the_default_of_a_question(reader: Stillroom) -> None:
    config = replace(reader.config, search=SearchConfig(hops=2, top_k=1))
    with Stillroom.open(reader._kb.path, config=config) as stillroom:
        assert len(stillroom.ask(TWO_FACTS).hops) == 2
        assert stillroom.ask(TWO_FACTS, AskOptions(hops=1)).hops == ()


@pytest.mark.parametrize("hops", [0, 6])
def test_number_out_of_range_is_refused(reader: Stillroom, hops: int) -> None:
    with pytest.raises(UsageError, match=f"hops={hops}; it must be 1 to 5"):
        reader.ask(TWO_FACTS, AskOptions(hops=hops))


def test_reader_refuses_to_write_the_next_question(reader: Stillroom) -> None:
    config = replace(reader.config, search=SearchConfig(hop_question="model"))
    with Stillroom.open(reader._kb.path, config=config) as stillroom:
        with pytest.raises(UsageError, match="search.hop_question = 'model' needs a model that can be held to JSON"):
            stillroom.ask(TWO_FACTS, AskOptions(hops=2))
        assert stillroom.ask(TWO_FACTS).hops == ()


def test_decoder_reuses_the_kv_of_earlier_hops(decoder: Stillroom) -> None:
    answer = decoder.ask(QUESTION, AskOptions(hops=3, top_k=1, max_tokens=8))
    first, second, *_ = answer.hops
    assert first.answer and second.question == f"{QUESTION}\n{first.answer}"
    assert first.num_cached_tokens == 0 < first.num_prompt_tokens and first.num_generated_tokens > 0
    assert answer.reuse.num_cached_tokens > 0


def test_deadline_holds_over_all_hops(decoder: Stillroom) -> None:
    late = replace(ENDLESS, deadline_seconds=0.3)
    with pytest.raises(DeadlineExceededError):
        decoder.ask(QUESTION, late)
    with pytest.raises(DeadlineExceededError):
        asyncio.run(decoder.astream(QUESTION, late))


def test_cancelling_the_caller_cancels_the_hop_that_is_read(decoder: Stillroom) -> None:
    seen: list[Hop] = []

    async def leave() -> None:
        asking = asyncio.create_task(decoder.astream(QUESTION, replace(ENDLESS, on_hop=seen.append)))
        await asyncio.to_thread(until, lambda: decoder.num_free_blocks < decoder.num_blocks)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(leave())
    until(lambda: decoder.num_free_blocks == decoder.num_blocks)
    assert seen == []


def test_model_writes_the_next_question_as_json(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def next_question(text: str) -> str:
        written.append(text)
        return "When was Yunder Bank founded?"

    monkeypatch.setattr(hop_reading, "next_question_of", next_question)
    with Stillroom.open(tmp_path / "kb", model=checkpoint) as stillroom:
        stillroom.add(write_knowledge(tmp_path / "docs"))
        answer = stillroom.ask(QUESTION, AskOptions(hops=3, top_k=1, max_tokens=4, temperature=5.0))
    assert [hop.question for hop in answer.hops] == [
        QUESTION,
        "When was Yunder Bank founded?",
        "When was Yunder Bank founded?",
    ]
    assert [hop.end for hop in answer.hops] == [None, None, HopEnd.NOTHING_NEW]
    assert len(written) == 2
    found = [one.chunk_id for hop in answer.hops for one in hop.sources]
    assert [source.chunk_id for source in answer.sources] == found and len(found) == 2
    assert all(text.startswith('{"question": "') or json.loads(text) == {"done": True} for text in written)
    assert 0 < answer.hops[1].num_cached_tokens < answer.reuse.num_cached_tokens


@pytest.mark.slow
def test_server_elsewhere_answers_between_hops(decoder: Stillroom) -> None:
    with serving(decoder) as address:
        engine = EngineConfig(kind="openai", base_url=address, prompt="chat")
        with Stillroom.open(decoder._kb.path, config=StillroomConfig(engine=engine)) as away:
            answer = away.ask(QUESTION, AskOptions(hops=2, top_k=1, max_tokens=8))
    assert len(answer.hops) == 2 and answer.hops[0].answer


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ('{"question": " Who founded it? "}', "Who founded it?"),
        ('{"question": "  "}', None),
        ('{"done": true}', None),
        ('{"question": "Who fou', None),
        ('["question"]', None),
        ('{"question": 3}', None),
        ("", None),
    ],
)
def test_next_question_is_read_from_json(text: str, question: str | None) -> None:
    assert hop_reading.next_question_of(text) == question


def test_next_question_has_the_whole_name_of_which_the_reader_marked_a_part(tmp_path: Path) -> None:
    (tmp_path / "kettle.md").write_text("The Zephyr kettle is made by Brandt Works in Ulm.", encoding="utf-8")
    (tmp_path / "founder.md").write_text("Ilse Brandt founded Brandt Works in 1931 and led it.", encoding="utf-8")
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(tmp_path / "kettle.md", tmp_path / "founder.md")
        asked = AskOptions(hops=2, top_k=1)
        answer = stillroom.ask("Who founded the company that makes the Zephyr kettle?", asked)
    assert answer.hops[1].question == "Who founded the company that makes Brandt Works?"
    assert answer.text.startswith("Ilse Brandt founded Brandt Works")
