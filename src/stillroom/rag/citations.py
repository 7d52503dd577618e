"""Finds the source of each sentence of an answer, for every backend, from its finished text.

A sentence's sources are those that it names as `[n]`; without a number, the source that supports it best. The quote is
the copied text where the sentence is a copy, else the source's sentence, or two neighbours, that support it best.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stillroom.core.sentences import Span
from stillroom.rag.answer import Citation, Source, Support
from stillroom.rag.markers import Statement, statements
from stillroom.rag.support import Candidate, Embed, SourceText, best_quote, is_limited, verbatim
from stillroom.rag.terms import Terms, terms_of

Vector = NDArray[np.float32]

MAX_EMBEDDED = 8
"""Most texts that are embedded for an answer; further sentences are compared by their words only."""
_LOW, _HIGH = 0.1, 0.9
"""Outside of these scores by words, meaning is not compared."""
_SAYS_NOTHING = re.compile(
    r"""
    ^(?:(?:unfortunately|sorry|however|but),?\s+)?(?:the\s+|these\s+|your\s+|any\s+of\s+)?(?:provided\s+|given\s+)?
    (?:documents?|sources?|passages?|contexts?|texts?|excerpts?)\b.{0,60}?(?:\bno\b|\bnot\b|n't|n\u2019t).{0,40}
    \b(?:say|state|mention|contain|provide|include|specify|answer|information|cover|tell|describe|address)
    | \bI\s(?:do\snot|don.t|cannot|can.t|could\snot|couldn.t|am\s(?:unable|not\sable|sorry)|was\snot)\b
    | ^(?:there\sis\s)?no(?:t\senough)?\s(?:information|answer|mention)\b
    | \bnot\s(?:mentioned|stated|specified|provided|found|given|answered)\s(?:in|by)\s(?:the|these|any)\b
    """,
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A sentence that says something, and the quotes that support it best."""

    statement: Statement
    quotes: tuple[Candidate, ...]
    """One of each source that it names; without numbers, one of all sources."""
    is_limited: bool
    """Whether it has a number or a code name that its sources do not hold."""


def cite(text: str, sources: Sequence[Source], embed: Embed | None = None, question: str = "") -> tuple[Citation, ...]:
    """Return the citations of an answer, in the order of its text.

    A sentence that states nothing has none: a question, `Sure!`, `The documents do not say.` A number without a source
    makes a citation of source 0 that is not supported.

    Args:
        embed: the knowledge base's embedder; None compares sentences by their words only.
        question: chooses between several places that hold a short answer.
    """
    by_position = {source.position: source for source in sources}
    read = {position: SourceText(source.text, source.heading) for position, source in by_position.items()}
    asked = terms_of(question)
    found = statements(text, [source.text for source in sources])
    claims = [_claim(one, read, asked) for one in found if states_something(one.text) or _is_named_copy(one, read)]
    vectors = {} if embed is None else _vectors(claims, read, embed)
    return tuple(citation for claim in claims for citation in _citations(claim, by_position, vectors))


def states_something(sentence: str) -> bool:
    """Return whether a sentence states something that a source can support."""
    is_statement = not sentence.rstrip("\"') *").endswith(("?", ":")) and not says_nothing(sentence)
    return is_statement and terms_of(sentence).says_something


def says_nothing(sentence: str) -> bool:
    """Return whether a sentence says that the documents do not say, or that it cannot be known."""
    return _SAYS_NOTHING.search(sentence) is not None


def _is_named_copy(statement: Statement, read: Mapping[int, SourceText]) -> bool:
    """Whether a sentence is copied from a source that it names, whatever its form."""
    named = (read[number].text for number in statement.numbers if number in read)
    return terms_of(statement.text).says_something and any(verbatim(statement.text, text) for text in named)


def _claim(statement: Statement, read: Mapping[int, SourceText], asked: Terms) -> _Claim:
    terms = terms_of(statement.text)
    named = {number: read[number] for number in statement.numbers if number in read}
    groups = [{number: source} for number, source in named.items()] if statement.numbers else [read]
    quotes = [best_quote(statement.text, terms, group, asked) for group in groups]
    found = tuple(quote for quote in quotes if quote is not None)
    is_copied = all(quote.is_verbatim for quote in found)
    return _Claim(statement, found, not is_copied and is_limited(terms, list((named or read).values())))


def _vectors(claims: Sequence[_Claim], read: Mapping[int, SourceText], embed: Embed) -> dict[str, Vector]:
    """Embed the sentences that words alone do not decide, and their quotes."""
    wanted: dict[str, None] = {}
    for claim in claims:
        open_ones = [read[one.source].part(one.span) for one in claim.quotes if _LOW < one.score() < _HIGH]
        texts = dict.fromkeys([claim.statement.text, *open_ones])
        if open_ones and len(wanted | texts) <= MAX_EMBEDDED:
            wanted |= texts
    return dict(zip(wanted, embed(list(wanted)), strict=True)) if wanted else {}


def _citations(claim: _Claim, sources: Mapping[int, Source], vectors: Mapping[str, Vector]) -> Iterator[Citation]:
    statement = claim.statement
    for quote in claim.quotes:
        source = sources[quote.source]
        own, other = vectors.get(statement.text), vectors.get(source.text[slice(*quote.span)])
        cosine = None if own is None or other is None else float(own @ other)
        support = quote.support(cosine, is_limited=claim.is_limited)
        if support is not Support.UNSUPPORTED:
            yield _citation(statement, source, quote.span, support)
        elif statement.numbers:
            yield _citation(statement, source, None, support)
        else:
            yield _without_source(statement)
    if any(number not in sources for number in statement.numbers) or not claim.quotes:
        yield _without_source(statement)


def _citation(statement: Statement, source: Source, span: Span | None, support: Support) -> Citation:
    start, end = span or (0, 0)
    lines = (source.start_line, source.end_line) if span is None else _lines(source, span)
    return Citation(
        source=source.position,
        document=source.document,
        chunk_id=source.chunk_id,
        heading=source.heading,
        start_line=lines[0],
        end_line=lines[1],
        start_page=source.start_page,
        end_page=source.end_page,
        quote=source.text[start:end],
        quote_start=start,
        quote_end=end,
        start=statement.start,
        end=statement.end,
        is_explicit=bool(statement.numbers),
        support=support,
    )


def _without_source(statement: Statement) -> Citation:
    return Citation(
        source=0,
        document="",
        chunk_id="",
        heading="",
        start_line=0,
        end_line=0,
        start_page=0,
        end_page=0,
        quote="",
        quote_start=0,
        quote_end=0,
        start=statement.start,
        end=statement.end,
        is_explicit=bool(statement.numbers),
        support=Support.UNSUPPORTED,
    )


def _lines(source: Source, span: Span) -> tuple[int, int]:
    """Return the quote's lines in the file, or the chunk's.

    A chunk's text is paragraphs joined by blank lines. It has the line ends of its file if it has as many as its range
    of lines, or as many without the blank lines, as tables have: loaders that join lines, and gaps of several blank
    lines, change the number.
    """
    text, first, last = source.text, source.start_line, source.end_line
    num_ends = last - first
    has_gaps = text.count("\n\n") == num_ends and text.count("\n") == 2 * num_ends
    line_end = "\n\n" if has_gaps else "\n"
    if first == 0 or text.count(line_end) != num_ends:
        return first, last
    return first + text.count(line_end, 0, span[0]), first + text.count(line_end, 0, span[1])
