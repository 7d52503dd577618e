"""Rewrites a question over several facts after one of them is known, for readers, which quote one sentence at a time.

`Who leads the band that recorded Night Train?`, answered by the sentence `Night Train is a song by The Lamps.` with the
words `The Lamps`, becomes `Who leads The Lamps?`: the sentence has explained `band that recorded Night Train`. What it
leaves is the next question. No model is involved, so that a hop costs a search and a reading.
"""

import re

from stillroom.rag.terms import terms_of

_WORD = re.compile(r"\w(?:[\w'\u2019&.-]*\w)?")
_ARTICLES = frozenset({"a", "an", "the"})
_EXPLAINED, _OPEN, _EMPTY = "x", "o", "-"
_RUN = re.compile(f"{_EXPLAINED}(?:{_EMPTY}*{_EXPLAINED})*")


def follow_up(question: str, sentence: str, found: str) -> str | None:
    """Return the question with its longest run of words that a sentence repeats replaced by what was found in it.

    Words without meaning of their own, such as `of`, may stand between the words of a run, and an article before it.

    Args:
        found: the words of the sentence that answer the question so far.

    Returns:
        None if the sentence repeats no word or all words of the question, or if what was found stands in the question.
    """
    if terms_of(found).words <= terms_of(question).words:
        return None
    words = list(_WORD.finditer(question))
    kinds = _kinds([word.group() for word in words], sentence)
    runs = [run.span() for run in _RUN.finditer(kinds)]
    if not runs or _OPEN not in kinds:
        return None
    first, end = max(runs, key=lambda run: kinds.count(_EXPLAINED, *run))
    if first and words[first - 1].group().lower() in _ARTICLES:
        first -= 1
    return question[: words[first].start()] + found + question[words[end - 1].end() :]


def whole_name(sentence: str, start: int, end: int) -> str:
    """Return the characters [start, end) of a sentence with the rest of the name that they are a part of.

    A name is a run of words that begin with a capital letter, with blanks between them. A word such as `In`, without
    meaning of its own, begins none. What begins or ends in the middle of a word is not a part of a name.
    """
    words = list(_WORD.finditer(sentence))

    def is_named(index: int) -> bool:
        word = words[index].group()
        return word[0].isupper() and bool(terms_of(word).words)

    def are_adjacent(first: int) -> bool:
        between = sentence[words[first].end() : words[first + 1].start()]
        return between.isspace() and is_named(first) and is_named(first + 1)

    first = next((at for at, word in enumerate(words) if word.start() == start), None)
    last = next((at for at, word in enumerate(words) if word.end() == end), None)
    while first is not None and first > 0 and are_adjacent(first - 1):
        first -= 1
    while last is not None and last + 1 < len(words) and are_adjacent(last):
        last += 1
    start = start if first is None else words[first].start()
    return sentence[start : end if last is None else words[last].end()]


def _kinds(words: list[str], sentence: str) -> str:
    """Return a letter for each word of a question: explained by the sentence, open, or without meaning of its own."""
    known = terms_of(sentence).words
    own = [terms_of(word).words for word in words]
    return "".join(_EMPTY if not terms else _EXPLAINED if terms <= known else _OPEN for terms in own)
