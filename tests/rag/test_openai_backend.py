"""The OpenAI backend against another Stillroom: equal answers, cancelling, and failures."""

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from stillroom.backends.conversation import Exchange
from stillroom.config.settings import EngineConfig, EnginePrompt, GenerationConfig, StillroomConfig
from stillroom.errors import ConfigError, EngineRefusedError, EngineUnavailableError, PromptTooLongError, UsageError
from stillroom.rag.answer import AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import Tenants
from tests.engine.scripted import GOOD, STREAM_HEAD, ScriptedServer, error
from tests.server.fakes import until
from tests.server.harness import serving
from tests.server.knowledge import ANSWER, PEOPLE, QUESTION, write_knowledge
from tests.server.test_keys import add, bearer

pytestmark = pytest.mark.microworld

QUESTIONS = [QUESTION, "In which year was Jatha Jurlow born ?", "What did Cirik Prurs study ?", QUESTION]
ENDLESS = AskOptions(max_tokens=1500, temperature=50.0, seed=1)
"""Words are almost uniformly random, so the answer reaches `max_tokens`."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    """Generates with the built-in engine."""
    folder = tmp_path_factory.mktemp("remote")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        stillroom.warm_up()
        yield stillroom


@pytest.fixture(scope="module")
def url(here: Stillroom) -> Iterator[str]:
    with serving(here) as address:
        yield address


@pytest.fixture(autouse=True)
def every_block_is_free_afterwards(here: Stillroom) -> Iterator[None]:
    yield
    until(lambda: here.num_free_blocks == here.num_blocks > 0)


def away(here: Stillroom, address: str, **engine: object) -> Stillroom:
    """The same knowledge base with the server at this address as engine."""
    settings = EngineConfig(kind="openai", base_url=address, **engine)  # type: ignore[arg-type]
    return Stillroom.open(here._kb.path, config=StillroomConfig(engine=settings))


@pytest.mark.parametrize("prompt", ["tokens", "text"])
def test_answers_equal_those_of_the_built_in_engine(here: Stillroom, url: str, prompt: EnginePrompt) -> None:
    with away(here, url, prompt=prompt, document_order="rank") as stillroom:
        for question in QUESTIONS:
            answer, expected = stillroom.ask(question), here.ask(question)

            assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
            assert answer.sources == expected.sources
            assert answer.reuse.num_prompt_tokens == expected.reuse.num_prompt_tokens
            assert answer.num_generated_tokens == expected.num_generated_tokens
            assert 0 < answer.timing.retrieval_seconds < answer.timing.ttft_seconds <= answer.timing.total_seconds
        assert stillroom.model_name == here.model_name
        assert stillroom.num_blocks == 0


def test_sampled_answers_equal_those_of_the_built_in_engine(here: Stillroom, url: str) -> None:
    options = AskOptions(max_tokens=20, temperature=5.0, top_p=0.9, seed=7, top_k=2)
    with away(here, url, prompt="tokens", document_order="rank") as stillroom:
        assert stillroom.ask(QUESTION, options).text == here.ask(QUESTION, options).text


def test_several_answers_and_stop_strings(here: Stillroom, url: str) -> None:
    options = AskOptions(max_tokens=12, temperature=5.0, seed=7, min_p=0.01)
    with away(here, url, prompt="tokens", document_order="rank") as stillroom:
        answers = [stream.answer for stream in stillroom.streams(QUESTION, options, n=3) if list(stream)]
        expected = [stream.answer for stream in here.streams(QUESTION, options, n=3) if list(stream)]
        assert [answer.text for answer in answers] == [answer.text for answer in expected]

        assert stillroom.ask(QUESTION, AskOptions(stop="Bank")).text == here.ask(QUESTION, AskOptions(stop="Bank")).text
        with pytest.raises(UsageError, match="cannot enforce a JSON schema"):
            stillroom.ask(QUESTION, AskOptions(json_schema={"type": "integer"}))


def test_prompt_limit_holds_if_tokens_are_sent(here: Stillroom, url: str) -> None:
    whole = here.ask(QUESTION)
    limit = GenerationConfig(max_prompt_tokens=whole.reuse.num_prompt_tokens - 1)
    engine = EngineConfig(kind="openai", base_url=url, prompt="tokens")
    config = StillroomConfig(engine=engine, generation=limit)
    with Stillroom.open(here._kb.path, config=config) as stillroom:
        answer = stillroom.ask(QUESTION)
        assert answer.reuse.num_prompt_tokens < whole.reuse.num_prompt_tokens
        left = [source.chunk_id for source in answer.sources]
        assert left == [source.chunk_id for source in whole.sources][:-1], "the last by rank is dropped"
        with pytest.raises(PromptTooLongError, match="max_prompt_tokens"):
            stillroom.ask("Dola Kenric " * 200)
        with pytest.raises(PromptTooLongError, match="max_prompt_tokens"):
            asyncio.run(stillroom.acontinue("Dola Kenric " * 200))
    with pytest.raises(ConfigError, match="max_prompt_tokens needs engine.prompt = 'tokens'"):
        StillroomConfig(engine=EngineConfig(kind="openai", base_url=url), generation=limit)


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_prompts_in_text_or_tokens_need_the_model_of_the_server(kind: EnginePrompt, tmp_path: Path) -> None:
    engine = EngineConfig(kind="openai", base_url="http://127.0.0.1:9", prompt=kind)
    with (
        Stillroom.open(tmp_path / "kb", model="bundled:reader", config=StillroomConfig(engine=engine)) as stillroom,
        pytest.raises(ConfigError, match=f"engine.prompt = '{kind}' .* --model"),
    ):
        stillroom.warm_up()


def test_stream_for_threads_and_for_event_loops(here: Stillroom, url: str) -> None:
    async def read(stillroom: Stillroom) -> list[str]:
        return [piece async for piece in await stillroom.astream(QUESTION)]

    with away(here, url, prompt="tokens") as stillroom:
        stream = stillroom.stream(QUESTION)
        assert len(stream.sources) > 0
        pieces = list(stream)
        assert pieces == asyncio.run(read(stillroom))

    assert len(pieces) == 2
    assert "".join(pieces) == ANSWER


def test_tenants_cannot_be_kept_apart_by_a_server_elsewhere(here: Stillroom, url: str, tmp_path: Path) -> None:
    with (
        away(here, url, prompt="tokens") as stillroom,
        stillroom.for_tenant(tmp_path / "a", "a") as other,
        pytest.raises(ConfigError, match="serves one tenant only"),
    ):
        other.ask(QUESTION)


def test_question_of_a_second_tenant_is_refused_with_the_reason(here: Stillroom, url: str, tmp_path: Path) -> None:
    key, asked = add(tmp_path / "keys.json", "anna", "legal"), {"messages": [{"role": "user", "content": QUESTION}]}
    with away(here, url, prompt="tokens") as stillroom, closing(Tenants(stillroom, tmp_path / "tenants")) as tenants:
        tenants.stillroom("legal").upload([("people.md", io.BytesIO(PEOPLE.encode()))])
        with serving(stillroom, tenants=tenants, keys=KeyRing(tmp_path / "keys.json")) as middle:
            refused = httpx.post(f"{middle}/v1/chat/completions", json=asked, headers=bearer(key))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_not_served")
    assert "set engine.cache_salt = true" in refused.json()["error"]["message"]


def test_chat_prompts_are_sent_as_messages(here: Stillroom) -> None:
    with ScriptedServer([GOOD]) as server, away(here, server.url, model="m") as stillroom:
        answer = stillroom.ask(QUESTION, AskOptions(top_k=1))

    [asked] = server.asked
    system, user = asked.body["messages"]
    assert system["role"] == "system" and "only the documents" in system["content"]
    assert user["content"].startswith("Documents:\n\n<document>\nPeople > Dola Kenric\n\nThe mentor of Dola Kenric was")
    assert user["content"].endswith(f"</document>\n\nQuestion: {QUESTION}")
    assert answer.text == "Twice a year."
    assert (answer.reuse.num_prompt_tokens, answer.reuse.num_cached_tokens, answer.num_generated_tokens) == (9, 4, 2)


def test_sources_stand_in_the_order_of_the_prompt(here: Stillroom) -> None:
    questions = ["Dola Kenric Cirik Prurs", "Cirik Prurs Dola Kenric birthplace Tunstead"]
    ranked = [here.search(question, mode="sparse", top_k=2).results for question in questions]
    assert [scored.chunk for scored in ranked[0]] == [scored.chunk for scored in reversed(ranked[1])]
    with ScriptedServer([GOOD, GOOD]) as server, away(here, server.url, model="m") as stillroom:
        first, second = (stillroom.ask(question, AskOptions(mode="sparse", top_k=2)) for question in questions)

    assert [source.chunk_id for source in second.sources] == [source.chunk_id for source in first.sources]
    assert [source.position for source in second.sources] == [1, 2]
    assert second.sources[0].score < second.sources[1].score
    prompts = [asked.body["messages"][1]["content"].partition("Question: ")[0] for asked in server.asked]
    assert prompts[0] == prompts[1]


def test_earlier_turns_stand_as_they_were_sent(here: Stillroom) -> None:
    first, second = "Dola Kenric Cirik Prurs", "Cirik Prurs Dola Kenric birthplace Tunstead"
    options = AskOptions(mode="sparse", top_k=2)
    with ScriptedServer([GOOD] * 3) as server, away(here, server.url, model="m") as stillroom:
        stillroom.ask(first, options)
        answer = stillroom.ask(second, options)
        history = (Exchange(second, answer.text),)
        stillroom.ask("When was Jatha Jurlow born ?", replace(options, history=history))

    _, before, after = (asked.body["messages"] for asked in server.asked)
    assert [message["content"] for message in after[:3]] == [*(message["content"] for message in before), answer.text]


def test_cancelling_a_stream_frees_the_blocks_of_the_server(here: Stillroom, url: str) -> None:
    with away(here, url, prompt="tokens") as stillroom:
        for _ in stillroom.stream(QUESTION, ENDLESS):
            assert here.num_free_blocks < here.num_blocks
            break

        until(lambda: here.num_free_blocks == here.num_blocks)


def test_disconnect_of_a_client_is_passed_on_to_the_server(here: Stillroom, url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 1500,
        "temperature": 50.0,
        "stream": True,
    }
    with away(here, url, prompt="tokens") as stillroom, serving(stillroom) as middle:
        with httpx.stream("POST", f"{middle}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            while '"content":" ' not in next(lines):
                pass
            assert here.num_free_blocks < here.num_blocks

        until(lambda: here.num_free_blocks == here.num_blocks)


def test_failures_of_the_server_have_a_status(here: Stillroom, url: str) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    replies = [error(401, "no"), STREAM_HEAD + b"data: {half\n\n", error(503, "full")]
    with (
        ScriptedServer(replies) as server,
        away(here, server.url, model="m", max_retries=0) as stillroom,
        serving(stillroom) as middle,
    ):
        refused, broken, full = (httpx.post(f"{middle}/v1/chat/completions", json=asked) for _ in range(3))

    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "engine_refused")
    assert (broken.status_code, broken.json()["error"]["code"]) == (502, "engine_refused")
    assert broken.json()["error"]["message"].startswith(f"{server.url} sent an event that is not in OpenAI's format")
    assert (full.status_code, full.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "stillroom_requests_total" in stillroom.metrics.render().decode()


def test_prompt_too_long_for_the_server(here: Stillroom, url: str) -> None:
    with (
        away(here, url, prompt="tokens") as stillroom,
        pytest.raises(PromptTooLongError, match="no room for the prompt.*more than the model's 2048"),
    ):
        stillroom.ask(QUESTION, AskOptions(max_tokens=100_000))


def test_model_that_the_server_does_not_have(here: Stillroom, url: str) -> None:
    with (
        away(here, url, model="other") as stillroom,
        pytest.raises(EngineRefusedError, match="'other' is not served here"),
    ):
        stillroom.ask(QUESTION)


def test_unreachable_server_is_an_error(here: Stillroom) -> None:
    with away(here, "http://127.0.0.1:9", max_retries=0) as stillroom, pytest.raises(EngineUnavailableError):
        stillroom.warm_up()


def test_raw_prompt_is_continued_unchanged(here: Stillroom, url: str) -> None:
    text = (
        "Answer the question using only the chunks below .<chunk> Yunder Bank was founded in the year 1720 . </chunk>"
    )
    body = {"prompt": f"{text}<q> In which year was Yunder Bank founded ? <a>", "model": "stillroom"}

    whole = httpx.post(f"{url}/v1/completions", json=body).json()
    streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}).text

    assert whole["choices"][0] == {"index": 0, "text": "1720", "logprobs": None, "finish_reason": "stop"}
    assert whole["usage"]["completion_tokens"] == 1
    assert '"text":"1720"' in streamed and streamed.endswith("data: [DONE]\n\n")

    with away(here, url, prompt="tokens") as stillroom, serving(stillroom) as middle:
        passed_on = httpx.post(f"{middle}/v1/completions", json=body).json()
    assert passed_on["choices"] == whole["choices"]


@pytest.mark.parametrize("prompt", [[], [10**6], [-1]])
def test_invalid_raw_prompts_are_refused(here: Stillroom, prompt: list[int]) -> None:
    with pytest.raises(UsageError):
        asyncio.run(here.acontinue(prompt))


def test_torch_is_not_imported_for_a_remote_engine() -> None:
    program = (
        "import sys, stillroom.rag.stillroom, stillroom.rag.pipeline, stillroom.backends.openai\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
