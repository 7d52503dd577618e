"""The words of a text that carry meaning: stems, numbers and names of program text, to compare sentences by."""

import re
from dataclasses import dataclass
from functools import lru_cache

_TOKEN = re.compile(r"`[^`\n]+`|--?[A-Za-z][\w-]*|[^\W_](?:[\w.,:/\\+@#%'\u2019-]*[\w+#%])?|_\w+")
_NUMBER = re.compile(r"[+-]?(\d[\d,]*(?:\.\d+)*)(%|[a-z]{0,4})$")
_CODE_NAME = re.compile(r"\w_\w|_\w|[a-z\d][A-Z]|::|^--?[A-Za-z]|[A-Za-z]\.[A-Za-z]|/\w|^`")
_POSSESSIVE = re.compile(r"['\u2019]s?$")
_NO_WORD = re.compile(r"\W+")
_IDEOGRAPHS = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_SUFFIXES = (
    "ations",
    "ation",
    "ions",
    "ion",
    "ments",
    "ment",
    "ings",
    "ing",
    "edly",
    "ies",
    "ed",
    "es",
    "ly",
    "s",
    "e",
    "y",
)
_MIN_STEM = 4
_STOP_WORDS = """
    a about above after again all also am an and any are as at be because been before being below between both but by
    can could did do does doing done down during each either else etc ever few for from further had has have having he
    her here hers him his how however i if in into is it its itself just let may me might more most much must my of off
    on once one only or other our out over own per same shall she should so some such than that the their them then
    there these they this those through thus to too under until up upon us very via was we were what when where whether
    which while who whom whose why will with within would you your called named not no never nor cannot
"""
_STOP = frozenset(_STOP_WORDS.split())
_FILLERS = "yes no sure certainly course okay ok thanks hello hi welcome answer note hope help helps know please"
_NEGATIONS = "not no never none neither nor without cannot nothing nobody nowhere"
_SMALL_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve"
_SMALL = {word: str(value) for value, word in enumerate(_SMALL_NUMBERS.split()) if word != "one"}  # mostly a pronoun


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a text."""

    words: frozenset[str]
    """All terms, words as stems, without stop words."""
    numbers: frozenset[str]
    codes: frozenset[str]
    """Names of program text: `max_size`, `--model`, `Path.home`."""
    names: frozenset[str]
    """Stems of words that begin with a capital letter inside a sentence."""
    is_negated: bool

    @property
    def says_something(self) -> bool:
        """Whether a text with these terms can be compared with a source."""
        return not self.words <= _FILLER_STEMS

    def joined(self, other: "Terms") -> "Terms":
        """Return the terms of both texts."""
        return Terms(
            self.words | other.words,
            self.numbers | other.numbers,
            self.codes | other.codes,
            self.names | other.names,
            self.is_negated or other.is_negated,
        )


NO_TERMS = Terms(frozenset(), frozenset(), frozenset(), frozenset(), False)


def terms_of(text: str) -> Terms:
    """Return the terms of a text."""
    numbers, codes, names, words = set[str](), set[str](), set[str](), set[str]()
    is_negated = False
    for match in _TOKEN.finditer(text):
        token = match.group()
        lower = _POSSESSIVE.sub("", token.strip("`").lower())
        is_negated |= lower in _NEGATION_WORDS or lower.endswith(("n't", "n\u2019t"))
        if number := _NUMBER.match(lower):
            value = number.group(1).replace(",", "")
            numbers.add(value)
            words.add(value)
            words.update({number.group(2)} if len(number.group(2)) > 1 else ())
        elif lower in _SMALL:
            words.add(_SMALL[lower])
        elif _CODE_NAME.search(token):
            codes.add(lower.strip("-_"))
            words.add(lower.strip("-_"))
        else:
            stems = _stems(lower)
            words |= stems
            if token[0].isupper() and not _begins_sentence(text, match.start()):
                names |= stems
    return Terms(frozenset(words), frozenset(numbers), frozenset(codes), frozenset(names), is_negated)


def stem(word: str) -> str:
    """Return a word without its ending: `rotates`, `rotated` and `rotation` have one stem."""
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= _MIN_STEM - (len(suffix) < 3):
            return word[: -len(suffix)]
    return word


@lru_cache(maxsize=8192)
def _stems(word: str) -> frozenset[str]:
    if _IDEOGRAPHS.search(word):  # without blanks between words
        return frozenset(word[at : at + 2] for at in range(max(len(word) - 1, 1)))
    return frozenset(stem(part) for part in _NO_WORD.split(word) if part and part not in _STOP)


def _begins_sentence(text: str, at: int) -> bool:
    before = text[:at].rstrip(" \t\n\"'(*`\u201c\u2018")
    return not before or before[-1] in ".!?:"


_FILLER_STEMS = frozenset(stem(word) for word in _FILLERS.split())
_NEGATION_WORDS = frozenset(_NEGATIONS.split())
