"""Makes questions without people: a sentence whose name, number or phrase also occurs elsewhere in the article.

The sentence with that phrase replaced by a blank or a question word is the question; a passage of the same article that
holds the phrase, without the sentence itself, is where the answer is. The reader learns to find an answer by meaning,
since the words around it differ ("Span Selection Pre-training for Question Answering", Glass and others 2020,
https://arxiv.org/abs/1909.04120). Training starts with these questions, before those by people.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.data.cleaning import clean, sentences
from training.data.sources import SOURCES, XQUAD, Source, read_beir
from training.data.spans import Span, find_spans, occurs
from training.data.split import Filter, same_name, shingles
from training.reader.examples import Coder, ExampleSet, Question, TokenisedPassage, is_held_out, span_of

_LEFT_OUT = ("fairytaleqa", "covid-qa", "peps", "rust-book")
ENCYCLOPAEDIC = [one for one in SOURCES if one.name not in _LEFT_OUT]
_WORDS = {"date": ("when", "what date"), "year": ("when", "what year"), "number": ("how many", "what number")}
_NAME_WORDS = ("who", "what", "which", "where")
_MIN_WORDS, _MAX_WORDS = 6, 45
"""Of a sentence that becomes a question."""
_MAX_PER_SENTENCE = 3
_MIN_SHARED = 2
"""Fewest words that sentence and passage share, besides the answer."""
_CLOSEST = 0.7
"""Share of the questions that take the passage with the most shared words."""
_MAX_USES = 0.3
"""Largest share of the article's passages that hold the answer, unless they are fewer than four."""
_BLANK = "[MASK]"


@dataclass(frozen=True, slots=True)
class Article:
    title: str
    texts: tuple[str, ...]


def read_articles(data: Path) -> list[Article]:
    """Read encyclopaedic text, without the articles of xquad and those whose questions are held out.

    Passages that share runs of words with xquad are left out (`training.data.split.Filter`).
    """
    held = list(read_beir(data / XQUAD))
    gate = Filter(
        titles=frozenset(same_name(one.title) for one in held),
        held=frozenset(shingle for one in held for text in one.paragraphs for shingle in shingles(clean(text))),
    )
    texts: dict[str, dict[str, None]] = {}
    for source in ENCYCLOPAEDIC:
        for name, text in _texts(source, data):
            if not is_held_out(name) and gate.admits(name, text):
                texts.setdefault(name, {})[text] = None
    return [Article(title, tuple(each)) for title, each in texts.items()]


def _texts(source: Source, data: Path) -> Iterator[tuple[str, str]]:
    for document in source.read(data):
        for text in document.paragraphs:
            yield document.title or document.document, clean(text)


def make_questions(articles: Sequence[Article], coder: Coder, seed: int = 0) -> ExampleSet:
    """Return the passages, some of them without the sentence that became a question, and the questions."""
    rng = random.Random(seed)
    passages: list[TokenisedPassage] = []
    questions: list[Question] = []
    for article in articles:
        first = len(passages)
        heading = article.title if len(article.texts) > 1 else ""
        passages += [coder.passage(text, heading) for text in article.texts]
        split = [sentences(text) for text in article.texts]
        for own, parts in enumerate(split):
            for sentence in parts:
                if _MIN_WORDS <= len(sentence.split()) <= _MAX_WORDS:
                    for span in _chosen(sentence, rng):
                        made = _question(article, own, sentence, span, rng)
                        if made is not None:
                            asked, text, target, answer = made
                            at = first + target
                            if target == own:
                                at = len(passages)
                                passages.append(coder.passage(text, heading))
                            question = _placed(coder, asked, passages[at], at, answer, first, article, rng)
                            questions += [question] if question is not None else []
    return ExampleSet(passages, questions)


def _chosen(sentence: str, rng: random.Random) -> list[Span]:
    spans = [span for span in find_spans(sentence) if len(span.of(sentence)) > 1]
    return rng.sample(spans, min(_MAX_PER_SENTENCE, len(spans)))


def _question(
    article: Article, own: int, sentence: str, span: Span, rng: random.Random
) -> tuple[str, str, int, str] | None:
    """Return the question, the text of its passage, the passage's number in the article and the answer."""
    answer = span.of(sentence)
    without = article.texts[own].replace(sentence, " ")
    texts = [*article.texts[:own], without, *article.texts[own + 1 :]]
    holding = [number for number, text in enumerate(texts) if answer in text and occurs(answer, text)]
    if not holding or (len(holding) >= 4 and len(holding) > _MAX_USES * len(texts)):
        return None
    words = _content(sentence.replace(answer, " "))
    shared = [len(words & _content(texts[number])) for number in holding]
    if max(shared) < _MIN_SHARED:
        return None
    best = [number for number, count in zip(holding, shared, strict=True) if count == max(shared)]
    target = rng.choice(best if rng.random() < _CLOSEST else holding)
    return _asked(sentence, span, rng), texts[target], target, answer


def _content(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 3}


def _asked(sentence: str, span: Span, rng: random.Random) -> str:
    word = rng.choice(_WORDS.get(span.kind, _NAME_WORDS if span.kind == "name" else ("what", "which")))
    blank = _BLANK if rng.random() < 0.3 else word
    before, after = sentence[: span.start].strip(), sentence[span.end :].strip().rstrip(".")
    draw = rng.random()
    if blank != _BLANK and draw < 0.3:  # the question word first
        return f"{blank.capitalize()} {before} {after}?"
    if draw < 0.6:  # the clause around the blank only
        before = re.split(r"[,;:]", before)[-1].strip()
        after = re.split(r"[,;:]", after)[0].strip()
    return f"{before} {blank} {after}{'' if blank == _BLANK else '?'}".strip()


def _placed(  # noqa: PLR0913  one question
    coder: Coder,
    asked: str,
    passage: TokenisedPassage,
    number: int,
    answer: str,
    first: int,
    article: Article,
    rng: random.Random,
) -> Question | None:
    pattern = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)")
    found = [span_of(passage, *match.span()) for match in pattern.finditer(passage.text)]
    spans = tuple(sorted({span for span in found if span is not None}))
    others = [at for at, text in enumerate(article.texts) if answer.lower() not in text.lower()]
    near = tuple(first + at for at in rng.sample(others, min(4, len(others))))
    if not spans or len(asked.split()) < 3:
        return None
    return Question(coder.ids(asked, 48), number, spans, near, 1.0)
