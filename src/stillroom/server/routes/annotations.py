"""Citations of an answer for HTTP clients: with public document ids, and as annotations in OpenAI's form."""

from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

from stillroom.core.ids import public_id
from stillroom.rag.answer import Answer, Citation, Source, Support
from stillroom.rag.as_json import JsonObject
from stillroom.rag.hops import Hop
from stillroom.server.schemas.replies import Annotation, UrlCitation


def public_sources(sources: Sequence[Source]) -> list[Source]:
    """Replace document ids by those that clients see."""
    return [
        replace(
            source,
            document=public_id(source.document),
            also_in=tuple(replace(copy, document=public_id(copy.document)) for copy in source.also_in),
        )
        for source in sources
    ]


def public_record(record: JsonObject) -> JsonObject:
    """Return the record of a question with the document ids that clients see in its sources and hops."""
    sources = [
        _public_place(source) | {"also_in": list(map(_public_place, source.get("also_in", ())))}  # older ones have none
        for source in record["sources"]
    ]
    hops = [hop | {"sources": list(map(_public_place, hop["sources"]))} for hop in record.get("hops", ())]
    return record | {"sources": sources, "hops": hops}


def _public_place(place: JsonObject) -> JsonObject:
    return place | {"document": public_id(place["document"])}


def public_hop(hop: Hop) -> Hop:
    """Return the hop with the document ids that clients see."""
    return replace(hop, sources=tuple(replace(one, document=public_id(one.document)) for one in hop.sources))


def public_answer(answer: Answer) -> Answer:
    """Return the answer with the document ids that clients see in its citations and hops."""
    shown = (replace(citation, document=public_id(citation.document)) for citation in answer.citations)
    return replace(answer, citations=tuple(shown), hops=tuple(map(public_hop, answer.hops)))


def annotations_of(answer: Answer) -> list[Annotation]:
    """Return an annotation for each citation that its source supports, fully or partly.

    Args:
        answer: with public document ids.
    """
    return [_annotation(one) for one in answer.citations if one.source and one.support is not Support.UNSUPPORTED]


def _annotation(citation: Citation) -> Annotation:
    title = citation.heading or citation.document.rpartition("/")[2]
    return Annotation(
        url_citation=UrlCitation(
            start_index=citation.start, end_index=citation.end, title=title, url=content_path(citation)
        )
    )


def content_path(passage: Citation | Source) -> str:
    """Return the path at which the passage's document opens, with the lines marked or at the page.

    Args:
        passage: with a public document id.
    """
    path = f"/v1/documents/{quote(passage.document)}/content"
    if passage.start_line:
        last = f"-L{passage.end_line}" if passage.end_line > passage.start_line else ""
        lines = f"L{passage.start_line}{last}"
        return f"{path}?highlight={lines}#{lines}"
    return f"{path}#page={passage.start_page}" if passage.start_page else path
