"""`/v1/responses` of a real server: with the official `openai` client and a fake Stillroom, and with a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import ResponseOutputMessage, ResponseOutputText
from pydantic import BaseModel

from stillroom.errors import EngineError
from stillroom.rag.stillroom import Stillroom
from stillroom.server.schemas.responses import ResponseEvent
from tests.server import knowledge
from tests.server.fakes import NUM_BLOCKS, FakeStillroom, until
from tests.server.harness import serving

QUESTION = "How do I rotate keys?"
KINDS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 5,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
def openai_client(client: httpx.Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def text_part(response: Any) -> ResponseOutputText:
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    (part,) = message.content
    assert isinstance(part, ResponseOutputText)
    return part


def test_response_has_the_answer_its_usage_and_its_sources(openai_client: OpenAI) -> None:
    found = openai_client.responses.create(model="stillroom", input=QUESTION, metadata={"case": "7"}, store=False)

    assert (found.output_text, found.status, found.error, found.metadata) == (
        QUESTION,
        "completed",
        None,
        {"case": "7"},
    )
    assert found.usage and found.usage.input_tokens_details.cached_tokens == 40
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (100, 5, 105)
    assert (found.model, found.temperature, found.top_p) == ("fake-model", 0.0, 1.0)
    assert found.model_extra
    ours = found.model_extra["stillroom"]
    assert ours["sources"][0]["document"] == "docs/keys.md" and ours["timing"] and found.id.endswith(ours["request_id"])


def test_messages_instructions_and_options_reach_the_question(openai_client: OpenAI, stillroom: FakeStillroom) -> None:
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}}
    first = openai_client.responses.create(input="Who?", instructions="Be brief.")
    messages: Any = [
        {"role": "user", "content": "Who?"},
        *[one.model_dump() for one in first.output],  # as OpenAI's guide does it
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}], "type": "message"},
    ]
    form: Any = {"format": {"type": "json_schema", "name": "days", "schema": schema, "strict": True}}
    openai_client.responses.create(
        model="stillroom",
        instructions="Be brief.",
        input=messages,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=64,
        text=form,
        extra_body={"stillroom": {"top_k": 1}, "seed": 3},
    )

    question, options = stillroom.asked[-1]
    assert (question, options.system, options.top_k, options.seed) == (QUESTION, "Be brief.", 1, 3)
    assert [(one.question, one.answer) for one in options.history] == [("Who?", "Who?")]
    assert (options.temperature, options.top_p, options.max_tokens) == (0.5, 0.9, 64)
    assert options.json_schema == schema


def test_answer_that_is_cut_is_incomplete(openai_client: OpenAI) -> None:
    found = openai_client.responses.create(input=QUESTION, max_output_tokens=2)
    assert (found.output_text, found.status) == ("How do", "incomplete")
    assert found.incomplete_details and found.incomplete_details.reason == "max_output_tokens"
    *_, last = openai_client.responses.create(input=QUESTION, max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and last.response.status == "incomplete"


def test_stream_has_the_typed_events_in_order(openai_client: OpenAI) -> None:
    events = list(openai_client.responses.create(model="stillroom", input=QUESTION, stream=True))

    assert [event.type for event in events] == KINDS
    assert [event.sequence_number for event in events] == list(range(len(KINDS)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == QUESTION
    first, last = events[0], events[-1]
    assert first.type == "response.created" and last.type == "response.completed"
    assert first.response.model_extra and first.response.model_extra["stillroom"]["sources"]
    assert last.response.output_text == QUESTION and last.response.model_extra
    assert last.response.model_extra["stillroom"]["timing"] and last.response.usage
    assert last.response.id == first.response.id


def test_events_have_the_documented_type(client: httpx.Client) -> None:
    response = client.post("/v1/responses", json={"input": QUESTION, "stream": True})
    lines = [line for line in response.text.split("\n") if line]
    kinds = [line.removeprefix("event: ") for line in lines[::2]]
    found = [ResponseEvent.model_validate_json(line.removeprefix("data: ")) for line in lines[1::2]]
    assert kinds == [one.type for one in found] == KINDS and "[DONE]" not in response.text


def test_stream_helper_and_parse(openai_client: OpenAI, stillroom: FakeStillroom) -> None:
    class Days(BaseModel):
        days: int

    with openai_client.responses.stream(model="stillroom", input=QUESTION) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == QUESTION
    parsed = openai_client.responses.parse(input='{"days":30}', text_format=Days)
    assert parsed.output_parsed == Days(days=30)
    assert stillroom.asked[-1][1].json_schema == Days.model_json_schema() | {"additionalProperties": False}


def test_closing_a_stream_of_events_frees_its_blocks(openai_client: OpenAI, stillroom: FakeStillroom) -> None:
    stillroom.gate.clear()
    stream = openai_client.responses.create(input=QUESTION, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)


def test_error_in_a_stream_of_events_is_typed_and_raised(
    client: httpx.Client, openai_client: OpenAI, stillroom: FakeStillroom
) -> None:
    stillroom.fails_at, stillroom.failure = "rotate", EngineError("the step failed")
    with pytest.raises(openai.APIError, match="internal error"):
        list(openai_client.responses.create(input=QUESTION, stream=True))
    response = client.post("/v1/responses", json={"input": QUESTION, "stream": True})
    *_, last = [line for line in response.text.split("\n") if line]
    event = ResponseEvent.model_validate_json(last.removeprefix("data: "))
    assert (event.type, event.sequence_number) == ("error", 7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"store": True}, "store: true is not supported"),
        ({"background": True}, "background: true is not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: not supported, because no response is stored"),
        ({"conversation": "conv_1"}, "conversation: not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: not supported"),
        ({"modalities": ["audio"]}, "modalities: this route has no such field"),
        ({"include": ["message.output_text.logprobs"]}, "use /v1/chat/completions"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "an item of type 'function_call",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a part of type 'input_image'"),
        ({"input": []}, "input"),
        ({"input": " "}, "no question"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {str(one): "" for one in range(17)}}, "metadata"),
        ({"stillroom": {"topk": 3}}, "topk"),
    ],
)
def test_unsupported_fields_are_400_with_a_reason(any_client: httpx.Client, change: dict[str, Any], said: str) -> None:
    response = any_client.post("/v1/responses", json={"input": QUESTION} | change)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_fields_that_clients_send_by_default_are_accepted(any_client: httpx.Client) -> None:
    sent = {
        "store": False,
        "previous_response_id": None,
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "prompt_cache_key": "x",
        "reasoning": {"effort": "low"},
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": [{"type": "web_search"}],
        "tool_choice": "auto",
        "truncation": "disabled",
        "user": "anna",
    }
    body = any_client.post("/v1/responses", json={"input": QUESTION} | sent).json()
    assert (body["status"], body["text"], body["user"]) == ("completed", {"format": {"type": "text"}}, "anna")
    assert "no tools are called" in body["stillroom"]["warnings"][0]


def test_annotations_point_into_the_documents(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(knowledge.write_knowledge(tmp_path / "docs"))
        with serving(stillroom) as url, OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
            found = text_part(client.responses.create(input=knowledge.QUESTION))
            events = list(client.responses.create(input=knowledge.QUESTION, stream=True))

    (annotation,) = found.annotations
    assert annotation.type == "url_citation" and annotation.url.endswith("#L5")
    assert found.text == f"{found.text[annotation.start_index : annotation.end_index]} [1]"
    assert knowledge.ANSWER in found.text
    added: list[Any] = [event for event in events if event.type == "response.output_text.annotation.added"]
    assert [(event.annotation_index, event.annotation.model_dump()) for event in added] == [
        (0, annotation.model_dump())
    ]
    last = events[-1]
    assert last.type == "response.completed" and text_part(last.response) == found


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
        {"type": "json_schema", "name": "n"},
        {"type": "json_object", "schema": {"type": "integer"}},
    ],
)
def test_missing_and_misplaced_schemas_are_refused(any_client: httpx.Client, form: dict[str, Any]) -> None:
    response = any_client.post("/v1/responses", json={"input": "a", "text": {"format": form}})
    assert response.status_code == 400
    assert "belongs beside the type" in response.json()["error"]["message"]


@pytest.mark.parametrize("given", ["", " ", [{"role": "assistant", "content": "a"}]])
def test_input_without_a_question_is_named(any_client: httpx.Client, given: object) -> None:
    response = any_client.post("/v1/responses", json={"input": given})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("input: there is no question")
