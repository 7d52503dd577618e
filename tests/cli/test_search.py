"""`stillroom search` with a fake Stillroom."""

import json
from pathlib import Path

import pytest

from stillroom.config.load import load_config
from tests.cli.harness import Opened, Run
from tests.server.fakes import FakeStillroom


def test_results_are_readable(run: Run, opened: Opened) -> None:
    result = run("search", "rotate keys")

    assert result.code == 0
    assert result.err == ""
    assert result.out == (
        "1. docs/keys.md:3-4\n"
        "   score 1.0000 (dense 0.5, sparse 2)\n"
        "   Keys > Rotation\n"
        "     Rotate keys with care. Twice a year.\n"
        "\n"
    )


def test_json_has_the_fields_of_the_http_reply(run: Run, opened: Opened) -> None:
    body = run("search", "rotate keys", "--json", "--mode", "dense", "-k", "1").json

    assert list(body) == ["query", "mode", "num_reranked", "results", "timing"]
    assert body["mode"] == "dense"
    assert list(body["results"][0]) == [
        "document",
        "chunk_id",
        "text",
        "score",
        "scores",
        "heading",
        "start_line",
        "end_line",
        "start_page",
        "end_page",
        "also_in",
    ]
    assert list(body["timing"]) == ["embed_seconds", "search_seconds", "rerank_seconds", "total_seconds"]


def test_empty_result_is_noted_on_stderr(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    fake.texts = {}

    result = run("search", "x")

    assert (result.code, result.out, result.err) == (0, "", "no chunk was found\n")
    assert run("search", "x", "--json").json["results"] == []


def test_document_under_the_current_folder_is_shown_relative_to_it(
    run: Run, opened: Opened, fake: FakeStillroom, tmp_path: Path
) -> None:
    fake.texts = {str(tmp_path / "docs" / "a.md"): "text", "/b.md": "text"}

    out = run("search", "x").out

    assert ". docs/a.md:3-4\n" in out
    assert ". /b.md:3-4\n" in out


def test_long_text_is_cut_to_a_snippet(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    fake.texts = {"a.md": "word " * 500}

    lines = run("search", "x").out.splitlines()

    assert len(lines) == 7
    assert lines[5].endswith(" ...")
    assert max(map(len, lines)) <= 100


def test_control_characters_of_chunks_are_replaced(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    fake.texts = {"a.md": "before \x1b[31mred\x07 \x9b2J after"}

    out = run("search", "x").out

    assert not {"\x1b", "\x07", "\x9b"} & set(out)
    assert "\N{REPLACEMENT CHARACTER}[31mred" in out
    as_json = run("search", "x", "--json").out
    assert not {"\x1b", "\x07", "\x9b"} & set(as_json)
    assert json.loads(as_json)["results"][0]["text"] == fake.texts["a.md"]


def test_kb_and_settings_reach_the_stillroom(run: Run, opened: Opened, tmp_path: Path) -> None:
    Path("my.toml").write_text("[search]\nrank_constant = 10\n")

    run("search", "x", "--kb", "elsewhere", "--config", "my.toml", "--mode", "sparse")

    [(kb, config, create)] = opened.calls
    assert (kb, create) == (Path("elsewhere"), False)
    assert config == load_config(env={}, overrides={"search.rank_constant": 10, "search.mode": "sparse"})


def test_knowledge_base_comes_from_the_environment(run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLROOM_KB", "from-env")

    run("search", "x")

    assert opened.calls[0][0] == Path("from-env")


def test_paths_may_begin_with_a_tilde(
    run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/my.toml").write_text("[search]\ntop_k = 3\n")
    monkeypatch.setenv("STILLROOM_KB", "~/from-env")

    run("search", "x", "--config=~/my.toml")
    run("search", "x", "--kb=~/kb")
    run("search", "x", "--kb=~no-such-user/kb")

    folders = [tmp_path / "home/from-env", tmp_path / "home/kb", Path("~no-such-user/kb")]
    assert [kb for kb, _, _ in opened.calls] == folders
    assert opened.calls[0][1].search.top_k == 3
