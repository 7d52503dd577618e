"""Documents to chunks that the embedder reads whole.

A chunk never spans two heading paths and never exceeds the token limit; no word is lost, and none is cut unless it is
longer than a chunk by itself. Same document, tokenizer and limit: same chunks.
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
"""A tokenizer may call a very long word one token; for the limit, no token counts for more characters than this."""

_MAX_HEADING_SHARE = 4
"""Title and heading path each take at most one part in so many of what the embedder reads."""

_MIN_HEADING_CHARS = 8
"""A heading is not shortened below this; outer headings are dropped instead."""

_SPECIAL_TOKENS = 2

_MAX_STRETCH_CHARS = 1 << 16
"""A paragraph is tokenised in stretches of at most so many characters: the tokens of a whole log without a blank line
would fill the memory."""

# where a paragraph may be cut, best first: after a sentence, at a line end, between words
_CUTS = tuple(re.compile(pattern) for pattern in (r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+|\n\s*\n", r"\n+", r"\s+"))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A whole paragraph, or a part of one that was too long."""

    text: str
    num_tokens: int
    start_line: int
    end_line: int
    start_page: int = 0
    end_page: int = 0


class Chunker:
    """Cuts documents; holds no state besides the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, max_seq_length: int) -> None:
        """Args:
            tokenizer: the embedder's, without truncation.
            max_tokens: most tokens in a chunk's text.
            max_seq_length: what the embedder reads: heading, text and special tokens.

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
        """The document's chunks in reading order."""
        return list(self.each_chunk(document))

    def token_counts(self, document: Document) -> Iterator[int]:
        """Tokens of each stretch of the document's text; far quicker than cutting it."""
        for paragraph in document.paragraphs:
            yield from (self._count(one.text) for one in _stretches(paragraph, _MAX_STRETCH_CHARS))

    def each_chunk(self, document: Document) -> Iterator[Chunk]:
        """`chunks` one by one: the caller can stop in between."""
        title, *_ = self._fit((document.title,))
        paragraphs = document.paragraphs
        if title != document.title:  # a title too long to be a heading is text too: nothing is lost
            paragraphs = (Paragraph(document.title), *paragraphs)
        ordinals = itertools.count()
        for path, group in itertools.groupby(paragraphs, key=lambda paragraph: paragraph.heading_path):
            heading = self._fit(path)
            if heading != path:
                group = itertools.chain([Paragraph(" > ".join(path), path)], group)
            draft = Chunk(
                ChunkId(0), document.document_id, 0, "", title, heading, record_id=document.record_id
            )  # fmt: skip
            limit = min(self.max_tokens, self._max_read - self._count(draft.heading))
            for piece in self._pack((piece for paragraph in group for piece in self._pieces(paragraph, limit)), limit):
                yield self._chunk(draft, next(ordinals), piece)

    def _chunk(self, draft: Chunk, ordinal: int, piece: _Piece) -> Chunk:
        return dataclasses.replace(
            draft,
            chunk_id=chunk_id_of(draft.document_id, ordinal, piece.text),
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
        """Headings within their share of what the embedder reads: the longest is shortened first, then the outermost
        dropped."""
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
        """Join neighbours while they fit."""
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
        if num_tokens > limit:  # tokenizers whose tokens span blank lines do not add up
            return run
        pages = [page for piece in run for page in (piece.start_page, piece.end_page) if page] or [0]
        end_line = max(piece.end_line for piece in run)
        return [_Piece(text, num_tokens, run[0].start_line, end_line, min(pages), max(pages))]

    def _pieces(self, paragraph: Paragraph, limit: int) -> Iterator[_Piece]:
        """The paragraph itself if it fits, else its parts, each within `limit`."""
        for stretch in _stretches(paragraph, max(_MAX_STRETCH_CHARS, limit * _MAX_CHARS_PER_TOKEN)):
            yield from self._pieces_of(stretch, limit)

    def _pieces_of(self, paragraph: Paragraph, limit: int) -> list[_Piece]:
        text = paragraph.text
        measure = _Measure(text, self._tokenizer)
        total = measure.cost(0, len(text))
        if total <= limit:
            return [_piece_of(paragraph, 0, len(text), total)] if text.strip() else []
        num_parts = -(-total // limit)
        spans = measure.split(0, len(text), limit, target=-(-total // num_parts))
        return [_piece_of(paragraph, start, end, measure.cost(start, end)) for start, end in spans]


def _stretches(paragraph: Paragraph, max_chars: int) -> Iterator[Paragraph]:
    """A paragraph in parts of at most `max_chars` characters, each with the lines it stands on."""
    text, start, line = paragraph.text, 0, paragraph.start_line
    if len(text) <= max_chars:
        yield paragraph
        return
    while start < len(text):
        end = _end_of_stretch(text, start, max_chars)
        part = text[start:end].rstrip()
        if _keeps_lines(paragraph):
            yield dataclasses.replace(paragraph, text=part, start_line=line, end_line=line + part.count("\n"))
        else:
            yield dataclasses.replace(paragraph, text=part)
        line += text.count("\n", start, end)
        start = end


def _end_of_stretch(text: str, start: int, max_chars: int) -> int:
    """Behind a line where one ends in the second half, else between words; inside a word only if it is longer than a
    stretch."""
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
    """A stretch of a paragraph, with the lines it stands on if the paragraph keeps those of its file, else all of the
    paragraph's, and with its pages."""
    text, first, last = paragraph.text, paragraph.start_line, paragraph.end_line
    if _keeps_lines(paragraph):
        first, last = (paragraph.start_line + text.count("\n", 0, place) for place in (start, end))
    return _Piece(text[start:end], num_tokens, first, last, paragraph.start_page, paragraph.end_page)


def _keeps_lines(paragraph: Paragraph) -> bool:
    """Whether its text has the line breaks of its file."""
    return paragraph.text.count("\n") == paragraph.end_line - paragraph.start_line


class _Measure:
    """How much of a limit each stretch of one text takes."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._starts = [start for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]

    def cost(self, start: int, end: int) -> int:
        """Tokens that begin in [start, end), or more where tokens are very long."""
        num_tokens = bisect_left(self._starts, end) - bisect_left(self._starts, start)
        return max(num_tokens, -(-(end - start) // _MAX_CHARS_PER_TOKEN))

    def split(self, start: int, end: int, limit: int, target: int, level: int = 0) -> list[tuple[int, int]]:
        """Spans of at most `limit`, cut as gently as possible; a span is complete once it reaches `target`."""
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
        """What stands between the cuts of one level, blank parts left out."""
        first = start
        for cut in _CUTS[level].finditer(self._text, start, end):
            if self._text[first : cut.start()].strip():
                yield first, cut.start()
            first = cut.end()
        if self._text[first:end].strip():
            yield first, end

    def _cut_word(self, start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
        """A word that is too long by itself, in pieces; cutting inside a word can cost tokens, so each is counted."""
        while start < end:
            stop = min(end, start + limit * _MAX_CHARS_PER_TOKEN)
            while stop > start + 1 and self._exact(start, stop) > limit:
                stop = start + (stop - start) * 3 // 4
            yield start, stop
            start = stop

    def _exact(self, start: int, end: int) -> int:
        """`cost` with the stretch tokenised on its own."""
        num_tokens = len(self._tokenizer.encode(self._text[start:end], add_special_tokens=False).ids)
        return max(num_tokens, -(-(end - start) // _MAX_CHARS_PER_TOKEN))
