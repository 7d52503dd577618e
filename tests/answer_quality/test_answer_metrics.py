"""Tests answer metrics against hand-computed values and brute-force implementations."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.answer_quality.answer_metrics import (
    exact_match,
    jaccard,
    longest_common_subsequence,
    normalised,
    rouge_l,
    word_f1,
)

words = st.lists(st.sampled_from(["a", "b", "c", "the", "D"]), max_size=7)


def test_metrics_equal_hand_computed_values() -> None:
    assert normalised("  The Eiffel-Tower, (an) ICON!") == "eiffeltower icon"
    assert exact_match("the Beatles.", ["Beatles", "x"]) == 1.0 and exact_match("Beatle", ["Beatles"]) == 0.0
    assert jaccard("in May 1998", ["May 18, 1998"]) == pytest.approx(2 / 4) and jaccard("", [""]) == 1.0
    assert word_f1("in May 1998", ["May 18, 1998"]) == pytest.approx(2 * 2 / (3 + 3))
    assert word_f1("b b c", ["b c c d"]) == pytest.approx(2 * 2 / (3 + 4)), (
        "a repeated word counts as often as both texts have it"
    )
    assert word_f1("the", ["a"]) == 1.0 and word_f1("the", ["b"]) == 0.0, "articles are removed"
    assert rouge_l("police killed the gunman", ["police kill the gunman"]) == pytest.approx(3 / 4), "Lin 2004, S2"
    assert rouge_l("the gunman kill police", ["police kill the gunman"]) == pytest.approx(2 / 4), "Lin 2004, S3"
    assert rouge_l("a b c d e", ["a c e", "z"]) == pytest.approx(2 * 3 / (5 + 3))
    assert rouge_l("", ["a"]) == rouge_l("a", [""]) == rouge_l("a", []) == 0.0


@given(words, words)
def test_longest_common_subsequence_matches_enumeration(one: list[str], two: list[str]) -> None:
    def subsequences(of: list[str]) -> set[tuple[str, ...]]:
        return {chosen for size in range(len(of) + 1) for chosen in combinations(of, size)}

    wanted = max(map(len, subsequences(one) & subsequences(two)))
    assert longest_common_subsequence(one, two) == wanted
    together = len(one) + len(two)
    assert rouge_l(" ".join(one), [" ".join(two)]) == pytest.approx(2 * wanted / together if together else 0.0)


@given(words, words)
def test_word_f1_matches_words_crossed_out_in_turn(one: list[str], two: list[str]) -> None:
    ours, theirs = ([word.lower() for word in side if word not in ("a", "the")] for side in (one, two))
    left, common = list(theirs), 0
    for word in ours:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        wanted = float(not ours and not theirs)
    else:
        precision, recall = common / len(ours), common / len(theirs)
        wanted = 2 * precision * recall / (precision + recall)
    assert word_f1(" ".join(one), [" ".join(two)]) == pytest.approx(wanted)
    assert exact_match(" ".join(one), [" ".join(two)]) == float(ours == theirs)
