"""How good an answer is beside accepted ones: exact match and F1 of words as SQuAD counts them, and ROUGE-L.

All lie in [0, 1]; with several accepted answers the best one counts.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"\w+")


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra blanks (SQuAD 1.1's evaluation, Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1 if the answer is one of the accepted ones, normalised."""
    return _best(lambda other: float(normalised(answer) == normalised(other)), accepted)


def word_f1(answer: str, accepted: Sequence[str]) -> float:
    """Words in common, in whatever order, each as often as both have it; normalised."""

    def score(other: str) -> float:
        one, two = normalised(answer).split(), normalised(other).split()
        if not one or not two:
            return float(one == two)
        return _f1((Counter(one) & Counter(two)).total(), len(one), len(two))

    return _best(score, accepted)


def rouge_l(answer: str, accepted: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words, in lower case, unstemmed (Lin 2004, with beta = 1)."""

    def score(other: str) -> float:
        one, two = _WORD.findall(answer.lower()), _WORD.findall(other.lower())
        return _f1(longest_common_subsequence(one, two), len(one), len(two))

    return _best(score, accepted)


def longest_common_subsequence(one: Sequence[str], two: Sequence[str]) -> int:
    """Its length. O(length of one x length of two)."""
    lengths = [0] * (len(two) + 1)
    for word in one:
        diagonal = 0
        for at, other in enumerate(two, start=1):
            above = lengths[at]
            lengths[at] = diagonal + 1 if word == other else max(above, lengths[at - 1])
            diagonal = above
    return lengths[-1]


def _f1(num_common: int, num_one: int, num_two: int) -> float:
    return 2 * num_common / (num_one + num_two) if num_common else 0.0


def _best(score: Callable[[str], float], accepted: Sequence[str]) -> float:
    return max((score(other) for other in accepted), default=0.0)
