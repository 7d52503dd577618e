"""`stillroom explain`: show an answer's sources, reused KV and timing from the request log. Needs no model."""

import datetime
import json
from typing import Annotated, Any

import typer

from stillroom.cli.console import count, described_hop, duration, line, place, print_json
from stillroom.cli.options import DEFAULT_KB, JsonOption, KbOption, help_text
from stillroom.core.kv import FULL_BITS
from stillroom.core.reuse import Reason
from stillroom.errors import UsageError
from stillroom.telemetry.trace import TRACE_FILE, TraceLog

HELP = help_text(
    "Explain an answer: its documents, the source of each prompt part's KV, and its timing.",
    "Every answer's JSON and HTTP response contain its request id. Without one, the last question is explained.",
    "device, host and disk are the tiers in which kept KV was found; computed parts show why none was found.",
    examples=(
        "stillroom explain --kb ./kb",
        "stillroom explain req-0123456789abcdef --kb ./kb",
        "stillroom explain --json | jq .reuse",
    ),
)


def explain(
    request_id: Annotated[
        str | None, typer.Argument(metavar="REQUEST_ID", help="Id of the request; default: the last one.")
    ] = None,
    kb: KbOption = DEFAULT_KB,
    as_json: JsonOption = False,
) -> None:
    log = TraceLog(kb / TRACE_FILE, keep=0)
    try:
        found = log.get(request_id)
        earlier = log.sources_of(_preceding_chunks(found[2])) if found is not None else {}
    finally:
        log.close()
    if found is None:
        which = f"{request_id} is not in the request log of {kb}" if request_id else f"the request log of {kb} is empty"
        raise UsageError(f"{which}; the setting trace.keep limits how many questions it holds")
    name, at, trace = found
    if as_json:
        print_json({"request_id": name, "at": at, **trace})
        return
    _show(name, at, trace, earlier)


def _preceding_chunks(trace: dict[str, Any]) -> set[str]:
    """Return the chunks that preceded the reused copies when these were computed."""
    variants = [segment["variant"] for segment in trace["reuse"]["segments"] if segment.get("variant")]
    return {chunk_id for variant in variants for chunk_id in variant["behind"] if chunk_id is not None}


def _show(name: str, at: float, trace: dict[str, Any], earlier: dict[str, dict[str, Any]]) -> None:
    """Print one question.

    Args:
        earlier: sources of earlier questions, by chunk id.
    """
    timing, reuse = trace["timing"], trace["reuse"]
    _show_answer(name, at, trace)
    line()
    line(f"Prompt: {count(reuse['num_prompt_tokens'], 'token')}, {reuse['num_cached_tokens']:,} of them from kept KV")
    by_chunk = {source["chunk_id"]: source for source in trace["sources"]}
    for source in [] if reuse["segments"] else trace["sources"]:  # the engine does not report segments
        line(f"  {_describe(source)}")
    for segment in reuse["segments"]:
        source = by_chunk.get(segment["chunk_id"])
        what = segment["kind"] if source is None else _describe(source)
        again = segment.get("num_recomputed", 0)
        repaired = f"  ({count(again, 'token')} recomputed)" if again else ""
        line(f"  {segment['num_tokens']:>6,}  {segment['source']:<8}  {segment['reason']:<20}  {what}{repaired}")
        if variant := segment.get("variant"):
            is_prepared = segment["reason"] == Reason.PREPARED
            told = _describe_prepared(variant) if is_prepared else _describe_variant(variant, earlier | by_chunk)
            line(f"{'':>40}{told}")
    if route := trace.get("route"):  # older records have none
        line(f"Engine: {_describe_route(route)}")
    line()
    if reuse["num_cached_tokens"] and reuse["segments"]:
        loads = f", after deducting {duration(reuse['load_seconds'])} for loading" if reuse["load_seconds"] else ""
        line(f"Saved: about {duration(max(reuse['saved_seconds'], 0.0))} according to the cost profile{loads}")
    if ratio := reuse.get("recompute_ratio"):
        line(f"Recomputed: {ratio:.0%} of the tokens of documents reused at another position")
    if overlap := _describe_overlap(trace.get("speculation"), timing):
        line(f"Overlap: {overlap}")
    if timing.get("queue_seconds") is not None:
        parts = ", ".join(f"{name} {duration(timing[f'{name}_seconds'])}" for name in ("queue", "load", "prefill"))
        line(f"Phases: search {duration(timing['retrieval_seconds'])}, {parts}, decode {_decoding(timing)}")
    lookup = trace.get("lookup")  # older records have none
    if lookup and lookup["num_proposed"]:
        line(f"Lookup: {lookup['num_accepted']:,} of {count(lookup['num_proposed'], 'proposed token')} accepted")
    line(
        f"Timing: retrieval {duration(timing['retrieval_seconds'])}, first token {duration(timing['ttft_seconds'])}, "
        f"total {duration(timing['total_seconds'])} for {count(trace['num_generated_tokens'], 'token')}"
    )


