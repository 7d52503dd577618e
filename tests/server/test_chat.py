"""`/v1/chat/completions` of a real server with a fake Stillroom."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from stillroom.config.settings import ServerConfig
from stillroom.core.ids import public_id
from stillroom.rag.answer import Citation, Source, Support
from stillroom.server.routes.chat import events_link_to
from stillroom.server.routes.source_events import source_event
from stillroom.server.schemas.requests import ChatCompletionRequest
from tests.server.fakes import NUM_BLOCKS, FakeStillroom, until
from tests.server.harness import DETAILS, QUESTION, events


def test_answer_has_openais_fields_and_the_extension(client: httpx.Client, stillroom: FakeStillroom) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION)

    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake-model"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "How do I rotate keys?", "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "total_tokens": 105,
        "prompt_tokens_details": {"cached_tokens": 40},
    }
    ours = body["stillroom"]
    assert body["id"] == f"chatcmpl-{ours['request_id']}"
    assert set(ours) == {"request_id", "sources", *DETAILS}
    assert ours["sources"][0]["document"] == "docs/keys.md"
    assert ours["sources"][0]["position"] == 1
    assert ours["timing"]["ttft_seconds"] == 0.02
    assert (ours["reuse"]["num_prompt_tokens"], ours["reuse"]["num_cached_tokens"]) == (100, 40)
    assert stillroom.num_free_blocks == NUM_BLOCKS


def test_options_of_the_request_reach_the_stillroom(client: httpx.Client, stillroom: FakeStillroom) -> None:
    client.post(
        "/v1/chat/completions",
        json=QUESTION
        | {
            "model": "fake-model",
            "max_tokens": 9,
            "max_completion_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "priority": -1,
            "deadline_seconds": 2.5,
            "logit_bias": {"5": -100},
            "stop": ["\n", "END"],
            "logprobs": True,
            "top_logprobs": 2,
            "stillroom": {"top_k": 3, "mode": "sparse"},
        },
    )

    [(question, options)] = stillroom.asked
    assert question == "How do I rotate keys?"
    assert (options.max_tokens, options.temperature, options.top_p, options.seed) == (2, 0.5, 0.9, 7)
    assert (options.top_k, options.mode) == (3, "sparse")
    assert (options.presence_penalty, options.frequency_penalty, options.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (options.sample_top_k, options.min_p, options.min_tokens) == (40, 0.05, 2)
    assert (options.priority, options.deadline_seconds) == (-1, 2.5)
    assert (options.logit_bias, options.stop, options.logprobs) == ({5: -100}, ["\n", "END"], 2)


def test_absent_options_come_from_the_configuration(client: httpx.Client, stillroom: FakeStillroom) -> None:
    client.post("/v1/chat/completions", json=QUESTION | {"temperature": None})

    [(_, options)] = stillroom.asked
    assert (options.max_tokens, options.temperature, options.top_p, options.seed) == (None,) * 4


def test_question_is_the_last_user_message(client: httpx.Client, stillroom: FakeStillroom) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "second"}, {"type": "text", "text": "part"}]},
        {"role": "assistant", "content": "prefilled"},
    ]

    client.post("/v1/chat/completions", json={"messages": messages})

    assert [question for question, _ in stillroom.asked] == ["second\npart"]


def test_stream_is_openai_chunks_with_sources_first_and_timing_last(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION | {"stream": True, "max_tokens": 3})

    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    first, last = chunks[0], chunks[-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert set(first["stillroom"]) == {"request_id", "sources"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "How do I"
    assert last["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert set(last["stillroom"]) == {"request_id", *DETAILS}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_stream_with_usage_ends_with_a_chunk_without_choices(client: httpx.Client) -> None:
    request = QUESTION | {"stream": True, "stream_options": {"include_usage": True}}

    *_, usage, done = events(client.post("/v1/chat/completions", json=request))

    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 40}


def test_log_probabilities_have_openais_form(client: httpx.Client) -> None:
    request = QUESTION | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}

    whole = client.post("/v1/chat/completions", json=request).json()
    *chunks, _ = events(client.post("/v1/chat/completions", json=request | {"stream": True}))

    [choice] = whole["choices"]
    assert choice["logprobs"]["content"] == [
        {
            "token": word,
            "logprob": -0.5,
            "bytes": list(word.encode()),
            "top_logprobs": [
                {"token": "\u00e4", "logprob": -0.25, "bytes": [195, 164]},
                {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]},
            ],
        }
        for word in ("How", "do")
    ]
    streamed = [chunk["choices"][0].get("logprobs", {"content": []})["content"] for chunk in chunks]
    assert [len(content) for content in streamed] == [0, 1, 1, 0]
    assert sum(streamed, []) == choice["logprobs"]["content"]


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}, {"type": "integer"}),
        ({"type": "json_schema", "json_schema": {"name": "anything", "schema": {}}}, {}),
    ],
)
def test_response_formats(
    client: httpx.Client, stillroom: FakeStillroom, response_format: dict[str, Any], schema: dict[str, Any] | None
) -> None:
    client.post("/v1/chat/completions", json=QUESTION | {"response_format": response_format})

    assert stillroom.asked[0][1].json_schema == schema


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "schema": {"type": "integer"}},
        {"type": "json_object", "schema": {"type": "integer"}},
        {"type": "text", "json_schema": {"schema": {"type": "integer"}}},
        {"json_schema": {"schema": {"type": "integer"}}},
    ],
)
def test_missing_and_misplaced_schemas_are_refused(client: httpx.Client, response_format: dict[str, Any]) -> None:
    for path, question in (("/v1/chat/completions", QUESTION), ("/v1/completions", {"prompt": "a"})):
        response = client.post(path, json=question | {"response_format": response_format})
        assert response.status_code == 400
        assert "belongs in json_schema.schema" in response.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["any", 5, True, ["auto"]])
def test_unknown_tool_choices_are_refused(client: httpx.Client, choice: object) -> None:
    for path, question in (("/v1/chat/completions", QUESTION), ("/v1/responses", {"input": "a"})):
        response = client.post(path, json=question | {"tool_choice": choice})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tool_choice" and '"auto", "none", "required"' in error["message"]


def test_top_logprobs_needs_logprobs(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION | {"top_logprobs": 2})

    assert response.status_code == 400
    assert "top_logprobs needs logprobs" in response.json()["error"]["message"]


def test_several_answers_are_choices_and_the_prompt_is_counted_once(client: httpx.Client) -> None:
    body = client.post("/v1/chat/completions", json=QUESTION | {"n": 3}).json()

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"How do I rotate keys?"}
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (100, 15)


def test_several_answers_in_one_stream(client: httpx.Client) -> None:
    request = QUESTION | {"n": 2, "stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}

    *chunks, usage, done = events(client.post("/v1/chat/completions", json=request))

    assert done == "[DONE]" and usage["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "How do I"
        assert [choice["finish_reason"] for choice in mine] == [None] * 4 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_failure_of_one_of_several_answers_ends_the_stream(client: httpx.Client, stillroom: FakeStillroom) -> None:
    stillroom.fails_at = "rotate"

    *_, error = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True, "n": 3}))

    assert error["error"]["message"] == "internal error; the server's log has the details"
    until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)


def test_failure_in_the_middle_of_a_stream_is_an_error_event(client: httpx.Client, stillroom: FakeStillroom) -> None:
    stillroom.fails_at = "rotate"

    *chunks, error = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True}))

    assert chunks[-1]["choices"][0]["delta"] == {"content": " I"}
    assert error == {
        "error": {
            "message": "internal error; the server's log has the details",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert stillroom.num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("is_streamed", [False, True])
def test_question_without_documents_is_404(any_client: httpx.Client, is_streamed: bool) -> None:
    change = {"stream": is_streamed, "stillroom": {"where": "team = nothing"}}
    response = any_client.post("/v1/chat/completions", json=QUESTION | change)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "nothing_found")


def test_minus_one_is_valid_for_limits_and_seed_over_http(client: httpx.Client, stillroom: FakeStillroom) -> None:
    change = {"max_tokens": -1, "top_k": -1, "seed": -1}
    assert client.post("/v1/chat/completions", json=QUESTION | change).status_code == 200
    options = stillroom.asked[-1][1]
    assert (options.max_tokens, options.sample_top_k, options.seed) == (-1, -1, -1)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": -2}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word.[key]"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stillroom": {"top_k": 0}}, "stillroom.top_k"),
        ({"stillroom": {"mode": "magic"}}, "stillroom.mode"),
        ({"stillroom": {"topk": 3}}, "stillroom.topk"),
    ],
)
def test_invalid_request_is_400_and_names_the_field(
    any_client: httpx.Client, change: dict[str, Any], param: str
) -> None:
    response = any_client.post("/v1/chat/completions", json=QUESTION | change)

    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "no question"}],
        [{"role": "user", "content": "  "}],
        [{"role": "user", "content": []}],
    ],
)
def test_messages_without_a_question_are_400(any_client: httpx.Client, messages: list[dict[str, Any]]) -> None:
    response = any_client.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 400
    assert "no question" in response.json()["error"]["message"]


def test_images_are_refused_with_a_clear_message(any_client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    response = any_client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages.0.content")
    assert "'image_url'" in error["message"] and "text parts only" in error["message"]


def _cited(source: int, support: Support, lines: tuple[int, int], pages: tuple[int, int]) -> Citation:
    document = "/srv/hand book/keys.md" if source else ""
    return Citation(source, document, "c1", "Keys", *lines, *pages, "Keys", 0, 4, 0, 6, True, support)


def test_citations_are_in_the_extension_and_annotations_in_openais_form(
    client: httpx.Client, stillroom: FakeStillroom
) -> None:
    stillroom.citations = (
        _cited(1, Support.SUPPORTED, (10, 14), (0, 0)),
        _cited(1, Support.PARTLY, (0, 0), (3, 4)),
        _cited(1, Support.UNSUPPORTED, (3, 3), (0, 0)),
        _cited(0, Support.UNSUPPORTED, (0, 0), (0, 0)),
    )
    body = client.post("/v1/chat/completions", json=QUESTION).json()

    shown = public_id("/srv/hand book/keys.md")
    assert [one["document"] for one in body["stillroom"]["citations"]] == [shown, shown, shown, ""]
    path = f"/v1/documents/{shown.replace(' ', '%20')}/content"
    assert body["choices"][0]["message"]["annotations"] == [
        {
            "type": "url_citation",
            "url_citation": {"start_index": 0, "end_index": 6, "title": "Keys", "url": f"{path}{place}"},
        }
        for place in ("?highlight=L10-L14#L10-L14", "#page=3")
    ]
    *_, last, _ = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True}))
    assert last["choices"][0]["delta"] == {"annotations": body["choices"][0]["message"]["annotations"]}
    assert last["stillroom"]["citations"] == body["stillroom"]["citations"]


def test_sources_are_sent_as_events_that_open_webui_shows(client: httpx.Client, stillroom: FakeStillroom) -> None:
    """Before the text, in order, instead of annotations; ids are no links, and no name begins with http."""
    stillroom.citations = (_cited(1, Support.SUPPORTED, (10, 14), (0, 0)),)
    asked = QUESTION | {"stream": True, "n": 2, "stillroom": {"source_events": True}}
    first, second, *chunks = events(client.post("/v1/chat/completions", json=asked))[:-1]

    assert "event" not in first and "event" not in second
    sources = first["stillroom"]["sources"]
    assert sources and len([one for one in chunks if "event" in one]) == len(sources)
    for source, chunk in zip(sources, chunks, strict=False):
        assert chunk["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
        event = chunk["event"]
        assert event["type"] == "source"
        found = event["data"]
        identity = f"{source['document']}#{source['chunk_id']}"
        assert found["document"] == [source["text"]] and found["source"]["id"] == identity
        assert found["metadata"][0]["source"] == identity
        assert found["source"]["url"].startswith(f"{client.base_url}/v1/documents/")
    assert not any("annotations" in one["choices"][0]["delta"] for one in chunks)
    plain = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True}))[:-1]
    assert not any("event" in one for one in plain) and "annotations" in plain[-1]["choices"][0]["delta"]


def test_source_events_name_lines_and_pages() -> None:
    source = Source("docs/http.md", "c1", "text", 1.0, {}, 1, "HTTP", 3, 9)
    event = source_event(source, "https://answers.example.org/")["data"]
    link = "https://answers.example.org/v1/documents/docs/http.md/content?highlight=L3-L9#L3-L9"
    assert event["source"] == {"id": "docs/http.md#c1", "name": "./http.md:3-9", "url": link}
    page = source_event(replace(source, document="a b.pdf", start_line=0, end_line=0, start_page=3), "http://x")["data"]
    assert page["source"]["url"] == "http://x/v1/documents/a%20b.pdf/content#page=3"
    assert page["metadata"] == [{"source": "a b.pdf#c1", "name": "a b.pdf", "page": 2}]


@pytest.mark.parametrize(("setting", "wanted"), [(True, None), (False, True), (True, False)])
def test_a_request_overrides_the_setting_of_source_events(setting: bool, wanted: bool | None) -> None:
    body = ChatCompletionRequest.model_validate({**QUESTION, "stillroom": {"source_events": wanted}})
    config = ServerConfig(source_events=setting, public_url="https://answers.example.org")
    found = [events_link_to(body, one, "http://127.0.0.1:1/") for one in (config, replace(config, public_url=""))]
    assert found == ([None, None] if wanted is False else [config.public_url, "http://127.0.0.1:1/"])


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("fields", [{"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"}, {"functions": [{}]}])
def test_tools_are_ignored_with_a_warning(client: httpx.Client, fields: dict[str, Any]) -> None:
    whole = client.post("/v1/chat/completions", json=QUESTION | fields).json()
    *_, last, _ = events(client.post("/v1/chat/completions", json=QUESTION | fields | {"stream": True}))
    for ours in (whole["stillroom"], last["stillroom"]):
        assert any("no tools are called" in warning for warning in ours["warnings"])
    plain = client.post("/v1/chat/completions", json=QUESTION | {"tools": []}).json()
    assert not any("tools" in warning for warning in plain["stillroom"]["warnings"])


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": TOOL}, {"function_call": {"name": "weather"}}]
)
def test_a_required_tool_call_is_refused(client: httpx.Client, fields: dict[str, Any]) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION | {"tools": [TOOL]} | fields)
    assert response.status_code == 400
    assert "no tools are called here" in response.json()["error"]["message"]
