"""The official `openai` client against a real server with a fake Stillroom."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from stillroom.errors import EngineError
from tests.server.fakes import NUM_BLOCKS, FakeStillroom, as_stillroom, until
from tests.server.harness import serving

QUESTION = "How do I rotate keys?"


@pytest.fixture
def stillroom() -> FakeStillroom:
    return FakeStillroom()


@pytest.fixture
def url(stillroom: FakeStillroom) -> Iterator[str]:
    with serving(as_stillroom(stillroom)) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="unused") as client:
        yield client


def test_completion(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="stillroom",
        messages=[{"role": "user", "content": QUESTION}],
        extra_body={"stillroom": {"top_k": 1, "mode": "hybrid"}},
    )

    assert completion.choices[0].message.content == QUESTION
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage and completion.usage.prompt_tokens_details
    assert completion.usage.prompt_tokens_details.cached_tokens == 40
    assert completion.model_extra and completion.model_extra["stillroom"]["sources"][0]["document"]
    assert completion._request_id


def test_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        stream_options={"include_usage": True},
    )

    *chunks, usage = list(stream)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == QUESTION
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].model_extra and chunks[0].model_extra["stillroom"]["sources"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].model_extra and chunks[-1].model_extra["stillroom"]["timing"]
    assert usage.choices == []
    assert usage.usage and usage.usage.completion_tokens == 5


def test_error_in_a_stream_is_raised(client: OpenAI, stillroom: FakeStillroom) -> None:
    stillroom.fails_at, stillroom.failure = "rotate", EngineError("the step failed")

    with pytest.raises(openai.APIError, match="internal error"):
        for _ in client.chat.completions.create(
            model="stillroom", messages=[{"role": "user", "content": QUESTION}], stream=True
        ):
            pass


def test_async_client(url: str) -> None:
    async def talk() -> tuple[str | None, str]:
        async with AsyncOpenAI(base_url=url, api_key="unused") as client:
            whole = await client.chat.completions.create(
                model="stillroom", messages=[{"role": "user", "content": QUESTION}]
            )
            stream = await client.chat.completions.create(
                model="stillroom", messages=[{"role": "user", "content": QUESTION}], stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(talk()) == (QUESTION, QUESTION)


def test_closing_a_stream_frees_its_blocks(client: OpenAI, stillroom: FakeStillroom) -> None:
    stillroom.gate.clear()

    stream = client.chat.completions.create(
        model="stillroom", messages=[{"role": "user", "content": QUESTION}], stream=True
    )
    next(iter(stream))
    stream.close()

    until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)


def test_models_and_embeddings(client: OpenAI, stillroom: FakeStillroom) -> None:
    generator, embedder = client.models.list().data

    vectors = client.embeddings.create(model=embedder.id, input=["one", "two"])

    assert client.models.retrieve(generator.id).id == "fake-model"
    assert [item.embedding for item in vectors.data] == [
        pytest.approx(row) for row in stillroom.embed(["one", "two"]).tolist()
    ]


def test_errors_raise_the_clients_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": QUESTION}])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="stillroom", messages=[{"role": "user", "content": " "}])
    assert caught.value.code == "invalid_value"


def test_errors_that_cannot_be_mended_are_not_tried_again(stillroom: FakeStillroom, client: OpenAI) -> None:
    stillroom.texts = {}

    with pytest.raises(openai.ConflictError):
        client.chat.completions.create(model="stillroom", messages=[{"role": "user", "content": QUESTION}])

    assert len(stillroom.asked) == 1
