"""`stillroom explain`: why these documents, what of the prompt was reused, what it saved. Reads the diary, no model."""

import datetime
import json
from typing import Annotated, Any

import typer

from stillroom.cli.console import count, duration, line, place, print_json
from stillroom.cli.options import DEFAULT_KB, JsonOption, KbOption, help_text
from stillroom.errors import UsageError
from stillroom.telemetry.trace import TRACE_FILE, TraceLog

HELP = help_text(
    "Explain an answer: its documents, where the KV of each part of its prompt came from and why, and its timing.",
    "A request id is in the JSON of every answer and in its HTTP response. Without one, it is about the last question.",
    "device, host and disk are the tiers that kept KV was found in; what was computed says why it was not found.",
    examples=(
        "stillroom explain --kb ./kb",
        "stillroom explain req-0123456789abcdef --kb ./kb",
        "stillroom explain --json | jq .reuse",
    ),
)


def explain(
    request_id: Annotated[
        str | None, typer.Argument(metavar="REQUEST_ID", help="Of an answer; without it, the last one.")
    ] = None,
    kb: KbOption = DEFAULT_KB,
    as_json: JsonOption = False,
) -> None:
    log = TraceLog(kb / TRACE_FILE, keep=0)
    try:
        found = log.get(request_id)
        earlier = log.sources_of(_behind(found[2])) if found is not None else {}
    finally:
        log.close()
    if found is None:
        which = f"{request_id} is not among the questions remembered" if request_id else "no question is remembered"
        raise UsageError(f"{which} in {kb}; trace.keep says how many are")
    name, at, trace = found
    if as_json:
        print_json({"request_id": name, "at": at, **trace})
        return
    _show(name, at, trace, earlier)


def _behind(trace: dict[str, Any]) -> set[str]:
    """Chunks that stood before the copies that were placed."""
    variants = [segment["variant"] for segment in trace["reuse"]["segments"] if segment.get("variant")]
    return {chunk_id for variant in variants for chunk_id in variant["behind"] if chunk_id is not None}


def _show(name: str, at: float, trace: dict[str, Any], earlier: dict[str, dict[str, Any]]) -> None:
    """
    Args:
        earlier: sources of earlier questions, by chunk.
    """
    when = datetime.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    timing, reuse = trace["timing"], trace["reuse"]
    line(f"{name}  {when}  {trace['model']}")
    if trace["question"]:
        line(f"Question: {trace['question']}")
    line(f"Answer: {json.dumps(trace['text'], ensure_ascii=False)} ({trace['finish_reason']})")
    line()
    line(f"Prompt: {count(reuse['num_prompt_tokens'], 'token')}, {reuse['num_cached_tokens']:,} of them from kept KV")
    by_chunk = {source["chunk_id"]: source for source in trace["sources"]}
    for segment in reuse["segments"]:
        source = by_chunk.get(segment["chunk_id"])
        what = segment["kind"] if source is None else _describe(source)
        again = segment.get("num_recomputed", 0)
        repaired = f"  ({count(again, 'token')} computed again)" if again else ""
        line(f"  {segment['num_tokens']:>6,}  {segment['source']:<8}  {segment['reason']:<20}  {what}{repaired}")
        if variant := segment.get("variant"):
            line(f"{'':>40}{_describe_variant(variant, earlier | by_chunk)}")
    line()
    if reuse["num_cached_tokens"] and reuse["segments"]:
        loads = f", {duration(reuse['load_seconds'])} of loading deducted" if reuse["load_seconds"] else ""
        line(f"Saved: about {duration(max(reuse['saved_seconds'], 0.0))} by the cost profile{loads}")
    if ratio := reuse.get("recompute_ratio"):
        line(f"Repaired: {ratio:.0%} of the tokens of documents that were reused at another place, computed again")
    if overlap := _describe_overlap(trace.get("speculation"), timing):
        line(f"Overlap: {overlap}")
    if timing.get("queue_seconds") is not None:
        parts = ", ".join(f"{name} {duration(timing[f'{name}_seconds'])}" for name in ("queue", "load", "prefill"))
        line(f"Phases: search {duration(timing['retrieval_seconds'])}, {parts}, decode {_decoding(timing)}")
    line(
        f"Timing: retrieval {duration(timing['retrieval_seconds'])}, first token {duration(timing['ttft_seconds'])}, "
        f"total {duration(timing['total_seconds'])} for {count(trace['num_generated_tokens'], 'token')}"
    )


def _decoding(timing: dict[str, Any]) -> str:
    return duration(timing["total_seconds"] - timing["ttft_seconds"])


def _describe_overlap(speculation: dict[str, Any] | None, timing: dict[str, Any]) -> str:
    """What beginning to read before the search had ended gained or cost; nothing where it is off (RAGCache 5.3)."""
    if speculation is None or speculation["outcome"] == "off":
        return ""
    threshold = speculation["break_even_seconds"]
    pays = "" if threshold is None else f"; it pays for searches of {duration(threshold)} or more"
    begun = f"{count(speculation['num_started'], 'prompt')} begun early"
    match speculation["outcome"]:
        case "right":
            ahead = min(speculation["ahead_seconds"], timing["retrieval_seconds"])
            told = f"the model began {duration(ahead)} before the search had ended ({begun})"
        case "wrong":
            told = f"{begun}, for nothing: the search ended with other documents"
        case "none":
            told = "no prompt begun early"
        case _:
            told = "not tried for this question"
    return told + pays


def _describe_variant(variant: dict[str, Any], by_chunk: dict[str, dict[str, Any]]) -> str:
    """Where the copy came from, and what it was expected to take (Cache-Craft 3.1, 3.2)."""
    behind = [
        _name(by_chunk[one]) if one in by_chunk else one or "a document since removed" for one in variant["behind"]
    ]
    parts = [f"computed at position {variant['first_position']:,} behind {', '.join(behind) or 'no document'}"]
    parts.append(f"overlap {variant['overlap']:.2f}")
    parts += [] if variant["impact"] is None else [f"impact {variant['impact']:.2f}"]
    parts.append(f"fix {variant['overhead']:.0%}")
    parts += [] if variant["is_focused"] is None else ["in focus" if variant["is_focused"] else "not in focus"]
    parts.append(f"saves {duration(max(variant['saved_seconds'], 0.0))}")
    return ", ".join(parts)


def _name(source: dict[str, Any]) -> str:
    pages = (source.get("start_page", 0), source.get("end_page", 0))  # a trace of an earlier version has none
    return place(source["document"], (source["start_line"], source["end_line"]), pages)


def _describe(source: dict[str, Any]) -> str:
    """The document, and why it was chosen."""
    where = _name(source)
    scores = ", ".join(f"{name} {score:.4f}" for name, score in source["scores"].items())
    return f"{source['position']}. {where}  score {source['score']:.4f}" + (f" ({scores})" if scores else "")