def _show_answer(name: str, at: float, trace: dict[str, Any]) -> None:
    when = datetime.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    line(f"{name}  {when}  {trace['model']}")
    if trace["question"]:
        line(f"Question: {trace['question']}")
    line(f"Answer: {json.dumps(trace['text'], ensure_ascii=False)} ({trace['finish_reason']})")
    if citations := trace.get("citations"):
        line(f"Citations: {', '.join(map(_describe_citation, citations))}")
    if (confidence := trace.get("confidence")) is not None:
        line(f"Confidence: {confidence:.2f}")
    for hop in trace.get("hops", []):  # older records have none
        line(described_hop(hop["question"], len(hop["sources"]), hop["answer"], hop["end"]))
        if hop["num_prompt_tokens"]:
            line(
                f"  read {hop['num_prompt_tokens']:,} prompt tokens, {hop['num_cached_tokens']:,} of them from kept KV"
            )
        for source in hop["sources"]:
            line(f"  {_name(source)}  score {source['score']:.4f}")


def _describe_citation(citation: dict[str, Any]) -> str:
    number = f"[{citation['source']}] " if citation["source"] else ""
    return number + {"partly": "partly supported", "unsupported": "not supported"}.get(citation["support"], "supported")


def _decoding(timing: dict[str, Any]) -> str:
    return duration(timing["total_seconds"] - timing["ttft_seconds"])


def _describe_overlap(speculation: dict[str, Any] | None, timing: dict[str, Any]) -> str:
    """Describe the gain or cost of speculative prefill (RAGCache 5.3); empty if it is off."""
    if speculation is None or speculation["outcome"] == "off":
        return ""
    threshold = speculation["break_even_seconds"]
    pays = "" if threshold is None else f"; it pays off for searches of {duration(threshold)} or more"
    begun = f"{count(speculation['num_started'], 'prompt')} started early"
    match speculation["outcome"]:
        case "right":
            ahead = min(speculation["ahead_seconds"], timing["retrieval_seconds"])
            told = f"the model began {duration(ahead)} before the search ended ({begun})"
        case "wrong":
            told = f"{begun} in vain: the search ended with other documents"
        case "none":
            told = "no prompt started early"
        case _:
            told = "not tried for this question"
    return told + pays


def _describe_route(route: dict[str, Any]) -> str:
    """Describe why an engine of a cluster, or a server of a remote engine, was chosen, and what happened before."""
    kept, moved = count(route["num_expected_tokens"], "token"), route["num_migrations"]
    rest = ", the last of which had begun the answer" if route["is_resumed"] else ""
    if (seconds := route["predicted_seconds"]) is None:
        parts = [f"believed to have about {kept} of the prompt cached"]
        parts += [f"after {count(moved, 'failed attempt')}{rest}"] if moved else []
    else:
        parts = [f"chosen for a first token in {duration(seconds)}, with {kept} from kept KV"]
        parts += [f"after {count(moved, 'engine')} that did not complete it{rest}"] if moved else []
    return "; ".join([route["engine"], *parts])


def _describe_variant(variant: dict[str, Any], by_chunk: dict[str, dict[str, Any]]) -> str:
    """Describe the reused copy and its predicted cost (Cache-Craft 3.1, 3.2)."""
    behind = [_name(by_chunk[one]) if one in by_chunk else one or "a removed document" for one in variant["behind"]]
    parts = [f"computed at position {variant['first_position']:,} after {', '.join(behind) or 'no document'}"]
    parts.append(f"overlap {variant['overlap']:.2f}")
    parts += [] if variant["impact"] is None else [f"impact {variant['impact']:.2f}"]
    parts.append(f"recompute {variant['overhead']:.0%}")
    parts += [] if variant["is_focused"] is None else ["in focus" if variant["is_focused"] else "not in focus"]
    parts.append(f"saves {duration(max(variant['saved_seconds'], 0.0))}")
    return ", ".join(parts)


def _describe_prepared(variant: dict[str, Any]) -> str:
    """Describe a copy in its document's context (docs/prepared.md)."""
    behind = variant["behind"]
    context = f"behind {count(len(behind), 'chunk')} of its document" if behind else "at the beginning of its document"
    saved = duration(max(variant["saved_seconds"], 0.0))
    narrow = f"; read in {bits} bits a number" if (bits := variant.get("bits", FULL_BITS)) != FULL_BITS else ""
    return f"computed in advance at position {variant['first_position']:,}, {context}{narrow}; saves {saved}"


def _name(source: dict[str, Any]) -> str:
    pages = (source.get("start_page", 0), source.get("end_page", 0))  # traces of earlier versions have no pages
    return place(source["document"], (source["start_line"], source["end_line"]), pages)


def _describe(source: dict[str, Any]) -> str:
    where = _name(source)
    scores = ", ".join(f"{name} {score:.4f}" for name, score in source["scores"].items())
    return f"{source['position']}. {where}  score {source['score']:.4f}" + (f" ({scores})" if scores else "")
