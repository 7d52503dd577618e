"""The examples of docs/http.md and docs/conversations.md work."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillroom.config.settings import SearchConfig, StillroomConfig
from stillroom.models import bundled_models
from stillroom.rag.stillroom import Stillroom
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving
from tests.server.knowledge import write_knowledge

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http.md"
CONVERSATIONS = PAGE.with_name("conversations.md")
ADDRESS = "http://127.0.0.1:8321"


def blocks(language: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(as_stillroom(FakeStillroom())) as url:
        program = "\n".join(blocks("python")).replace(ADDRESS, url)
        scope: dict[str, object] = {}
        try:
            exec(compile(program, str(PAGE), "exec"), scope)
        finally:
            scope["client"].close()  # type: ignore[attr-defined]  # the example does not close it

    assert capsys.readouterr().out.count("How do I rotate keys?") == 4


def test_conversation_examples_over_http_and_in_python(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_http, in_python = blocks("python", CONVERSATIONS)
    stillroom = FakeStillroom()
    scope: dict[str, object] = {}
    with serving(as_stillroom(stillroom)) as url:
        try:
            exec(compile(over_http.replace(ADDRESS, url), str(CONVERSATIONS), "exec"), scope)
        finally:
            scope["client"].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out == "How do I rotate keys? 40\nAnd how often do they rotate? 40\n"
    assert [(question, len(options.history), options.system) for question, options in stillroom.asked] == [
        ("How do I rotate keys?", 0, "Answer in one sentence."),
        ("And how often do they rotate?", 1, "Answer in one sentence."),
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundled_models, "DEFAULT", "microworld")  # the reader keeps no KV
    with Stillroom.open("kb") as kb:
        kb.add(write_knowledge(tmp_path / "docs"))
    exec(compile(in_python, str(CONVERSATIONS), "exec"), scope)
    assert scope["second"].reuse.num_cached_tokens > 0  # type: ignore[attr-defined]


def test_curl_examples_get_200() -> None:
    commands = [shlex.split(block) for block in blocks("sh") if block.startswith("curl ")]
    assert len(commands) >= 8

    config = StillroomConfig(search=SearchConfig(reranker="fake-reranker"))
    with serving(as_stillroom(FakeStillroom(config=config))) as url:
        for words in commands:
            target = next(word for word in words if word.startswith(ADDRESS)).replace(ADDRESS, url)
            content = words[words.index("-d") + 1] if "-d" in words else None
            response = httpx.post(target, json=json.loads(content)) if content else httpx.get(target)
            if parts := [words[at + 1] for at, word in enumerate(words) if word == "-F"]:
                response = httpx.post(target, **form(parts))
            assert response.status_code == 200, words


def form(parts: list[str]) -> dict[str, Any]:
    """Return what curl's -F would send, with each file's name as its content."""
    named = [part.partition("=") for part in parts]
    names = [value[1:].rpartition(";filename=")[2] for _, _, value in named if value.startswith("@")]
    return {
        "files": [("file", (name, name.encode())) for name in names],
        "data": {field: value for field, _, value in named if not value.startswith("@")},
    }


def test_every_route_is_on_the_page() -> None:
    with serving(as_stillroom(FakeStillroom())) as url:
        routes = httpx.get(f"{url}/openapi.json").json()["paths"]

    page = PAGE.read_text(encoding="utf-8")
    assert all(route.replace("{model}", "{name}").replace("{document:path}", "{document}") in page for route in routes)
