"""The bundled reader is the default everywhere, and an answer by a model that cannot read documents says so."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.models.bundled_models import (
    FOLDER,
    MICROWORLD,
    READER,
    bundled_folder,
    full_name,
    model_warnings,
    reader_folder,
)
from stillroom.rag.answer import AskOptions
from stillroom.rag.as_json import answer_as_json
from stillroom.rag.stillroom import Stillroom
from stillroom.server.app import create_app
from tests.cli.harness import Run, runner
from tests.server.harness import serving

QUESTION = "Where does the river Anton end?"
CANNOT_READ = "microworld knows 994 words of an invented country"


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("default")
    text = "# Rivers\n\nThe river Anton ends in the lake Breg.\n\n# Roads\n\nThe road to Sule was built in 1907.\n"
    (folder / "rivers.md").write_text(text, encoding="utf-8")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(folder / "rivers.md")
    return folder / "kb"


@pytest.fixture(scope="module")
def stillroom(kb: Path) -> Iterator[Stillroom]:
    with Stillroom.open(kb) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(stillroom: Stillroom) -> Iterator[httpx.Client]:
    with serving(stillroom) as url, httpx.Client(base_url=url, timeout=60) as found:
        yield found


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(capfd)


def chat(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": QUESTION}], **body})


def test_the_default_is_the_reader_under_its_full_name(stillroom: Stillroom) -> None:
    answer = stillroom.ask(QUESTION)
    assert StillroomConfig().runtime.model == "bundled" and stillroom.model_name == READER
    assert answer.text == "The river Anton ends in the lake Breg. [1]"
    assert answer.warnings == stillroom.warnings == ()
    assert stillroom.records.get(answer.request_id)["model"] == READER
    assert answer_as_json(QUESTION, answer)["highlight"] == list(answer.highlight or ())


def test_models_and_health_name_the_reader_and_requests_may_call_it_bundled(client: httpx.Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == READER
    health = client.get("/healthz").json()
    assert (health["model"], health["kv_blocks"]) == (READER, {"free": 0, "total": 0})
    assert client.get("/readyz").status_code == 200
    assert [chat(client, model=name).status_code for name in (READER, "bundled", "stillroom", "other")] == [
        200,
        200,
        200,
        404,
    ]


def test_a_chat_reply_reports_highlight_and_confidence(client: httpx.Client) -> None:
    reply = chat(client, temperature=0.9, n=2).json()
    texts = {choice["message"]["content"] for choice in reply["choices"]}
    ours = reply["stillroom"]
    assert len(texts) == 1 and reply["model"] == READER
    start, end = ours["highlight"]
    assert "Breg" in texts.pop()[start:end]
    assert 0 <= ours["confidence"] <= 1 and ours["warnings"] == []
    assert reply["usage"]["completion_tokens"] == 2 * 9


def test_a_streamed_chat_has_the_words_and_then_the_details(client: httpx.Client) -> None:
    lines = [line.removeprefix("data: ") for line in chat(client, stream=True).text.split("\n\n") if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert lines[-1] == "[DONE]" and len([piece for piece in pieces if piece]) > 5
    last = chunks[-1]
    assert "".join(pieces) == chat(client).json()["choices"][0]["message"]["content"]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["stillroom"]["confidence"] > 0 and last["stillroom"]["warnings"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once upon a time"}),
        ("/v1/completions", {"prompt": [1, 2], "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It"}]},
        ),
    ],
)
def test_requests_for_generated_text_get_400_and_the_remedy(
    client: httpx.Client, path: str, body: dict[str, object]
) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert "--model" in reply.json()["error"]["message"]


def test_commands_answer_with_the_reader_and_say_which_need_a_decoder(run: Run, kb: Path) -> None:
    answered = run("ask", QUESTION, "--kb", kb, "--json")
    assert answered.json["text"].startswith("The river Anton ends") and "warning" not in answered.err
    explained = run("explain", "--kb", kb)
    assert READER in explained.out and "Confidence: " in explained.out and "rivers.md" in explained.out
    refused = run("calibrate", "--kb", kb, "--quiet")
    assert refused.code != 0
    assert MICROWORLD in refused.err and "--model" in refused.err


def test_every_answer_of_a_model_that_cannot_read_documents_says_so(
    run: Run, kb: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = run("ask", QUESTION, "--kb", kb, "--model", MICROWORLD, "--quiet", "--json")
    assert CANNOT_READ in shown.err and "Leave out --model" in shown.err
    assert shown.json["warnings"][0].startswith(CANNOT_READ)
    with Stillroom.open(kb, model=MICROWORLD) as stillroom:
        assert stillroom.stream(QUESTION, AskOptions(max_tokens=2)).read_to_end().warnings == stillroom.warnings
        with caplog.at_level(logging.WARNING):
            create_app(stillroom)
        assert CANNOT_READ in caplog.text
        with serving(stillroom) as url, httpx.Client(base_url=url, timeout=60) as client:
            assert chat(client, max_tokens=2).json()["stillroom"]["warnings"] == list(stillroom.warnings)
            assert CANNOT_READ in chat(client, max_tokens=2, stream=True).text
            completed = client.post("/v1/completions", json={"prompt": "The mentor", "max_tokens": 2}).json()
            assert completed["stillroom"]["warnings"] == list(stillroom.warnings)


def test_the_folder_of_a_bundled_model_is_known_by_its_name(kb: Path) -> None:

    assert full_name("bundled") == full_name(str(FOLDER / "reader")) == READER
    assert full_name("~no-such-user/model") == "~no-such-user/model"
    assert full_name("some/model") == "some/model" and full_name(str(kb)) == str(kb)
    assert model_warnings(str(FOLDER / "microworld")) == model_warnings(MICROWORLD) != ()
    assert reader_folder("bundled") == bundled_folder(READER) == FOLDER / "reader"
    assert reader_folder(MICROWORLD) is reader_folder("some/model") is reader_folder(str(kb)) is None
