"""Word analysis for BM25: lower case, stems and stop words of the language of each text.

A text is of the language whose stop words it has most, else English. Documents keep every word, as a stem of their
language. A question is searched without the stop words of its language: these do not identify an answer but add up in a
long question, and a small corpus has too little text to show how common they are. Its other words are searched as stems
of its language and of every other one that the index holds more than little of, so a name is found in each.

Stemmers (Snowball) and most stop words are those of tantivy.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import PurePath

import tantivy

from stillroom.core.document import Chunk
from stillroom.core.panics import panics_as_errors

_MAX_WORD_BYTES = 40

DOCUMENT_TOKENIZER = "default"
"""tantivy's name of the chain that `_analyzer(None)` builds."""

ENGLISH = "english"

LANGUAGES = (
    *("danish", "dutch", ENGLISH, "finnish", "french", "german", "hungarian"),
    *("italian", "norwegian", "portuguese", "russian", "spanish", "swedish"),
)
"""Languages with a stemmer and stop words in tantivy."""

_ENGLISH = """
a about an and any are as at be been being but by can could d did do does doing don for from had has have
having he her here hers him his how i if in into is it its itself just ll m me might more most must my no nor
not of off on once only or other our ours out over own re s same shall she should so some such t than that the
their theirs them then there these they this those through to too under until up ve very was we were what when
where which while who whom whose why will with would you your yours
"""

STOP_WORDS = frozenset(_ENGLISH.split())
"""English articles, pronouns, auxiliaries, prepositions, question words, and their parts around an apostrophe."""

_MORE_STOP_WORDS = {
    "danish": "hvordan hvornar hvorfor",
    "dutch": "waar waarom wanneer welk welke",
    "french": "comment est o\u00f9 pourquoi quand quel quelle quelles quels quoi",
    "german": "gibt wann warum wer wieso wo woher wohin",
    "italian": "quando quale quali",
    "norwegian": "hvordan hvorfor",
    "portuguese": "onde quais qual quando",
    "russian": "\u043f\u043e\u0447\u0435\u043c\u0443 \u044d\u0442\u043e",
    "spanish": "cu\u00e1l cu\u00e1les cu\u00e1ndo c\u00f3mo d\u00f3nde qui\u00e9n qui\u00e9nes",
    "swedish": "hur n\u00e4r varf\u00f6r",
}
"""Question words and others that tantivy's lists lack."""

_MIN_STOP_WORDS, _MIN_SHARE, _MIN_RATIO = 3, 0.15, 1.5
"""A text is of another language if it has so many different stop words of it that are not English ones too, and if all
of them are such a share of its words and so many times the words that are English stop words only."""

_COMMON = 0.02
"""Share of the chunks from which the stems of a language are searched for questions of other languages too."""

_CYRILLIC = "\u0400", "\u04ff"
"""First and last letter of a script with one language here."""

_SURELY_ENGLISH = 0.25
"""Share of English stop words from which no other language is considered."""


def searched_text(chunk: Chunk) -> str:
    """Return the indexed text of a chunk: its document's name, its heading and its text.

    The name (searches such as `pep 8` use it) is the record's id in a JSONL corpus, otherwise the file name without its
    ending.
    """
    name = chunk.record_id if chunk.record_id is not None else PurePath(chunk.document_id).stem
    return f"{name}\n{chunk.indexed_text}"


class WordAnalyzer:
    """Thread-safe."""

    def __init__(self) -> None:
        self._words = _analyzer(None)

    @panics_as_errors("tantivy")
    def language_of(self, text: str) -> str:
        """Return the language of a text; English if no other is clear."""
        words = [word for word in self._words.analyze(text) if len(word) > 1]  # letters are names in formulas and code
        num_english = sum(word in STOP_WORDS for word in words)
        if num_english >= _SURELY_ENGLISH * len(words):
            return ENGLISH
        if sum(_CYRILLIC[0] <= word[0] <= _CYRILLIC[1] for word in words) > len(words) / 2:
            return "russian"
        found = {one: set(words).difference(without_stop_words(words, one)) for one in LANGUAGES if one != ENGLISH}
        best = max(found, key=lambda one: len(found[one] - STOP_WORDS))
        num_best = sum(word in found[best] for word in words)
        num_english_only = sum(word in STOP_WORDS and word not in found[best] for word in words)
        is_clear = num_best >= max(_MIN_SHARE * len(words), _MIN_RATIO * num_english_only)
        return best if is_clear and len(found[best] - STOP_WORDS) >= _MIN_STOP_WORDS else ENGLISH

    @panics_as_errors("tantivy")
    def stems(self, text: str, language: str = ENGLISH) -> list[str]:
        """Return the stems that the index stores for a text, in order."""
        return list(self._words.analyze(self.stemmed(text, language)))

    @panics_as_errors("tantivy")
    def stemmed(self, text: str, language: str) -> str:
        """Return the stems of a text, separated by spaces."""
        return " ".join(_analyzer(language).analyze(text))

    @panics_as_errors("tantivy")
    def query_words(self, text: str, languages: Mapping[str, int]) -> list[tuple[str, ...]]:
        """Return the different stems of each word of a question without stop words; of all words if it has no others
        (`to be or not to be`).

        Args:
            languages: Languages of the index, and the number of chunks of each. The question is of the one whose stop
                words it has most; of several, of that with most chunks.
        """
        words = list(self._words.analyze(text))
        telling = {one: without_stop_words(words, one) for one in languages or (ENGLISH,)}
        own = min(telling, key=lambda one: (len(telling[one]), -languages.get(one, 0), one))
        least = _COMMON * sum(languages.values())
        used = {own, *(one for one, num in languages.items() if num >= least)}
        found = [
            tuple(sorted({stem for one in used for stem in self.stems(word, one)})) for word in telling[own] or words
        ]
        return [stems for stems in found if stems]

    def query_stems(self, text: str) -> list[str]:
        """Return the stems of an English question without stop words."""
        return [stem for stems in self.query_words(text, {ENGLISH: 1}) for stem in stems]


def without_stop_words(words: Collection[str], language: str) -> list[str]:
    """Return the words, in lower case, that are no stop words of a language."""
    if language == ENGLISH:
        return [word for word in words if word not in STOP_WORDS]
    return list(_without_stops(language).analyze(" ".join(words)))


@cache
def _analyzer(language: str | None) -> tantivy.TextAnalyzer:
    """Return words in lower case, or stems of a language."""
    return _built(lambda builder: builder.filter(tantivy.Filter.stemmer(language)) if language else builder)


@cache
def _without_stops(language: str) -> tantivy.TextAnalyzer:
    more = _MORE_STOP_WORDS.get(language, "").split()
    return _built(
        lambda builder: builder.filter(tantivy.Filter.stopword(language)).filter(tantivy.Filter.custom_stopword(more))
    )


def _built(extend: Callable[[tantivy.TextAnalyzerBuilder], tantivy.TextAnalyzerBuilder]) -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(_MAX_WORD_BYTES)).filter(tantivy.Filter.lowercase())
    return extend(builder).build()
