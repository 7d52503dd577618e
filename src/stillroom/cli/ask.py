"""`stillroom ask`: print answers as they are generated, then their citations, sources and timing."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli import console, opening
from stillroom.cli.citations import show_citations, show_sources
from stillroom.cli.console import as_text, described_hop, duration, line, print_json, write
from stillroom.cli.options import (
    DEFAULT_KB,
    AnnRecallOption,
    BaseUrlOption,
    ConfigOption,
    EngineModelOption,
    EngineOption,
    EnginesOption,
    FrequencyPenaltyOption,
    HopsOption,
    JsonOption,
    KbOption,
    KvTierOption,
    MaxTokensOption,
    MinPOption,
    MinTokensOption,
    ModelOption,
    ModeOption,
    PresencePenaltyOption,
    QuietOption,
    RepetitionPenaltyOption,
    ReuseOption,
    SampleTopKOption,
    SearchBudgetOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WhereOption,
    engine_settings,
    expanded,
    filter_text,
    help_text,
    index_goal,
)
from stillroom.errors import NothingFoundError, StillroomError, UsageError

if TYPE_CHECKING:
    from stillroom.rag.answer import Answer, AskOptions
    from stillroom.rag.hops import Hop
    from stillroom.rag.stillroom import Stillroom

STDIN = "-"

HELP = help_text(
    "Answer questions from the documents.",
    "Prints the answer as it is generated, then its citations, its sources and one line of timing. Several questions "
    "are answered in turn by one loaded model; - reads questions from stdin, one per line. Without `--model`, the "
    "bundled reader answers.",
    "If no document is found, nothing is generated and the exit code is 1 (2 if there are several questions, after all "
    "of them).",
    "With --json, one question prints one indented object; several print one object per line (JSON Lines).",
    examples=(
        "stillroom ask 'How do I rotate keys?' --kb ./kb",
        "stillroom ask 'How do I rotate keys?' --model ./models/qwen2.5-0.5b",
        "stillroom ask 'How do I rotate keys?' --engine openai --base-url http://127.0.0.1:8000/v1",
        "stillroom ask 'What is the notice period?' --where 'year >= 2020 and team = legal'",
        "stillroom ask 'Who leads the team that owns the parser?' --hops 2",
        "stillroom ask 'How do I rotate keys?' --quiet        # only the answer",
        "stillroom ask - --json < questions.txt > answers.jsonl",
    ),
)


@dataclass(frozen=True, slots=True)
class _Style:
    as_json: bool
    is_quiet: bool
    is_series: bool
    """Whether there can be more than one question."""


_PER_QUESTION_ONLY = (("max_tokens", -1), ("sample_top_k", -1), ("seed", -1))
"""Values that are valid for a question, but not as a setting."""


def ask(  # noqa: PLR0913  one parameter per flag
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION", help="Questions; - reads them from stdin.")],
    kb: KbOption = DEFAULT_KB,
    model: ModelOption = None,
    engine: EngineOption = None,
    base_url: BaseUrlOption = None,
    engine_model: EngineModelOption = None,
    engines: EnginesOption = None,
    top_k: TopKOption = None,
    mode: ModeOption = None,
    where: WhereOption = None,
    hops: HopsOption = None,
    reuse: ReuseOption = None,
    kv_tier: KvTierOption = None,
    ann_recall: AnnRecallOption = None,
    search_budget: SearchBudgetOption = None,
    max_tokens: MaxTokensOption = None,
    min_tokens: MinTokensOption = 0,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    sample_top_k: SampleTopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    seed: SeedOption = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the answer before this text; repeatable."),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            "--json-schema",
            metavar="FILE",
            callback=expanded,
            help="Force the answer to be JSON that matches the schema in this file.",
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "sample_top_k": sample_top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    flags: dict[str, object] = {
        "runtime.model": model,
        "reuse.mode": reuse,
        "reuse.kv_tier": kv_tier,
        "search.top_k": top_k,
        "search.mode": mode,
        "search.hops": hops,
        **{f"generation.{name}": value for name, value in sampling.items() if (name, value) not in _PER_QUESTION_ONLY},
        **engine_settings(engine, base_url, engine_model, engines),
        **index_goal(ann_recall, search_budget),
    }
    settings = opening.load_settings(config, flags)
    from stillroom.rag.answer import AskOptions

    if stop and not all(stop):
        raise UsageError("--stop '': the text is empty; give a text, or leave --stop out")
    options = AskOptions(
        mode=mode,
        top_k=top_k,
        where=filter_text(where),
        on_hop=None if as_json or quiet else _show_hop,
        min_tokens=min_tokens,
        **sampling,
        stop=tuple(stop or ()),
        json_schema=None if json_schema is None else _read_schema(json_schema),
    )
    style = _Style(as_json, quiet, is_series=len(questions) > 1 or STDIN in questions)
    failure: StillroomError | None = None
    with opening.open_stillroom(kb, settings) as opened:
        for text in opened.warnings:
            console.note(f"warning: {text}")
        if not style.is_series:
            opened.expect_few_questions()
        opened.warm_up()  # keeps loading out of the first question's timing
        for question in _each(questions):
            try:
                _answer(opened, question, options, style)
            except (UsageError, NothingFoundError) as error:  # the other questions can still be answered
                if not style.is_series:
                    raise
                message = f"{question}: {error}"
                console.error(type(error).__name__, message if as_json else f"error: {message}", as_json=as_json)
                failure = error
    if failure is not None:
        raise UsageError("some questions were not answered; see the errors above") from failure


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--json-schema {path}: {error}") from None
    if not isinstance(schema, dict):
        raise UsageError(f"--json-schema {path}: a schema must be a JSON object")
    return schema


def _each(questions: list[str]) -> Iterator[str]:
    """Raises UsageError: there is no question, because stdin is empty."""
    is_empty = True
    for question in questions:
        for text in filter(None, map(str.strip, sys.stdin)) if question == STDIN else [question]:
            is_empty = False
            yield text
    if is_empty:
        raise UsageError("stdin has no question; write one per line")


def _answer(opened: "Stillroom", question: str, options: "AskOptions", style: _Style) -> None:
    as_text("the question", question)
    if style.as_json:
        from stillroom.rag.as_json import answer_as_json

        printed = answer_as_json(question, opened.ask(question, options))
        print_json(printed, indent=None if style.is_series else 2)
        return
    stream = opened.stream(question, options)
    if style.is_series and not style.is_quiet:
        line(f"Question: {question}")
    for piece in stream:
        write(piece)
    line()
    if not style.is_quiet:
        show_citations(stream.answer)
        show_sources(stream.answer)
        if stream.answer.confidence is not None:
            line(f"Confidence: {stream.answer.confidence:.2f}")
        line(_costs(stream.answer))
        for text in stream.answer.warnings:
            if text not in opened.warnings:
                console.note(f"warning: {text}")
        if style.is_series:
            line()


def _show_hop(hop: "Hop") -> None:
    console.note(described_hop(hop.question, len(hop.sources), hop.answer, hop.end))


def _costs(answer: "Answer") -> str:
    timing, reuse = answer.timing, answer.reuse
    per_token = f"{duration(timing.tpot_seconds)} per token, " if timing.tpot_seconds else ""
    prompt = f"{reuse.num_prompt_tokens:,} prompt tokens, {reuse.num_cached_tokens:,} cached"
    return (
        f"Timing: retrieval {duration(timing.retrieval_seconds)}, first token {duration(timing.ttft_seconds)}, "
        f"{per_token}total {duration(timing.total_seconds)}"
        + (f"; {prompt}" if reuse.num_prompt_tokens else "")  # some remote engines do not count tokens
    )
