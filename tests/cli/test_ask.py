"""`stillroom ask` with a fake Stillroom, which answers with the question."""

import dataclasses
import io
import json
import os
import sys
from pathlib import Path

import pytest

from stillroom.cli.console import shows_links
from stillroom.config.settings import GenerationConfig
from stillroom.core.document import SearchResult
from stillroom.core.ids import DocumentId, RequestId
from stillroom.rag.answer import AskOptions, Citation, Support
from stillroom.rag.hops import Hop, HopEnd, HopSource
from tests.cli.harness import Opened, Run
from tests.server.fake_stream import FakeStream
from tests.server.fakes import FakeStillroom

QUESTION = "How do I rotate keys?"
KEYS = ["question", "text", "token_ids", "finish_reason", "request_id", "sources", "highlight", "confidence"]
KEYS += ["warnings", "timing", "reuse", "speculation", "lookup", "citations", "hops", "route", "num_generated_tokens"]


def test_answer_sources_and_timing(run: Run, opened: Opened) -> None:
    result = run("ask", QUESTION)

    assert result.code == 0
    assert result.err == ""
    assert result.out == (
        "How do I rotate keys?\n"
        "\n"
        "Sources:\n"
        "  1. 1.0000  docs/keys.md:3-4  Keys > Rotation\n"
        "Timing: retrieval 10 ms, first token 20 ms, 1 ms per token, total 50 ms; 100 prompt tokens, 40 cached\n"
    )


