"""Word analysis for BM25: lower case, English stems, stop words.

Documents keep every word. Questions are searched without stop words: these do not identify an answer but add up in a
long question, and a small corpus has too little text to show how common they are.
"""

from pathlib import PurePath

import tantivy

from stillroom.core.document import Chunk
from stillroom.core.panics import panics_as_errors

_MAX_WORD_BYTES = 40

DOCUMENT_TOKENIZER = "en_stem"
"""tantivy's name of the chain that `_build(stem=True)` builds."""

_ENGLISH = """
a about an and any are as at be been being but by can could d did do does doing don for from had has have
having he her here hers him his how i if in into is it its itself just ll m me might more most must my no nor
not of off on once only or other our ours out over own re s same shall she should so some such t than that the
their theirs them then there these they this those through to too under until up ve very was we were what when
where which while who whom whose why will with would you your yours
"""

STOP_WORDS = frozenset(_ENGLISH.split())
"""English articles, pronouns, auxiliaries, prepositions, question words, and their parts around an apostrophe."""


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
        self._words = _build(stem=False)
        self._stems = _build(stem=True)

    @panics_as_errors("tantivy")
    def stems(self, text: str) -> list[str]:
        """Return the stems that the index stores for a text, in order."""
        return list(self._stems.analyze(text))

    @panics_as_errors("tantivy")
    def query_stems(self, text: str) -> list[str]:
        """Return the stems of a question without stop words; with them if it has no others (`to be or not to be`)."""
        telling = [word for word in self._words.analyze(text) if word not in STOP_WORDS]
        return self.stems(" ".join(telling)) if telling else self.stems(text)


def _build(*, stem: bool) -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(_MAX_WORD_BYTES)).filter(tantivy.Filter.lowercase())
    if stem:
        builder = builder.filter(tantivy.Filter.stemmer("english"))
    return builder.build()
