"""JSON answers through the facade, with a random model, which writes no JSON on its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom.rag.answer import AskOptions
from stillroom.rag.stillroom import Stillroom
from tests.fakes import byte_tokenizer, random_checkpoint
from tests.server.knowledge import QUESTION, write_knowledge

pytestmark = pytest.mark.microworld

SCHEMA = {
    "type": "object",
    "properties": {"year": {"type": "integer", "minimum": 0, "maximum": 9999}, "bank": {"type": "boolean"}},
    "required": ["year", "bank"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stillroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder = tmp_path_factory.mktemp("json")
    random_checkpoint(folder / "model", "Llama", num_hidden_layers=2, eos_token_id=1, max_position_embeddings=4096)
    byte_tokenizer().save_pretrained(folder / "model")
    with Stillroom.open(folder / "kb", model=folder / "model") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        yield stillroom


def test_every_answer_follows_the_schema(stillroom: Stillroom) -> None:
    options = AskOptions(json_schema=SCHEMA, temperature=2.0, top_k=1, max_tokens=60, logprobs=1)
    answers = stillroom.ask_several(QUESTION, 3, options)
    for answer in answers:
        found = json.loads(answer.text)
        assert list(found) == ["year", "bank"] and isinstance(found["bank"], bool)
        assert answer.finish_reason == "stop"
        assert answer.logprobs and len(answer.logprobs) == len(answer.token_ids)
        assert "".join(score.text for score in answer.logprobs) == answer.text
    assert answers[0].text == stillroom.ask(QUESTION, options).text
    assert answers[0].reuse.num_cached_tokens == 0
    assert answers[1].reuse.num_cached_tokens == answers[1].reuse.num_prompt_tokens


def test_stop_string_ends_a_json_answer(stillroom: Stillroom) -> None:
    answer = stillroom.ask(QUESTION, AskOptions(json_schema=SCHEMA, stop=', "bank', top_k=1))
    assert json.loads(answer.text + "}").keys() == {"year"}


def test_model_that_cannot_spell_json_refuses_a_schema(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as bundled:
        bundled.add(write_knowledge(tmp_path / "docs"))
        with pytest.raises(UsageError, match="cannot write JSON"):
            bundled.ask(QUESTION, AskOptions(json_schema=SCHEMA))
        first, *_ = bundled.ask(QUESTION, AskOptions(hops=2, top_k=1)).hops
        assert first.answer, "it answers between hops instead of writing the next question as JSON"
        assert bundled.num_free_blocks == bundled.num_blocks
