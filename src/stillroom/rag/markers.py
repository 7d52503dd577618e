"""Reads the sentences of an answer, and the numbers of sources that it names as `[n]`, `[1][2]` or `[1, 2]`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stillroom.core.sentences import Span, sentences

_MARKER = re.compile(r"[\[\u3010]\s*([0-9]{1,4}(?:\s*[,;]\s*[0-9]{1,4})*)\s*[\]\u3011](?!\()")
_CODE = re.compile(r"(?:```|~~~)[^\n]*\n.*?(?:```|~~~|\Z)|`[^`\n]+`", re.DOTALL)
_LEAD = re.compile(r"(?:(?:[-*+>\u2022]|#{1,6}|\(?\d{1,3}[.)])[ \t]+)+")
_NUM_AROUND = 16
"""Characters before or after a number that show whether it was copied from a source."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence of an answer."""

    text: str
    """Without numbers of sources, and without the sign of a list item, heading or quote."""
    start: int
    """First character in the answer."""
    end: int
    numbers: tuple[int, ...] = ()
    """Numbers of sources that it names, existing or not, each once."""


@dataclass(slots=True)
class _Cut:
    """A marker that was taken out of a text, with the blanks before it."""

    at: int
    """In the text without markers."""
    num_chars: int
    numbers: tuple[int, ...]


def statements(text: str, source_texts: Sequence[str] = ()) -> list[Statement]:
    """Return the sentences of an answer in order, each with the numbers of its sources.

    A number belongs to the sentence that it stands in or behind; at the beginning of a line, to the next one. Numbers
    in code, and those that were copied from a source with the words before them, are text.
    """
    bare, cuts = _without_markers(text, source_texts)
    spans = sentences(bare)
    numbers: dict[Span, list[int]] = {span: [] for span in spans}
    for cut in cuts:
        if (owner := _owner(bare, spans, cut.at)) is not None:
            numbers[owner] += [number for number in cut.numbers if number not in numbers[owner]]
    return [_statement(bare, span, cuts, tuple(numbers[span])) for span in spans]


def _without_markers(text: str, source_texts: Sequence[str]) -> tuple[str, list[_Cut]]:
    parts: list[str] = []
    cuts: list[_Cut] = []
    at = length = 0
    for match in _markers(text, source_texts):
        start = match.start()
        while start > at and text[start - 1] in " \t":
            start -= 1
        parts.append(text[at:start])
        length += start - at
        found = dict.fromkeys(int(number) for number in re.findall(r"\d+", match.group(1)))
        cuts.append(_Cut(length, match.end() - start, tuple(found)))
        at = match.end()
    return "".join([*parts, text[at:]]), cuts


def _markers(text: str, source_texts: Sequence[str]) -> Iterator[re.Match[str]]:
    code = [match.span() for match in _CODE.finditer(text)]
    for match in _MARKER.finditer(text):
        is_code = any(start <= match.start() < end for start, end in code)
        if not is_code and not _is_copied(text, match, source_texts):
            yield match


def _is_copied(text: str, match: re.Match[str], source_texts: Sequence[str]) -> bool:
    """Whether a source has this number between the same words."""
    before = text[max(match.start() - _NUM_AROUND, 0) : match.start()]
    after = text[match.end() : match.end() + _NUM_AROUND]
    copies = [before + match.group()] if before.strip() else []
    copies += [match.group() + after] if len(after) == _NUM_AROUND else []
    return any(copy in source for copy in copies for source in source_texts)


def _owner(bare: str, spans: Sequence[Span], at: int) -> Span | None:
    line = bare[bare.rfind("\n", 0, at) + 1 : at]
    rest = bare[at:].partition("\n")[0]
    following = next((span for span in spans if span[1] > at), None)
    if not _LEAD.sub("", line.lstrip()).strip() and rest.strip() and following is not None:
        return following
    return next((span for span in reversed(spans) if span[0] < at), following)


def _statement(bare: str, span: Span, cuts: Sequence[_Cut], numbers: tuple[int, ...]) -> Statement:
    start, end = span
    if lead := _LEAD.match(bare, start, end):
        start = lead.end()
    text = bare[start:end]
    last = max((cut.at for cut in cuts if start < cut.at <= end), default=end)
    if not any(char.isalnum() for char in bare[last:end]):
        end = last  # "It is 8 MiB [1]." ends before the number
    return Statement(
        text,
        start + sum(cut.num_chars for cut in cuts if cut.at <= start),
        end + sum(cut.num_chars for cut in cuts if cut.at < end),
        numbers,
    )
