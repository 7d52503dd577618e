"""An answer with citations and the document that it cites, as the server sends them, for pages without a model."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

DOCUMENT = "files/517e2f0c9a1b/keys.md"
PARAGRAPHS = [
    {
        "text": f"Paragraph {number} is about keys,\nand says that {number} of them are enough.",
        "heading_path": ["Keys"] if number < 5 else ["Keys", "Rotation"],
        "start_line": 3 * number + 1,
        "end_line": 3 * number + 2,
        "start_page": 0,
        "end_page": 0,
    }
    for number in range(40)
]
CONTENT = {
    "document": DOCUMENT,
    "title": "The <keys> page",
    "has_more": False,
    "has_file": True,
    "paragraphs": PARAGRAPHS,
}


def source(position: int, paragraph: int) -> dict[str, Any]:
    """The source with a paragraph of the document."""
    place = PARAGRAPHS[paragraph]
    return {
        "document": DOCUMENT,
        "chunk_id": f"{position:x}",
        "text": place["text"],
        "score": 1 / (position + 1),
        "scores": {"dense": 0.5},
        "position": position,
        "heading": "Keys > Rotation",
        "start_line": place["start_line"],
        "end_line": place["end_line"],
        "start_page": 0,
        "end_page": 0,
        "turns_ago": 0,
    }


def citation(text: str, sentence: str, number: int, paragraph: int, quote: str, **fields: Any) -> dict[str, Any]:
    """A citation of a sentence of `text`. Offsets count characters."""
    start = text.index(sentence)
    found = source(number, paragraph)
    place = {name: found[name] for name in ("document", "chunk_id", "heading", "start_line", "end_line")}
    own = {"source": number, "quote": quote, "start": start, "end": start + len(sentence)}
    rest = {"start_page": 0, "end_page": 0, "quote_start": 0, "quote_end": len(quote)}
    return {**place, **rest, **own, "is_explicit": True, "support": "supported", **fields}


def serve_answer(page: "Page", text: str, **details: Any) -> None:
    """Let the page get this answer to every question; `details` are fields of the last event's `stillroom`."""
    sources = details.pop("sources", [source(1, 30), source(2, 2)])
    timing = {"retrieval_seconds": 0.01, "ttft_seconds": 0.21, "tpot_seconds": 0.01, "total_seconds": 0.5}
    reuse = {"num_prompt_tokens": 0, "num_cached_tokens": 0, "saved_seconds": 0.0, "segments": []}
    last = {"request_id": "req-1", "timing": timing, "reuse": reuse, **details}
    pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
    events = [
        _event({}, stillroom={"request_id": "req-1", "sources": sources}),
        *(_event({"content": piece}) for piece in pieces),
        _event({}, finish_reason="stop", stillroom=last),
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def answer(route: "Route") -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    page.route("**/content", lambda route: route.fulfill(status=200, json=CONTENT))


def _event(delta: dict[str, str], finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **fields}


def wait_for_text(locator: "Locator", text: str) -> None:
    """Wait until an element says exactly this.

    `page.wait_for_function` would evaluate a string in the page again and again, which the page's own policy forbids.
    """
    from playwright.sync_api import expect

    expect(locator).to_have_text(text, timeout=20_000)
