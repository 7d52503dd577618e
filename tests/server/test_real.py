"""The server over the real thing: real documents, real index, the bundled model. And the official `openai` client."""

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from stillroom.rag.room import Stillroom
from tests.server.fakes import until
from tests.server.harness import serving
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

NUM_CLIENTS = 16


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder = tmp_path_factory.mktemp("real")
    with Stillroom.open(folder / "kb") as room:
        report = room.add(write_knowledge(folder / "docs"))
        assert not report.failures
        room.warm_up()
        yield room


@pytest.fixture(scope="module")
def url(room: Stillroom) -> Iterator[str]:
    with serving(room) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def every_block_is_free_afterwards(room: Stillroom) -> Iterator[None]:
    yield
    until(lambda: room.num_free_blocks == room.num_blocks > 0)


def test_answer_comes_from_the_documents(client: OpenAI, room: Stillroom) -> None:
    completion = client.chat.completions.create(
        model=room.model_name, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )

    assert completion.choices[0].message.content == ANSWER
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage and completion.usage.completion_tokens == 2
    assert completion.model_extra
    ours = completion.model_extra["stillroom"]
    assert ours["sources"][0]["document"].endswith("people.md")
    assert ours["sources"][0]["text"].startswith("The mentor of Dola Kenric")
    assert ours["reuse"]["num_prompt_tokens"] == completion.usage.prompt_tokens
    assert 0 < ours["timing"]["retrieval_seconds"] < ours["timing"]["ttft_seconds"] <= ours["timing"]["total_seconds"]


def test_stream_says_the_same_as_the_whole_answer(client: OpenAI, room: Stillroom) -> None:
    stream = client.chat.completions.create(
        model="stillroom",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stillroom": {"top_k": 2, "mode": "dense"}},
    )

    *chunks, usage = list(stream)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[0].model_extra and len(chunks[0].model_extra["stillroom"]["sources"]) == 2
    assert usage.usage and usage.usage.completion_tokens == 2


def test_async_client(url: str) -> None:
    async def talk() -> tuple[str | None, str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
            whole = await client.chat.completions.create(
                model="stillroom", messages=[{"role": "user", "content": QUESTION}]
            )
            stream = await client.chat.completions.create(
                model="stillroom", messages=[{"role": "user", "content": QUESTION}], stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(talk()) == (ANSWER, ANSWER)


def test_many_clients_at_once_all_finish_with_their_own_answer(client: OpenAI, room: Stillroom) -> None:
    questions = [QUESTION, "In which year was Jatha Jurlow born ?"]

    def ask(number: int) -> str:
        stream = client.chat.completions.create(
            model="stillroom",
            messages=[{"role": "user", "content": questions[number % 2]}],
            stream=True,
            max_tokens=32,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(ask, range(NUM_CLIENTS)))

    alone = [room.ask(question).text for question in questions]
    assert answers == alone * (NUM_CLIENTS // 2)
    assert alone[0] == ANSWER


def test_client_that_leaves_a_stream_frees_its_blocks(client: OpenAI, room: Stillroom) -> None:
    stream = client.chat.completions.create(
        model="stillroom",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        max_tokens=1500,
        temperature=50.0,  # close to a uniform choice of words: it goes on and on
        seed=1,
    )
    chunks = iter(stream)
    next(chunks)
    assert next(chunks).choices[0].finish_reason is None
    assert room.num_free_blocks < room.num_blocks

    stream.close()

    until(lambda: room.num_free_blocks == room.num_blocks)


def test_client_that_does_not_wait_for_a_whole_answer_frees_its_blocks(url: str, room: Stillroom) -> None:
    request = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1500, "temperature": 50.0, "seed": 1}

    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=request, timeout=0.2)

    until(lambda: room.num_free_blocks == room.num_blocks)


def test_too_long_an_answer_is_refused(url: str) -> None:
    request = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 100_000}

    response = httpx.post(f"{url}/v1/chat/completions", json=request)

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_models_and_embeddings(client: OpenAI, room: Stillroom) -> None:
    names = [model.id for model in client.models.list()]

    vectors = client.embeddings.create(model=names[1], input=["employed by a bank", "founded in 1720"])

    assert names == [room.model_name, room.config.embedder.model]
    assert [len(item.embedding) for item in vectors.data] == [384, 384]
    assert math.hypot(*vectors.data[0].embedding) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
def test_search(url: str, mode: str) -> None:
    found = httpx.post(f"{url}/v1/search", json={"query": "Cirik Prurs Tunstead", "mode": mode, "top_k": 1}).json()

    [result] = found["results"]
    assert "Cirik Prurs" in result["text"]
    assert result["heading"] == "People > Cirik Prurs"
    assert (result["start_line"], result["end_line"]) == (9, 9)


def test_health_and_metrics(url: str, client: OpenAI, room: Stillroom) -> None:
    client.chat.completions.create(model="stillroom", messages=[{"role": "user", "content": QUESTION}])

    health = httpx.get(f"{url}/healthz").json()
    metrics = httpx.get(f"{url}/metrics").text

    assert (health["status"], health["documents"], health["model"]) == ("ok", 2, room.model_name)
    assert health["kv_blocks"]["total"] == room.num_blocks
    assert "stillroom_documents 2.0" in metrics
    assert 'stillroom_requests_total{outcome="stop"}' in metrics
    assert f'stillroom_kv_blocks{{state="free"}} {float(room.num_blocks)}' in metrics


def test_empty_knowledge_base_is_409(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as room, serving(room) as url:
        response = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": QUESTION}]}, timeout=60
        )

    assert response.status_code == 409
    assert response.json()["error"]["code"] == "knowledge_base_empty"