def test_other_places_of_a_source_are_named(
    run: Run, opened: Opened, fake: FakeStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fake.search(QUESTION)
    copy = dataclasses.replace(found.results[0].chunk, document_id=DocumentId("docs/copy.md"), start_line=7, end_line=9)
    scored = dataclasses.replace(found.results[0], copies=(copy,))
    monkeypatch.setattr(fake, "search", lambda *_, **__: SearchResult((scored,)))

    assert "docs/keys.md:3-4  Keys > Rotation\n     also in docs/copy.md:7-9\n" in run("ask", QUESTION).out
    [source] = run("ask", QUESTION, "--json").json["sources"]
    assert [(one["document"], one["start_line"]) for one in source["also_in"]] == [("docs/copy.md", 7)]


def _citation(source: int, support: Support, quote: str, span: tuple[int, int]) -> Citation:
    document = "docs/keys.md" if source else ""
    heading = "Keys > Rotation" if source else ""
    lines = (3, 3) if source else (0, 0)
    return Citation(source, document, "c1", heading, *lines, 0, 0, quote, 0, len(quote), *span, False, support)


def test_a_quote_that_is_the_whole_answer_is_printed_once(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    fake.citations = (_citation(1, Support.SUPPORTED, "How do I\nrotate keys?", (0, 21)),)
    assert run("ask", QUESTION).out.startswith(
        "How do I rotate keys?\n\nCitations:\n  [1] docs/keys.md:3  Keys > Rotation\n\nSources:\n"
    )


def test_confidence_of_a_reader_is_printed(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    fake.confidence = 0.228

    assert "\nConfidence: 0.23\nTiming: " in run("ask", QUESTION).out


def test_citations_are_printed_with_place_quote_and_mark(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    fake.citations = (
        _citation(1, Support.SUPPORTED, "How Do\nI see keys.", (0, 3)),
        _citation(1, Support.SUPPORTED, "How Do\nI see keys.", (4, 6)),
        _citation(1, Support.SUPPORTED, "It is monthly.", (9, 15)),
        _citation(1, Support.PARTLY, "Keys expire never.", (4, 8)),
        _citation(0, Support.UNSUPPORTED, "", (9, 21)),
    )
    result = run("ask", QUESTION)

    assert result.out.startswith(
        "How do I rotate keys?\n"
        "\n"
        "Citations:\n"
        "  [1] docs/keys.md:3  Keys > Rotation\n"
        "      How Do I see keys.\n"
        "  [1] docs/keys.md:3  Keys > Rotation\n"
        "      sentence: rotate [1]\n"
        "      source: It is monthly.\n"
        "  [1] docs/keys.md:3  Keys > Rotation  (partly supported)\n"
        "      sentence: do I [1]\n"
        "      source: Keys expire never.\n"
        "  [-] not supported by the sources\n"
        "      sentence: rotate keys?\n"
        "\n"
        "Sources:\n"
    )
    assert "\x1b" not in result.out


@pytest.mark.parametrize(("forced", "is_linked"), [("1", True), ("0", False), ("", False)])
def test_places_are_links_where_the_terminal_shows_them(
    run: Run, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: str, is_linked: bool
) -> None:
    (tmp_path / "docs").mkdir()
    file = tmp_path / "docs" / "keys.md"
    file.write_text("# Keys")
    monkeypatch.setenv("FORCE_HYPERLINK", forced)
    out = run("ask", QUESTION).out

    link = f"\x1b]8;;{file.as_uri()}\x1b\\docs/keys.md:3-4\x1b]8;;\x1b\\"
    assert (f"  1. 1.0000  {link}  Keys > Rotation\n" in out) is is_linked
    assert ("\x1b" in out) is is_linked


@pytest.mark.parametrize(
    ("environment", "is_linked"),
    [
        ({"TERM_PROGRAM": "WezTerm"}, True),
        ({"VTE_VERSION": "7600", "TERM": "xterm-256color"}, True),
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm-kitty", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb", "VTE_VERSION": "7600"}, False),
        ({"TERM": "xterm-256color"}, False),
    ],
)
def test_links_are_shown_by_known_terminals(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_linked: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert shows_links() is is_linked
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not shows_links()


def test_models_are_loaded_before_the_first_question_is_timed(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    run("ask", QUESTION)

    assert fake.is_warm


def test_only_a_single_question_skips_what_pays_for_many(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    assert run("ask", QUESTION, QUESTION).code == 0 and not fake.expects_few_questions
    assert run("ask", QUESTION).code == 0 and fake.expects_few_questions


def test_quiet_is_the_answer_and_nothing_else(run: Run, opened: Opened) -> None:
    result = run("ask", QUESTION, "--quiet")

    assert (result.out, result.err) == (f"{QUESTION}\n", "")


def test_one_question_is_one_indented_object(run: Run, opened: Opened) -> None:
    result = run("ask", QUESTION, "--json")

    assert list(result.json) == KEYS
    assert result.out.startswith('{\n  "question": "How do I rotate keys?",\n')
    assert result.json["text"] == QUESTION
    assert result.json["sources"][0]["position"] == 1
    assert result.json["reuse"]["num_cached_tokens"] == 40


def test_several_questions_are_one_object_a_line(run: Run, opened: Opened) -> None:
    lines = run("ask", "first one", "second one", "--json").out.splitlines()

    assert [json.loads(line)["text"] for line in lines] == ["first one", "second one"]
    assert len(opened.calls) == 1


def test_several_questions_in_text_name_each_question(run: Run, opened: Opened) -> None:
    out = run("ask", "first one", "second one").out

    assert out.startswith("Question: first one\nfirst one\n\nSources:\n")
    assert "\n\nQuestion: second one\nsecond one\n" in out


def test_dash_reads_questions_from_stdin(run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first one\n\n  second one\n"))

    lines = run("ask", "-", "last one", "--json").out.splitlines()

    assert [json.loads(line)["question"] for line in lines] == ["first one", "second one", "last one"]


def test_stdin_without_a_question_is_an_error(run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n  \n"))
    result = run("ask", "-")
    assert (result.code, result.err) == (2, "error: stdin has no question; write one per line\n")


def test_single_question_from_stdin_is_still_one_line(
    run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("only one\n"))

    assert len(run("ask", "-", "--json").out.splitlines()) == 1


def test_question_that_cannot_be_answered_does_not_stop_the_others(
    run: Run, opened: Opened, fake: FakeStillroom
) -> None:
    result = run("ask", "first one", " ", "last one", "--json")

    assert result.code == 2
    assert [json.loads(line)["question"] for line in result.out.splitlines()] == ["first one", "last one"]
    first, last = (json.loads(line)["error"]["message"] for line in result.err.splitlines())
    assert "the question is empty" in first
    assert last == "some questions were not answered; see the errors above"


def test_question_without_documents_exits_1_without_an_answer(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    result = run("ask", QUESTION, "--where", "team = nothing")
    assert (result.code, result.out) == (1, "") and "no document was found" in result.err
    result = run("ask", QUESTION, "--where", "team = nothing", "--json")
    assert result.out == "" and json.loads(result.err)["error"]["type"] == "NothingFoundError"


def test_minus_one_is_valid_for_limits_and_seed(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    assert run("ask", QUESTION, *["--max-tokens", "-1", "--sample-top-k", "-1", "--seed", "-1"]).code == 0
    [(_, options)] = fake.asked
    assert (options.max_tokens, options.sample_top_k, options.seed) == (-1, -1, -1)


def test_options_reach_the_stillroom(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    flags = "-k 3 --mode dense --max-tokens 7 --temperature 0.5 --top-p 0.9 --seed 5 --stop a --stop b --model m"

    run("ask", QUESTION, *flags.split())

    expected = AskOptions(mode="dense", top_k=3, max_tokens=7, temperature=0.5, top_p=0.9, seed=5, stop=("a", "b"))
    assert fake.asked == [(QUESTION, expected)]
    assert opened.calls[0][1].runtime.model == "m"


def test_every_generation_setting_has_a_flag(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    """The first assertion fails for a setting without a flag."""
    limits = {"max_prompt_tokens": 0, "citations": True, "ask_for_citations": False, "chunk_order": "rank"}
    values = {field.name: 0.5 for field in dataclasses.fields(GenerationConfig) if field.name not in limits}
    values |= {"max_tokens": 7, "sample_top_k": 3, "seed": 5}
    flags = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]

    assert run("ask", QUESTION, *flags, "--min-tokens", "2").code == 0

    assert fake.asked == [(QUESTION, AskOptions(min_tokens=2, **values))]  # type: ignore[arg-type]
    assert dataclasses.asdict(opened.calls[0][1].generation) == values | limits


def test_json_schema_is_read_from_a_file(run: Run, opened: Opened, fake: FakeStillroom, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "list.json").write_text("[]")

    run("ask", QUESTION, "--json-schema", "schema.json")

    assert fake.asked == [(QUESTION, AskOptions(json_schema={"type": "integer"}))]
    for bad, complaint in (("list.json", "must be a JSON object"), ("nowhere.json", "No such file")):
        result = run("ask", QUESTION, "--json-schema", bad)
        assert result.code == 2 and complaint in result.err


def test_empty_stop_string_is_refused(run: Run, opened: Opened) -> None:
    assert "the text is empty" in run("ask", QUESTION, "--stop", "").err


def test_base_url_alone_selects_the_openai_engine(run: Run, opened: Opened) -> None:
    run("ask", QUESTION, "--base-url", "http://host:8000", "--engine-model", "m")
    run("ask", QUESTION, "--base-url", "http://host:8000", "--engine", "builtin")
    run("ask", QUESTION, "--base-url", "http://a", "--base-url", "http://b")

    first, second, several = (config.engine for _, config, _ in opened.calls)
    assert (first.kind, first.base_url, first.model) == ("openai", "http://host:8000", "m")
    assert second.kind == "builtin"
    assert several.base_urls == ("http://a/v1", "http://b/v1")


def test_openai_engine_needs_an_address(run: Run, opened: Opened) -> None:
    result = run("ask", QUESTION, "--engine", "openai")

    assert (result.code, opened.calls) == (2, [])
    assert "--base-url" in result.err


def test_failure_in_the_middle_keeps_what_came_before(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    fake.fails_at = "rotate"

    result = run("ask", QUESTION)

    assert result.code == 1
    assert result.out.startswith("How do I")
    assert result.err == "error: the fake failed on purpose\n"


def test_control_characters_of_an_answer_are_replaced(run: Run, opened: Opened) -> None:
    assert "\x1b" not in run("ask", "a \x1b[2J b").out


def test_hops_are_noted_as_they_happen(run: Run, opened: Opened, fake: FakeStillroom) -> None:
    source = HopSource("docs/keys.md", "c1", 0.5, "Keys", 3, 4, 0, 0)
    hops = (
        Hop(RequestId("req-1"), QUESTION, (source,), "yearly"),
        Hop(RequestId("req-1"), f"{QUESTION}\nyearly", (), None, HopEnd.NOTHING_NEW),
    )
    stream = fake.stream

    def hopping(question: str, options: AskOptions | None = None) -> FakeStream:
        assert options is not None
        for hop in hops if options.on_hop else ():
            options.on_hop(hop)  # type: ignore[misc]
        return stream(question, options)

    fake.stream = hopping  # type: ignore[method-assign]
    result = run("ask", QUESTION, "--hops", "2")
    assert result.err == (
        "Hop: How do I rotate keys? (1 new document; so far: yearly)\n"
        "Hop: How do I rotate keys? yearly (0 new documents; last: nothing new)\n"
    )
    assert opened.calls[0][1].search.hops == 2
    assert run("ask", QUESTION, "--hops", "2", "--quiet").err == ""

    fake.answered_hops = hops
    found = run("ask", QUESTION, "--hops", "2", "--json")
    assert found.err == "" and [hop["answer"] for hop in found.json["hops"]] == ["yearly", None]
