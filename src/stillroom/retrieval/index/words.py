"""Text to the words that BM25 compares: lower case, stemmed, in English.

Documents keep every word. A question is searched without the words that every question has ("how can I", "what is
the"): they say nothing about the answer, but in a long question they add up, and a small corpus does not have enough
text to show how common they are.
"""

from pathlib import PurePath

import tantivy

from stillroom.core.document import Chunk
from stillroom.core.panics import panics_as_errors

_MAX_WORD_BYTES = 40

DOCUMENT_TOKENIZER = "en_stem"
"""tantivy's name of the chain that `_build(stem=True)` makes by hand."""

_ENGLISH = """
a about an and any are as at be been being but by can could d did do does doing don for from had has have
having he her here hers him his how i if in into is it its itself just ll m me might more most must my no nor
not of off on once only or other our ours out over own re s same shall she should so some such t than that the
their theirs them then there these they this those through to too under until up ve very was we were what when
where which while who whom whose why will with would you your yours
"""

STOP_WORDS = frozenset(_ENGLISH.split())
"""English articles, pronouns, auxiliaries, prepositions, question words, and what an apostrophe leaves of them."""


def searched_text(chunk: Chunk) -> str:
    """The chunk's heading and text, and its document's name: people search for `pep 8` and `release notes 2024`.

    The name is the record's id in a JSONL corpus, often a URL, else the file's name without its ending. An id that says
    nothing matches nothing.
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
        """What the index holds of a text, in order."""
        return list(self._stems.analyze(text))

    @panics_as_errors("tantivy")
    def query_stems(self, text: str) -> list[str]:
        """What a question is searched by; all of its words where it has only stop words (`to be or not to be`)."""
        telling = [word for word in self._words.analyze(text) if word not in STOP_WORDS]
        return self.stems(" ".join(telling)) if telling else self.stems(text)


def _build(*, stem: bool) -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(_MAX_WORD_BYTES)).filter(tantivy.Filter.lowercase())
    if stem:
        builder = builder.filter(tantivy.Filter.stemmer("english"))
    return builder.build()
