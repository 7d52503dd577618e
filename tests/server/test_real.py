"""The server with real documents and the bundled model, used through the official `openai` client."""

import asyncio
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from stillroom.core.request import seed_of_sample
from stillroom.errors import UsageError
from stillroom.models.decoder import Decoder
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.stillroom import Stillroom
from tests.server.fakes import until
from tests.server.harness import events, serving
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

pytestmark = pytest.mark.microworld

NUM_CLIENTS = 16


@pytest.fixture(scope="module")
def stillroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder = tmp_path_factory.mktemp("real")
    with Stillroom.open(folder / "kb") as stillroom:
        report = stillroom.add(write_knowledge(folder / "docs"))
        assert not report.failures
        stillroom.warm_up()
        yield stillroom


@pytest.fixture(scope="module")
def url(stillroom: Stillroom) -> Iterator[str]:
    with serving(stillroom) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def every_block_is_free_afterwards(stillroom: Stillroom) -> Iterator[None]:
    yield
    until(lambda: stillroom.num_free_blocks == stillroom.num_blocks > 0)


@pytest.mark.parametrize("stream", [False, True])
def test_non_finite_logits_are_an_error_without_text(
    url: str, client: OpenAI, stillroom: Stillroom, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    real = Decoder.logits

    def broken(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        return real(decoder, hidden) * float("nan")

    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": stillroom.model_name, "messages": messages, "temperature": 0, "stream": stream}
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", broken)
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
    if stream:
        last = events(response)[-1]
        assert last["error"]["code"] == "non_finite" and '"content":"' not in response.text.replace('"content":""', "")
    else:
        assert response.status_code == 500 and response.json()["error"]["code"] == "non_finite"
    completion = client.chat.completions.create(model=stillroom.model_name, messages=messages, temperature=0)  # type: ignore[arg-type]
    assert completion.choices[0].message.content == ANSWER


def test_answer_comes_from_the_documents(client: OpenAI, stillroom: Stillroom) -> None:
    completion = client.chat.completions.create(
        model=stillroom.model_name, messages=[{"role": "user", "content": QUESTION}], temperature=0
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


def test_stream_says_the_same_as_the_whole_answer(client: OpenAI, stillroom: Stillroom) -> None:
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


def test_many_clients_at_once_all_finish_with_their_own_answer(client: OpenAI, stillroom: Stillroom) -> None:
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

    alone = [stillroom.ask(question).text for question in questions]
    assert answers == alone * (NUM_CLIENTS // 2)
    assert alone[0] == ANSWER


RANDOM_TEXT = {"max_tokens": 60, "temperature": 50.0, "seed": 3}  # almost uniform sampling


def ramble(stillroom: Stillroom, **options: Any) -> Answer:
    return stillroom.ask(QUESTION, rambling(**options))


def rambling(**options: Any) -> AskOptions:
    return AskOptions(**(RANDOM_TEXT | options))


def num_ended(stillroom: Stillroom, outcome: str = "aborted") -> float:
    found = re.search(rf'requests_total{{outcome="{outcome}"}} (\S+)', stillroom.metrics.render().decode())
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_text_across_tokens_ends_the_answer(client: OpenAI, stillroom: Stillroom, streamed: bool) -> None:
    free = ramble(stillroom)
    words = free.text.split(" ")
    stop = f"{words[5][-1]} {words[6]} {words[7][0]}"
    expected = free.text[: free.text.index(stop)]

    num_aborted = num_ended(stillroom)
    text, reason = "", ""
    if streamed:
        chunks = list(
            client.chat.completions.create(
                model="stillroom",
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=1500,
                temperature=50.0,
                seed=3,
                stop=["never so written", stop],
                stream=True,
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = str(chunks[-1].choices[0].finish_reason)
    else:
        answer = ramble(stillroom, stop=stop, max_tokens=1500)
        text, reason = answer.text, answer.finish_reason
        assert answer.token_ids == free.token_ids[:8], "no further token is kept"

    assert (text, reason) == (expected, "stop")
    until(lambda: stillroom.num_free_blocks == stillroom.num_blocks)
    assert num_ended(stillroom) == num_aborted


def num_500(stillroom: Stillroom) -> float:
    """Return the number of chats answered with 500 so far."""
    name = b'http_requests_total{path="/v1/chat/completions",status="500"} '
    return float(stillroom.metrics.render().partition(name)[2].partition(b"\n")[0] or 0)


def test_stream_aborted_by_the_engine_counts_as_failed(
    url: str, stillroom: Stillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = stillroom._loader.backend
    num_failed, num_aborted, num_500_before = num_ended(stillroom, "failed"), num_ended(stillroom), num_500(stillroom)

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    request = {
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "max_tokens": 400,
        "temperature": 50.0,
    }
    monkeypatch.setattr(backend.engine._engine, "step", broken)
    response = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=20)

    assert response.status_code == 200 and events(response)[-1]["error"]["code"] == "internal_error"
    assert (num_ended(stillroom, "failed"), num_ended(stillroom)) == (num_failed + 1, num_aborted)
    until(lambda: num_500(stillroom) == num_500_before + 1)


def test_several_answers_are_those_of_their_seeds(client: OpenAI, stillroom: Stillroom) -> None:
    completion = client.chat.completions.create(
        model="stillroom",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=20,
        temperature=5.0,
        seed=3,
        n=4,
    )

    texts = [choice.message.content for choice in completion.choices]
    alone = [
        ramble(stillroom, max_tokens=20, temperature=5.0, seed=seed_of_sample(3, index)).text for index in range(4)
    ]
    assert texts == alone
    assert len(set(texts)) == 4


def test_cancelling_one_of_several_answers_leaves_the_others(stillroom: Stillroom) -> None:
    streams = stillroom.streams(QUESTION, rambling(), n=3)
    streams[0].cancel()

    for stream in streams[1:]:
        assert "".join(stream) == stream.answer.text
    assert streams[1].answer.text == ramble(stillroom, seed=seed_of_sample(3, 1)).text


def test_log_probabilities_equal_the_models(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="stillroom", messages=[{"role": "user", "content": QUESTION}], logprobs=True, top_logprobs=3
    )

    logprobs = completion.choices[0].logprobs
    assert logprobs and logprobs.content
    assert " ".join(token.token for token in logprobs.content) == ANSWER
    for token in logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob <= 0, "greedy sampling takes the likeliest token"
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1 + 1e-6


def test_unsupported_options_are_refused(url: str) -> None:
    for change, complaint in (
        ({"n": 100}, "n=100 exceeds the 32 sequences"),
        ({"logit_bias": {"5000000": 1}}, "logit_bias names token 5000000"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9"),
    ):
        request = {"messages": [{"role": "user", "content": QUESTION}]} | change
        response = httpx.post(f"{url}/v1/chat/completions", json=request)
        assert response.status_code == 400 and complaint in response.json()["error"]["message"]


@pytest.mark.parametrize("n", [1, 3])
def test_answers_that_are_late_are_504_and_free_their_blocks(url: str, stillroom: Stillroom, n: int) -> None:
    request = {"messages": [{"role": "user", "content": QUESTION}], "n": n, "deadline_seconds": 0.02}
    response = httpx.post(
        f"{url}/v1/chat/completions", json=request | {"max_tokens": 1500, "temperature": 50.0, "seed": 1}, timeout=60
    )

    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    until(lambda: stillroom.num_free_blocks == stillroom.num_blocks)
    with pytest.raises(UsageError, match="deadline_seconds"):
        stillroom.ask(QUESTION, AskOptions(deadline_seconds=0.0))


def test_disconnect_from_a_stream_frees_its_blocks(client: OpenAI, stillroom: Stillroom) -> None:
    stream = client.chat.completions.create(
        model="stillroom",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        max_tokens=1500,
        temperature=50.0,  # almost uniform sampling, so that answers are long
        seed=1,
    )
    chunks = iter(stream)
    next(chunks)
    assert next(chunks).choices[0].finish_reason is None
    assert stillroom.num_free_blocks < stillroom.num_blocks

    stream.close()

    until(lambda: stillroom.num_free_blocks == stillroom.num_blocks)


def test_disconnect_before_a_complete_answer_frees_its_blocks(url: str, stillroom: Stillroom) -> None:
    request = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1500, "temperature": 50.0, "seed": 1}

    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=request, timeout=0.2)

    until(lambda: stillroom.num_free_blocks == stillroom.num_blocks)


def test_answer_too_long_for_the_model_is_refused(url: str) -> None:
    request = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 100_000}

    response = httpx.post(f"{url}/v1/chat/completions", json=request)

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_models_and_embeddings(client: OpenAI, stillroom: Stillroom) -> None:
    names = [model.id for model in client.models.list()]

    vectors = client.embeddings.create(model=names[1], input=["employed by a bank", "founded in 1720"])

    assert names == [stillroom.model_name, stillroom.config.embedder.model, "stillroom-chat"]
    assert [len(item.embedding) for item in vectors.data] == [384, 384]
    assert math.hypot(*vectors.data[0].embedding) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
def test_search(url: str, mode: str) -> None:
    found = httpx.post(f"{url}/v1/search", json={"query": "Cirik Prurs Tunstead", "mode": mode, "top_k": 1}).json()

    [result] = found["results"]
    assert "Cirik Prurs" in result["text"]
    assert result["heading"] == "People > Cirik Prurs"
    assert (result["start_line"], result["end_line"]) == (9, 9)


def test_health_and_metrics(url: str, client: OpenAI, stillroom: Stillroom) -> None:
    client.chat.completions.create(model="stillroom", messages=[{"role": "user", "content": QUESTION}])

    health = httpx.get(f"{url}/healthz").json()
    metrics = httpx.get(f"{url}/metrics").text

    assert (health["status"], health["documents"], health["model"]) == ("ok", 2, stillroom.model_name)
    assert health["kv_blocks"]["total"] == stillroom.num_blocks
    assert "stillroom_documents 2.0" in metrics
    assert 'stillroom_requests_total{outcome="stop"}' in metrics
    assert f'stillroom_kv_blocks{{state="free"}} {float(stillroom.num_blocks)}' in metrics


def test_empty_knowledge_base_is_409(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as stillroom, serving(stillroom) as url:
        response = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": QUESTION}]}, timeout=60
        )

    assert response.status_code == 409
    assert response.json()["error"]["code"] == "knowledge_base_empty"
