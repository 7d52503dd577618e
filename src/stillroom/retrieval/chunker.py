"""Cuts documents into chunks that fit the embedder.

A chunk never spans two heading paths and never exceeds the token limit. No word is lost, and only words longer than a
chunk are cut. The same document, tokenizer and limit give the same chunks.
"""

import dataclasses
import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from stillroom.core.document import Chunk, Document, Paragraph
from stillroom.core.ids import ChunkId, chunk_id_of
from stillroom.core.panics import panics_as_errors
from stillroom.errors import ConfigError

_MAX_CHARS_PER_TOKEN = 16
"""A tokenizer may make one token of a very long word; the limit counts at least one token for this many characters."""

_MAX_HEADING_SHARE = 4
"""Title and heading path may each take 1/4 of the embedder's tokens."""

_MIN_HEADING_CHARS = 8
"""A heading is not shortened below this; outer headings are dropped instead."""

_SPECIAL_TOKENS = 2

_MAX_STRETCH_CHARS = 1 << 16
"""A paragraph is tokenised in stretches of at most this size, to bound the memory for logs without blank lines."""

# places to cut a paragraph, best first: after a sentence, at a line end, between words
_CUTS = tuple(re.compile(pattern) for pattern in (r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+|\n\s*\n", r"\n+", r"\s+"))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A paragraph, or a part of a long paragraph."""

    text: str
    num_tokens: int
    start_line: int
    end_line: int
    start_page: int = 0
    end_page: int = 0


class Chunker:
    def __init__(self, tokenizer: Tokenizer, max_tokens: int, max_seq_length: int) -> None:
        """Args:
            tokenizer: The embedder's tokenizer, without truncation.
            max_tokens: Maximum number of tokens in a chunk's text.
            max_seq_length: Maximum number of tokens of the embedder: heading, text and special tokens.

        Raises:
            ConfigError: max_tokens is less than 8.
        """
        if max_tokens < 8:
            raise ConfigError(f"chunker.max_tokens={max_tokens} is too small; use 8 or more, usually 100 to 400")
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._max_read = max_seq_length - _SPECIAL_TOKENS

    @panics_as_errors("the tokenizer")
    def chunks(self, document: Document) -> list[Chunk]:
        """Return the document's chunks in reading order."""
        return list(self.each_chunk(document))

    def token_counts(self, document: Document) -> Iterator[int]:
        """Yield the number of tokens of each stretch of text; much faster than cutting."""
        for paragraph in document.paragraphs:
            yield from (self._count(stretch.text) for stretch in _stretches(paragraph, _MAX_STRETCH_CHARS))

    def each_chunk(self, document: Document) -> Iterator[Chunk]:
        """Yield the chunks one by one, so that the caller can stop in between."""
        title, *_ = self._fit((document.title,))
        paragraphs = document.paragraphs
        if title != document.title:  # a shortened title becomes text too, so that no word is lost
            paragraphs = (Paragraph(document.title), *paragraphs)
        ordinals = itertools.count()
        for path, group in itertools.groupby(paragraphs, key=lambda paragraph: paragraph.heading_path):
            heading = self._fit(path)
            if heading != path:
                group = itertools.chain([Paragraph(" > ".join(path), path)], group)
            template = Chunk(ChunkId(0), document.document_id, 0, "", title, heading, record_id=document.record_id)
            limit = min(self.max_tokens, self._max_read - self._count(template.heading))
            for piece in self._pack((piece for paragraph in group for piece in self._pieces(paragraph, limit)), limit):
                yield self._chunk(template, next(ordinals), piece)

    def _chunk(self, template: Chunk, ordinal: int, piece: _Piece) -> Chunk:
        return dataclasses.replace(
            template,
            chunk_id=chunk_id_of(template.document_id, ordinal, piece.text),
            ordinal=ordinal,
            text=piece.text,
            num_tokens=self._count(piece.text),
            start_line=piece.start_line,
            end_line=piece.end_line,
            start_page=piece.start_page,
            end_page=piece.end_page,
        )

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _fit(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """Shorten headings to their share of the embedder's tokens: the longest first, then drop the outermost."""
        while parts and self._is_too_long(" > ".join(parts)):
            longest = max(range(len(parts)), key=lambda index: len(parts[index]))
            shorter = parts[longest][: len(parts[longest]) * 3 // 4].rstrip(". ")
            if len(shorter) < _MIN_HEADING_CHARS:
                parts = parts[1:]
            else:
                parts = (*parts[:longest], f"{shorter}...", *parts[longest + 1 :])
        return parts

    def _is_too_long(self, heading: str) -> bool:
        return len(heading) > _MAX_STRETCH_CHARS or self._count(heading) > self._max_read // _MAX_HEADING_SHARE

    def _pack(self, pieces: Iterable[_Piece], limit: int) -> Iterator[_Piece]:
        """Join adjacent pieces while they fit."""
        run: list[_Piece] = []
        for piece in pieces:
            if run and sum(other.num_tokens for other in run) + piece.num_tokens > limit:
                yield from self._join(run, limit)
                run = []
            run.append(piece)
        if run:
            yield from self._join(run, limit)

    def _join(self, run: list[_Piece], limit: int) -> list[_Piece]:
        text = "\n\n".join(piece.text for piece in run)
        num_tokens = self._count(text)
        if num_tokens > limit:  # a tokenizer whose tokens span blank lines
            return run
        pages = [page for piece in run for page in (piece.start_page, piece.end_page) if page] or [0]
        end_line = max(piece.end_line for piece in run)
        return [_Piece(text, num_tokens, run[0].start_line, end_line, min(pages), max(pages))]

    def _pieces(self, paragraph: Paragraph, limit: int) -> Iterator[_Piece]:
        """Yield the paragraph if it fits, otherwise parts of at most `limit` tokens."""
        for stretch in _stretches(paragraph, max(_MAX_STRETCH_CHARS, limit * _MAX_CHARS_PER_TOKEN)):
            yield from self._pieces_of(stretch, limit)

    def _pieces_of(self, paragraph: Paragraph, limit: int) -> list[_Piece]:
        text = paragraph.text
        splitter = _TextSplitter(text, self._tokenizer)
        total = splitter.cost(0, len(text))
        if total <= limit:
            return [_piece_of(paragraph, 0, len(text), total)] if text.strip() else []
        num_parts = -(-total // limit)
        spans = splitter.split(0, len(text), limit, target=-(-total // num_parts))
        return [_piece_of(paragraph, start, end, splitter.cost(start, end)) for start, end in spans]


def _stretches(paragraph: Paragraph, max_chars: int) -> Iterator[Paragraph]:
    """Yield a paragraph in parts of at most `max_chars` characters, each with its lines."""
    text, start, line = paragraph.text, 0, paragraph.start_line
    if len(text) <= max_chars:
        yield paragraph
        return
    while start < len(text):
        end = _end_of_stretch(text, start, max_chars)
        part = text[start:end].rstrip()
        if paragraph.keeps_lines:
            yield dataclasses.replace(paragraph, text=part, start_line=line, end_line=line + part.count("\n"))
        else:
            yield dataclasses.replace(paragraph, text=part)
        line += text.count("\n", start, end)
        start = end


def _end_of_stretch(text: str, start: int, max_chars: int) -> int:
    """Return the end of a stretch: a line end in its second half, else between words, else within a long word."""
    end = start + max_chars
    if end >= len(text):
        return len(text)
    line_end = text.rfind("\n", start + max_chars // 2, end)
    if line_end >= 0:
        return line_end + 1
    words = text[start:end].rsplit(maxsplit=1)
    word_start = text.rfind(words[-1], start, end) if words else end
    return word_start if word_start > start else end


def _piece_of(paragraph: Paragraph, start: int, end: int, num_tokens: int) -> _Piece:
    """Return a span of a paragraph with its pages and its lines, or all lines of the paragraph if they are unknown."""
    text, first, last = paragraph.text, paragraph.start_line, paragraph.end_line
    if paragraph.keeps_lines:
        first, last = (paragraph.start_line + text.count("\n", 0, place) for place in (start, end))
    return _Piece(text[start:end], num_tokens, first, last, paragraph.start_page, paragraph.end_page)


class _TextSplitter:
    """Splits one text into spans within a token limit."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._starts = [start for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]

    def cost(self, start: int, end: int) -> int:
        """Return the number of tokens that begin in [start, end), or more if tokens are very long."""
        num_tokens = bisect_left(self._starts, end) - bisect_left(self._starts, start)
        return max(num_tokens, -(-(end - start) // _MAX_CHARS_PER_TOKEN))

    def split(self, start: int, end: int, limit: int, target: int, level: int = 0) -> list[tuple[int, int]]:
        """Return spans of at most `limit` tokens, cut at the best places; a span ends once it reaches `target`."""
        if level == len(_CUTS):
            return list(self._cut_word(start, end, limit))
        spans: list[tuple[int, int]] = []
        is_open = False
        for first, last in self._parts(start, end, level):
            if is_open and self.cost(spans[-1][0], last) <= limit and self.cost(*spans[-1]) < target:
                spans[-1] = (spans[-1][0], last)
                continue
            fits = self._exact(first, last) <= limit
            spans += [(first, last)] if fits else self.split(first, last, limit, limit, level + 1)
            is_open = True
        return spans

    def _parts(self, start: int, end: int, level: int) -> Iterator[tuple[int, int]]:
        """Yield the parts between the cuts of one level, without blank parts."""
        first = start
        for cut in _CUTS[level].finditer(self._text, start, end):
            if self._text[first : cut.start()].strip():
                yield first, cut.start()
            first = cut.end()
        if self._text[first:end].strip():
            yield first, end

    def _cut_word(self, start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
        """Yield pieces of a long word. Cutting a word can add tokens, so each piece is counted."""
        while start < end:
            stop = min(end, start + limit * _MAX_CHARS_PER_TOKEN)
            while stop > start + 1 and self._exact(start, stop) > limit:
                stop = start + (stop - start) * 3 // 4
            yield start, stop
            start = stop

    def _exact(self, start: int, end: int) -> int:
        """Return `cost` of a span tokenised on its own."""
        num_tokens = len(self._tokenizer.encode(self._text[start:end], add_special_tokens=False).ids)
        return max(num_tokens, -(-(end - start) // _MAX_CHARS_PER_TOKEN))
