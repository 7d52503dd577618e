"""Answer metrics in [0, 1]: SQuAD exact match, SQuAD word F1, ROUGE-L, Jaccard similarity.

The best of several accepted answers counts.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"\w+")


def normalised(text: str) -> str:
    """Return lower case without punctuation, articles and extra blanks (SQuAD 1.1, Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the normalised answer equals a normalised accepted answer, else 0."""
    return _best(lambda other: float(normalised(answer) == normalised(other)), accepted)


def word_f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the F1 of the multisets of normalised words, regardless of order."""

    def score(other: str) -> float:
        found, wanted = normalised(answer).split(), normalised(other).split()
        if not found or not wanted:
            return float(found == wanted)
        return _f1((Counter(found) & Counter(wanted)).total(), len(found), len(wanted))

    return _best(score, accepted)


def rouge_l(answer: str, accepted: Sequence[str]) -> float:
    """Return the F1 of the longest common subsequence of lower-case, unstemmed words (Lin 2004, beta = 1)."""

    def score(other: str) -> float:
        found, wanted = _WORD.findall(answer.lower()), _WORD.findall(other.lower())
        return _f1(longest_common_subsequence(found, wanted), len(found), len(wanted))

    return _best(score, accepted)


def jaccard(answer: str, accepted: Sequence[str]) -> float:
    """Return the share of the words of either text that both have (Cache-Craft 5.1.3, for short answers)."""

    def score(other: str) -> float:
        found, wanted = set(_WORD.findall(answer.lower())), set(_WORD.findall(other.lower()))
        return len(found & wanted) / len(found | wanted) if found | wanted else 1.0

    return _best(score, accepted)


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence in O(len(first) * len(second))."""
    lengths = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for at, other in enumerate(second, start=1):
            above = lengths[at]
            lengths[at] = diagonal + 1 if word == other else max(above, lengths[at - 1])
            diagonal = above
    return lengths[-1]


def _f1(num_common: int, num_found: int, num_wanted: int) -> float:
    return 2 * num_common / (num_found + num_wanted) if num_common else 0.0


def _best(score: Callable[[str], float], accepted: Sequence[str]) -> float:
    return max((score(other) for other in accepted), default=0.0)
