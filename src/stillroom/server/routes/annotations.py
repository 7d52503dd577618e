"""Citations of an answer for HTTP clients: with public document ids, and as annotations in OpenAI's form."""

from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

from stillroom.core.ids import public_id
from stillroom.rag.answer import Answer, Citation, Source, Support
from stillroom.server.schemas.replies import Annotation, UrlCitation


def public_sources(sources: Sequence[Source]) -> list[Source]:
    """Replace document ids by those that clients see."""
    return [replace(source, document=public_id(source.document)) for source in sources]


def public_citations(answer: Answer) -> Answer:
    """Return the answer with the document ids that clients see in its citations."""
    shown = (replace(citation, document=public_id(citation.document)) for citation in answer.citations)
    return replace(answer, citations=tuple(shown))


def annotations_of(answer: Answer) -> list[Annotation]:
    """Return an annotation for each citation that its source supports, fully or partly.

    Args:
        answer: with public document ids.
    """
    return [_annotation(one) for one in answer.citations if one.source and one.support is not Support.UNSUPPORTED]


def _annotation(citation: Citation) -> Annotation:
    title = citation.heading or citation.document.rpartition("/")[2]
    url = f"/v1/documents/{quote(citation.document)}/content{_place(citation)}"
    return Annotation(
        url_citation=UrlCitation(start_index=citation.start, end_index=citation.end, title=title, url=url)
    )


def _place(citation: Citation) -> str:
    """Return query and fragment with which the document's page marks the lines, or shows the page."""
    if citation.start_line:
        last = f"-L{citation.end_line}" if citation.end_line > citation.start_line else ""
        lines = f"L{citation.start_line}{last}"
        return f"?highlight={lines}#{lines}"
    return f"#page={citation.start_page}" if citation.start_page else ""
