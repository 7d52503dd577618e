"""`/v1/chat/completions` of a real server with a fake Stillroom: options, answers, streams."""

from typing import Any

import httpx
import pytest

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


def test_minus_one_is_valid_for_limits_and_seed_over_http(client: httpx.Client, stillroom: FakeStillroom) -> None:
    change = {"max_tokens": -1, "top_k": -1, "seed": -1}
    assert client.post("/v1/chat/completions", json=QUESTION | change).status_code == 200
    options = stillroom.asked[-1][1]
    assert (options.max_tokens, options.sample_top_k, options.seed) == (-1, -1, -1)
