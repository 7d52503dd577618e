"""Compares a sentence with the sentences of a source: does the source say this?

Words first: the share of the sentence's words, numbers and names that a quote or its heading holds. Then meaning: the
cosine of the embeddings of the sentence and its best quote, where words alone do not decide. A number or a code name
that no source holds, and a negation that only one side has, make a sentence at most partly supported. docs/citations.md
says how often it is right.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from stillroom.core.sentences import Span, sentence_at, sentences
from stillroom.rag.answer import Support
from stillroom.rag.terms import NO_TERMS, Terms, terms_of

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts -> vectors of length 1, [texts, dimension]."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A logistic model of support, and its thresholds. `stillroom bench support` measures them."""

    bias: float
    coverage: float
    """Of the share of the sentence's words that the quote or its heading holds."""
    missing_number: float
    """If a number of the sentence is not in the quote."""
    missing_name: float
    """Of the share of the sentence's names that are not in the quote."""
    negation: float
    """If only one of both is negated."""
    cosine: float
    supported_from: float
    partly_from: float


WORDS_ONLY = Weights(-2.8, 5.1, -3.7, -0.3, -1.0, 0.0, supported_from=0.8, partly_from=0.25)
WITH_MEANING = Weights(-4.1, 3.9, -3.8, -0.25, -1.0, 3.35, supported_from=0.8, partly_from=0.25)
"""Fitted on sentences of held-out titles. On those that chose the thresholds, 85 % of the supported sentences are true
and 95 % of the unsupported ones are false; docs/citations.md has the figures of others."""
_MAX_COPIES = 8
_MIN_WHOLE_WORDS = 5
"""A shorter copy is quoted with the sentence around it."""


@dataclass(frozen=True, slots=True)
class Quote:
    """A sentence of a source, or two neighbours."""

    span: Span
    terms: Terms
    """Its own terms and those of the heading."""
    is_negated: bool


class SourceText:
    """A source, cut into quotes."""

    def __init__(self, text: str, heading: str) -> None:
        self.text = text
        self.heading = heading
        self.spans = sentences(text)

    @cached_property
    def quotes(self) -> list[Quote]:
        """Its sentences, and pairs of neighbours."""
        around = terms_of(self.heading)
        found = [(span, terms_of(self.part(span))) for span in self.spans]
        found += [
            ((first[0][0], second[0][1]), first[1].joined(second[1]))
            for first, second in zip(found, found[1:], strict=False)
        ]
        return [Quote(span, terms.joined(around), terms.is_negated) for span, terms in found]

    @cached_property
    def terms(self) -> Terms:
        """All its terms, and those of the heading."""
        return reduce(Terms.joined, (quote.terms for quote in self.quotes), terms_of(self.heading))

    def part(self, span: Span) -> str:
        return self.text[slice(*span)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A quote that may support a sentence, and what the two have in common."""

    source: int
    """Key of the source."""
    span: Span
    coverage: float = 1.0
    misses_number: bool = False
    missing_names: float = 0.0
    differs_in_negation: bool = False
    is_verbatim: bool = False

    def score(self, cosine: float | None = None) -> float:
        """Return the probability that the quote supports the sentence, in [0, 1]; comparable between sources."""
        if self.is_verbatim:
            return 1.0
        weights = WORDS_ONLY if cosine is None else WITH_MEANING
        total = (
            weights.bias
            + weights.coverage * self.coverage
            + weights.missing_number * self.misses_number
            + weights.missing_name * self.missing_names
            + weights.negation * self.differs_in_negation
            + weights.cosine * (cosine or 0.0)
        )
        return 1 / (1 + math.exp(-total))

    def support(self, cosine: float | None, *, is_limited: bool) -> Support:
        """Return whether the quote supports the sentence.

        Args:
            is_limited: whether the sentence has a number or a code name that no source holds.
        """
        weights, score = WORDS_ONLY if cosine is None else WITH_MEANING, self.score(cosine)
        if score < weights.partly_from:
            return Support.UNSUPPORTED
        is_partly = is_limited or self.differs_in_negation or score < weights.supported_from
        return Support.PARTLY if is_partly else Support.SUPPORTED


def best_quote(text: str, terms: Terms, sources: Mapping[int, SourceText], asked: Terms = NO_TERMS) -> Candidate | None:
    """Return the quote of these sources that supports a sentence best by its words; None without any quote.

    Args:
        asked: terms of the question; the copy of a short text that has most of them around it is the best.
    """
    copies = [_copy(key, source, span) for key, source in sources.items() for span in verbatim(text, source.text)]
    if copies:
        return max(copies, key=lambda one: len(asked.words & terms_of(sources[one.source].part(one.span)).words))
    found = (_candidate(key, quote, terms) for key, source in sources.items() for quote in source.quotes)
    return max(found, key=lambda one: (one.score(), one.span[0] - one.span[1]), default=None)


def is_limited(terms: Terms, sources: Sequence[SourceText]) -> bool:
    """Return whether a sentence has a number or a code name that no source holds."""
    wanted = terms.numbers | terms.codes
    return bool(wanted) and not wanted <= set().union(*(source.terms.words for source in sources))


def verbatim(sentence: str, source: str) -> list[Span]:
    """Return where a source holds these words in this order; white space, letter case and Markdown emphasis may
    differ."""
    words = [word.strip("*_") for word in sentence.rstrip(".!;,: ").split()]
    pattern = r"[\s*_]+".join(re.escape(word) for word in words if word)
    if not pattern:
        return []
    return [match.span() for match in re.finditer(rf"(?<!\w){pattern}(?!\w)", source, re.IGNORECASE)][:_MAX_COPIES]


def _copy(key: int, source: SourceText, span: Span) -> Candidate:
    first, last = span
    if source.text[last : last + 1] in (".", "!"):
        last += 1
    is_part = len(source.text[first:last].split()) < _MIN_WHOLE_WORDS
    return Candidate(key, sentence_at(source.spans, first, last) if is_part else (first, last), is_verbatim=True)


def _candidate(key: int, quote: Quote, terms: Terms) -> Candidate:
    held = quote.terms.words
    return Candidate(
        key,
        quote.span,
        coverage=len(terms.words & held) / max(len(terms.words), 1),
        misses_number=not terms.numbers <= held,
        missing_names=len(terms.names - held) / max(len(terms.names), 1),
        differs_in_negation=terms.is_negated != quote.is_negated,
    )
