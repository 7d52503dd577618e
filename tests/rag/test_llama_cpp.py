"""llama.cpp's server as the engine, with a small trained llama.

STILLROOM_TEST_LLAMA_PYTHON names a Python that has `llama-cpp-python[server]` and `gguf`; without it this is skipped.
"""

import dataclasses
import json
import os
import queue
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stillroom.config.settings import EngineConfig, EnginePrompt, StillroomConfig
from stillroom.core.clock import SystemClock
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, SampleRequest, SamplingParams
from stillroom.engine.events import TokenEvent
from stillroom.engine.openai_engine import OpenAIEngine
from stillroom.engine.server_pool import ServerPool
from stillroom.errors import EngineRefusedError, EngineUnavailableError
from stillroom.rag.answer import AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom_bench.quality import runtime_worker
from tests.server.fakes import until
from tests.server.knowledge import QUESTION, write_knowledge

PYTHON = os.environ.get("STILLROOM_TEST_LLAMA_PYTHON", "")
KEY = "sk-do-not-show"

pytestmark = [
    pytest.mark.microworld,
    pytest.mark.slow,
    pytest.mark.shared,
    pytest.mark.skipif(not PYTHON, reason="STILLROOM_TEST_LLAMA_PYTHON names no Python with llama-cpp-python"),
]


@pytest.fixture(scope="module")
def model(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, path = shared / "models/stories260k", tmp_path_factory.mktemp("llama") / "stories.gguf"
    program = [PYTHON, str(Path(runtime_worker.__file__).with_name("llama_gguf.py"))]
    environment = os.environ | {
        "PYTHONSAFEPATH": "1"
    }  # the folder has a `statistics` that would shadow the standard library's
    subprocess.run([*program, source, path, source / "pieces.json"], check=True, env=environment)
    return path


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "llama_cpp.server", "--model", str(model), "--port", str(port), "--n_ctx", "512"]
    command += ["--n_threads", "1", "--api_key", KEY, "--verbose", "false"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}/v1"
            until(lambda: process.poll() is not None or _listens(address), deadline_s=60)
            assert process.poll() is None, "llama.cpp's server did not start"
            yield address
        finally:
            process.kill()


def _listens(address: str) -> bool:
    try:
        return httpx.get(f"{address}/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def config(url: str) -> EngineConfig:
    return EngineConfig(kind="openai", base_url=url, api_key=KEY, max_retries=0)


def open_stillroom(folder: Path, config: EngineConfig, prompt: EnginePrompt = "chat") -> Stillroom:
    settings = StillroomConfig(engine=dataclasses.replace(config, prompt=prompt))
    stillroom = Stillroom.open(folder / "kb", config=settings)
    if not stillroom.num_documents:
        stillroom.add(write_knowledge(folder / "docs"))
    return stillroom


def test_greedy_story_equals_that_of_transformers(config: EngineConfig, shared: Path) -> None:
    source = shared / "models/stories260k"
    pieces = json.loads((source / "pieces.json").read_text("utf-8"))
    begin, first, second, *expected = json.loads((source / "greedy_60.json").read_text("utf-8"))
    assert [begin, pieces[first], pieces[second]] == [1, " Once", " upon"]
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    with OpenAIEngine(ServerPool(config, SystemClock()), "", SystemClock()) as engine:
        assert engine.find_model().endswith("stories.gguf")
        sampling = SamplingParams(max_tokens=len(expected))
        engine.submit("Once upon", SampleRequest(request_id=RequestId("story"), sampling=sampling), events.put)
        found = [events.get(timeout=60)]
        while found[-1].finish_reason is None:
            found.append(events.get(timeout=60))

    assert "".join(event.text for event in found) == "".join(pieces[token] for token in expected)
    assert len(found) > len(expected) // 2
    assert found[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt", ["chat", "text"])
def test_answer_from_documents(config: EngineConfig, tmp_path: Path, prompt: EnginePrompt) -> None:
    options = AskOptions(top_k=1, max_tokens=12)
    with open_stillroom(tmp_path, config, prompt) as stillroom:
        stream = stillroom.stream(QUESTION, options)
        pieces = list(stream)
        again = stillroom.ask(QUESTION, options)

    assert len(pieces) > 1
    assert stream.answer.text == "".join(pieces) == again.text
    assert stream.answer.finish_reason == "length"
    assert stream.answer.sources[0].document.endswith("people.md")
    assert 0 < stream.answer.timing.ttft_seconds < stream.answer.timing.total_seconds
    assert stream.answer.num_generated_tokens > 0


def test_cancelling_stops_the_server(config: EngineConfig, tmp_path: Path) -> None:
    with open_stillroom(tmp_path, config) as stillroom:
        for _ in stillroom.stream(QUESTION, AskOptions(top_k=1, max_tokens=250)):
            break
        # the server runs one request at a time
        assert stillroom.ask(QUESTION, AskOptions(top_k=1, max_tokens=2)).finish_reason == "length"


def test_prompt_that_is_too_long(config: EngineConfig, tmp_path: Path) -> None:
    """This server ends such a stream without an error."""
    with (
        open_stillroom(tmp_path, config) as stillroom,
        pytest.raises(EngineUnavailableError, match="lower search.top_k"),
    ):
        stillroom.ask("Dola Kenric " * 200, AskOptions(max_tokens=5))


def test_wrong_key(config: EngineConfig, tmp_path: Path) -> None:
    wrong = dataclasses.replace(config, api_key="sk-wrong")
    with (
        open_stillroom(tmp_path, wrong) as stillroom,
        pytest.raises(EngineRefusedError, match="refuses the API key") as caught,
    ):
        stillroom.warm_up()
    assert "sk-wrong" not in str(caught.value)
