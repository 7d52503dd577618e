"""`/v1/completions` of a real server with a fake Stillroom."""

from typing import Any

import httpx
import pytest

from tests.server.fakes import NUM_BLOCKS, FakeStillroom, until
from tests.server.harness import DETAILS, events

PROMPT = {"prompt": "keys are rotated twice"}


def post(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json=PROMPT | fields)


def test_prompt_is_continued_as_given(client: httpx.Client, stillroom: FakeStillroom) -> None:
    body = post(client, max_tokens=2).json()

    assert (body["object"], body["model"]) == ("text_completion", "fake-model")
    assert body["choices"] == [{"index": 0, "text": "keys are", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 40}
    assert body["id"] == f"cmpl-{body['stillroom']['request_id']}"
    assert set(body["stillroom"]) == {"request_id", "sources", *DETAILS}
    assert stillroom.num_free_blocks == NUM_BLOCKS


def test_completion_options_equal_chat_options(client: httpx.Client, stillroom: FakeStillroom) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    post(client, temperature=0.5, seed=3, stop="END", logit_bias={"7": 1}, response_format=schema, logprobs=2)

    [(_, options)] = stillroom.asked
    assert (options.temperature, options.seed, options.stop, options.logprobs) == (0.5, 3, ["END"], 2)
    assert (options.logit_bias, options.json_schema) == ({7: 1.0}, {"type": "integer"})


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one", ["one"]),
        ([1, 2], ["1 2"]),
        (["one", "two"], ["one", "two"]),
        ([[1, 2], [3]], ["1 2", "3"]),
        (["one", [3]], ["one", "3"]),
    ],
)
def test_prompts_can_be_texts_tokens_or_lists(
    client: httpx.Client, stillroom: FakeStillroom, prompt: Any, texts: list[str]
) -> None:
    choices = post(client, prompt=prompt).json()["choices"]

    assert [choice["text"] for choice in choices] == texts
    assert [text for text, _ in stillroom.asked] == texts


def test_choices_are_numbered_prompt_by_prompt_and_each_prompt_is_counted_once(client: httpx.Client) -> None:
    body = post(client, prompt=["one", "two words"], n=2).json()

    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "one"),
        (1, "one"),
        (2, "two words"),
        (3, "two words"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 200,
        "completion_tokens": 6,
        "total_tokens": 206,
        "prompt_tokens_details": {"cached_tokens": 80},
    }


def test_a_stream_of_several_prompts(client: httpx.Client) -> None:
    fields = {"prompt": ["one", "two words"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}

    *chunks, usage, done = events(post(client, **fields))

    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks)
    for index, text in enumerate(["one", "one", "two words", "two words"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert mine[-1]["finish_reason"] == "stop" and mine[0]["finish_reason"] is None


def test_completion_log_probabilities_are_four_lists(client: httpx.Client) -> None:
    [choice] = post(client, logprobs=2, max_tokens=2).json()["choices"]
    *chunks, _ = events(post(client, logprobs=2, max_tokens=2, stream=True))

    assert choice["logprobs"] == {
        "tokens": ["keys", "are"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"\u00e4": -0.25, "\ufffd": -9999.0}] * 2,
        "text_offset": [0, 4],
    }
    streamed = [found for chunk in chunks if (found := chunk["choices"][0].get("logprobs"))]
    assert {key: sum((found[key] for found in streamed), []) for key in streamed[0]} == choice["logprobs"]


@pytest.mark.parametrize(("prompt", "echo"), [("keys are", "keys are"), ([1, 2], "1 2")])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(client: httpx.Client, prompt: Any, echo: str, stream: bool) -> None:
    response = post(client, prompt=prompt, echo=True, n=2, stream=stream)

    choices = [chunk["choices"][0] for chunk in events(response)[:-1]] if stream else response.json()["choices"]
    for index in (0, 1):
        assert "".join(choice["text"] for choice in choices if choice["index"] == index) == echo * 2


def test_failure_of_one_prompt_fails_the_request_and_frees_all_blocks(
    client: httpx.Client, stillroom: FakeStillroom
) -> None:
    stillroom.fails_at = "bad"

    response = post(client, prompt=["fine", "bad", "fine too"])

    assert response.status_code == 500
    until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"best_of": 2}, "ask for n answers"),
        ({"best_of": 1, "n": 2}, "ask for n answers"),
        ({"suffix": "end"}, "suffix is not supported"),
        ({"echo": True, "logprobs": 0}, "exclude each other"),
        ({"stream_options": {"include_usage": True}}, "needs stream: true"),
        ({"prompt": ""}, "a non-empty text or a non-empty list"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["one", ""]}, "a non-empty text or a non-empty list"),
        ({"prompt": [1, "one"]}, "a non-empty text or a non-empty list"),
        ({"prompt": [[]]}, "a non-empty text or a non-empty list"),
        ({"prompt": [1, -1]}, "a non-empty text or a non-empty list"),
        ({"prompt": [True]}, "a non-empty text or a non-empty list"),
        ({"prompt": ["x"] * 129}, "128"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"max_tokens": 2.5}, "max_tokens"),
    ],
)
def test_invalid_completion_requests_are_400_with_a_reason(
    any_client: httpx.Client, change: dict[str, Any], said: str
) -> None:
    response = post(any_client, **change)

    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_best_of_equal_to_n_is_accepted(any_client: httpx.Client) -> None:
    assert len(post(any_client, best_of=2, n=2).json()["choices"]) == 2
