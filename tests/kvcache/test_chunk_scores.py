"""Equations 3 to 14, compared with sums over whole attention matrices."""

import math
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import kendalltau

from stillroom.kvcache.tree.chunk_scores import (
    AlphaCell,
    ContextMass,
    adjusted_overlap,
    choose_alpha,
    context_impact,
    fix_overhead,
    num_to_recompute,
    order_penalty,
    outside_influence,
    own_influence,
    prefix_overlap,
)

NAMES = [b"a", b"b", b"c", b"d", b"e"]
prefixes = st.lists(st.sampled_from(NAMES), max_size=6)
permutations = st.permutations(NAMES)


@dataclass
class Prompt:
    """Consecutive chunks, of which the last is measured, and the attention of their tokens in each layer."""

    names: list[bytes]
    chunks: list[range]
    layers: list[NDArray[np.float64]]
    """Causal attention weights [tokens, tokens]."""

    @property
    def own(self) -> range:
        return self.chunks[-1]

    def mass(self) -> ContextMass:
        mean = np.mean(self.layers, axis=0)[self.own.start :]
        per_token = [mean[:, chunk.start : chunk.stop].sum(1) for chunk in self.chunks[:-1]]
        return ContextMass(
            num_tokens=len(self.own),
            prefix=tuple(self.names[:-1]),
            prefix_lengths=tuple(map(len, self.chunks[:-1])),
            inter=np.array([paid.sum() for paid in per_token], np.float32),
            intra=float(np.tril(mean[:, self.own.start :], -1).sum()),
            token_inter=np.sum(per_token, axis=0, dtype=np.float32) if per_token else np.zeros(len(self.own), "f4"),
        )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    named = draw(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 5)), min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    ends = np.cumsum([length for _, length in named]).tolist()
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        logits = np.where(np.tri(ends[-1], dtype=bool), random.normal(0, 3, (ends[-1], ends[-1])), -np.inf)
        layers.append(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
    return Prompt([name for name, _ in named], [range(i, j) for i, j in zip([0, *ends], ends, strict=False)], layers)


def inter(weights: NDArray[np.float64], later: range, earlier: range) -> float:
    """Equation 3."""
    total = 0.0
    for k in later:
        for j in earlier:
            total += float(weights[k, j])
    return total


def intra(weights: NDArray[np.float64], own: range) -> float:
    """Equation 4."""
    return sum(float(weights[k, j]) for k in own for j in own if j < k)


def kendall_distance(old: list[bytes], new: list[bytes]) -> float:
    """Equation 7."""
    a_old = [chunk for index, chunk in enumerate(old) if chunk in new and chunk not in old[:index]]
    a_new = [chunk for index, chunk in enumerate(new) if chunk in old and chunk not in new[:index]]
    pairs = list(combinations(a_old, 2))
    discordant = sum(a_new.index(one) > a_new.index(other) for one, other in pairs)
    return discordant / len(pairs) if pairs else 0.0


@given(prompts())
def test_influence_and_impact_equal_equations_9_to_11(prompt: Prompt) -> None:
    own, before = prompt.own, prompt.chunks[:-1]
    outside = [sum(inter(layer, own, j) / (len(own) * len(j)) for j in before) for layer in prompt.layers]
    inside = [intra(layer, own) / len(own) ** 2 for layer in prompt.layers]
    mass = prompt.mass()
    assert mass.num_tokens == len(own)
    a, b = sum(outside) / len(outside), sum(inside) / len(inside)  # Equation 10
    assert (outside_influence(mass), own_influence(mass)) == pytest.approx((a, b), rel=1e-5)
    if b > 0:
        assert context_impact(a, b) == pytest.approx(1 / (1 + math.e ** (-a / b)))


@given(prompts(), prefixes)
def test_overlap_equals_equations_6_to_8(prompt: Prompt, new: list[bytes]) -> None:
    mean = np.mean(prompt.layers, axis=0)
    paid = [inter(mean, prompt.own, chunk) for chunk in prompt.chunks[:-1]]
    old, mass = prompt.names[:-1], prompt.mass()
    if old:
        common = {name for name in old if name in new}
        kept = sum(value for name, value in zip(old, paid, strict=True) if name in common)
        assert prefix_overlap(mass, new) == pytest.approx(kept / sum(paid), rel=1e-5)
    else:
        assert prefix_overlap(mass, new) == (not new)
    gamma = order_penalty(old, new)
    assert gamma == pytest.approx(kendall_distance(old, new))
    assert adjusted_overlap(mass, new) == pytest.approx(prefix_overlap(mass, new) * (1 - gamma))
    assert 0 <= adjusted_overlap(mass, new) <= prefix_overlap(mass, new) <= 1


@given(prompts(), prefixes)
def test_prefix_overlap_ignores_order_and_repetition(prompt: Prompt, new: list[bytes]) -> None:
    beta = prefix_overlap(prompt.mass(), new)
    assert prefix_overlap(prompt.mass(), new[::-1]) == prefix_overlap(prompt.mass(), new + new) == beta
    assert prefix_overlap(prompt.mass(), [*new, b"another"]) == (beta if prompt.names[1:] else 0)
    assert adjusted_overlap(prompt.mass(), prompt.names[:-1]) == pytest.approx(1)


def test_overlap_of_a_chunk_without_attention_to_its_prefix() -> None:
    mass = ContextMass(3, (b"a", b"b"), (1, 1), np.zeros(2, np.float32), 1.0)
    assert prefix_overlap(mass, [b"b", b"a"]) == 1
    assert prefix_overlap(mass, [b"a"]) == prefix_overlap(mass, []) == prefix_overlap(mass, [b"a", b"b", b"c"]) == 0


@given(prefixes, prefixes)
def test_the_order_penalty_is_a_symmetric_share(old: list[bytes], new: list[bytes]) -> None:
    assert 0 <= order_penalty(old, new) <= 1
    assert order_penalty(old, new) == order_penalty(new, old) == kendall_distance(new, old)
    assert order_penalty(old, old) == 0


@given(permutations, permutations)
def test_the_order_penalty_of_permutations(old: list[bytes], new: list[bytes]) -> None:
    gamma = order_penalty(old, new)
    tau = kendalltau([old.index(name) for name in NAMES], [new.index(name) for name in NAMES]).statistic
    assert gamma == pytest.approx((1 - tau) / 2)
    assert order_penalty(old, new[::-1]) == pytest.approx(1 - gamma)
    assert order_penalty(old, old[::-1]) == 1
    swapped = [new[1], new[0], *new[2:]]
    assert abs(order_penalty(old, swapped) - gamma) == pytest.approx(1 / math.comb(5, 2))
    assert order_penalty(old, [b"x", new[0], b"y", *new[1:]]) == gamma, "chunks of one prefix only do not count"


def test_one_common_chunk_has_no_order() -> None:
    assert (
        order_penalty([b"a", b"b"], [b"c", b"b"]) == order_penalty([], [b"a"]) == order_penalty([b"a", b"a"], []) == 0
    )


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_impact_lies_between_a_half_and_one_and_grows_with_the_context(a: float, b: float) -> None:
    impact = context_impact(a, b)
    assert 0.5 <= impact <= 1
    assert impact < 1 or a > 30 * b, "1 only by rounding"
    assert context_impact(2 * a, b) >= impact
    assert context_impact(0, b) == 0.5


def test_impact_of_a_chunk_of_one_token() -> None:
    assert context_impact(0.1, 0.0) == 1.0
    assert context_impact(0.0, 0.0) == 0.5


@given(st.floats(0.5, 1), st.floats(0, 1), st.floats(0, 10), st.integers(1, 5000))
def test_the_overhead_is_a_share_of_the_tokens(impact: float, overlap: float, alpha: float, num_tokens: int) -> None:
    overhead = fix_overhead(impact, overlap, alpha)
    assert overhead == min(alpha * impact * (1 - overlap), 1) >= 0
    assert fix_overhead(impact, 1.0, alpha) == 0
    count = num_to_recompute(overhead, num_tokens)
    assert overhead * num_tokens - 1e-6 <= count <= min(num_tokens, overhead * num_tokens + 1)
    assert (count == 0) == (overhead == 0)


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_whole_products_are_not_rounded_up(part: int, whole: int) -> None:
    assert num_to_recompute(min(1, part / whole), whole) == min(part, whole)


def test_a_worked_example() -> None:
    """A chunk of 4 tokens computed behind two others, then placed behind the same two in the other order."""
    paid = np.array([0.9, 0.1, 0.3, 0.2], np.float32)
    mass = ContextMass(4, (b"a", b"b"), (4, 2), np.array([1.0, 0.5], np.float32), 1.5, paid)
    a, b = outside_influence(mass), own_influence(mass)
    assert (a, b) == (1 / 16 + 0.5 / 8, 1.5 / 16)
    assert context_impact(a, b) == pytest.approx(0.7914, abs=1e-4)
    assert prefix_overlap(mass, [b"b", b"c"]) == pytest.approx(1 / 3)
    overhead = fix_overhead(context_impact(a, b), adjusted_overlap(mass, [b"b", b"a"]), alpha=0.5)
    assert num_to_recompute(overhead, mass.num_tokens) == 2
    assert mass.impact == context_impact(a, b)


@given(prompts(), st.booleans())
def test_notes_survive_a_round_trip(prompt: Prompt, is_whole: bool) -> None:
    mass = prompt.mass()
    names = tuple(name.ljust(32) for name in mass.prefix)
    received = np.arange(mass.num_tokens, dtype=np.float32)
    mass = replace(mass, prefix=names, token_inter=mass.token_inter if is_whole else None)
    mass = replace(mass, received=received if is_whole else None)
    again = ContextMass.from_bytes(mass.to_bytes())
    assert (again.num_tokens, again.prefix, again.prefix_lengths) == (mass.num_tokens, names, mass.prefix_lengths)
    assert again.inter.tolist() == mass.inter.tolist() and again.intra == mass.intra
    if is_whole:
        assert mass.token_inter is not None and again.token_inter is not None and again.received is not None
        assert again.token_inter.tolist() == mass.token_inter.tolist() and again.received.tolist() == received.tolist()
    else:
        assert again.token_inter is None and again.received is None


def test_masses_of_single_tokens_are_stored_however_long_the_document_is() -> None:
    tokens = np.arange(5000, dtype=np.float32)
    mass = ContextMass(5000, (b"a" * 32, b"b" * 32), (10, 20), np.array([1.0, 3.0], np.float32), 2.0, tokens, tokens)
    again = ContextMass.from_bytes(mass.to_bytes())
    assert again.token_inter is not None and again.token_inter.tolist() == tokens.tolist()
    assert again.received is not None and again.received.tolist() == tokens.tolist()


CELLS = [AlphaCell(1.0, 0.2, 0.70), AlphaCell(2.0, 0.35, 0.80), AlphaCell(3.0, 0.5, 0.85), AlphaCell(4.0, 0.35, 0.80)]


@pytest.mark.parametrize(
    ("desired", "alpha"), [(0.0, 1.0), (0.7, 1.0), (0.75, 2.0), (0.8, 2.0), (0.81, 3.0), (0.9, None)]
)
def test_alpha_recomputes_least_at_the_desired_quality(desired: float, alpha: float | None) -> None:
    assert choose_alpha(CELLS, desired) == choose_alpha(reversed(CELLS), desired) == alpha


@pytest.mark.parametrize("has_tokens", [False, True])
def test_num_bytes_equals_the_length_of_written_notes(has_tokens: bool) -> None:
    tokens = (np.ones(7, np.float32), np.ones(7, np.float32)) if has_tokens else (None, None)
    mass = ContextMass(7, (bytes(32), bytes(32)), (3, 4), np.ones(2, np.float32), 0.5, *tokens)
    assert mass.num_bytes == len(mass.to_bytes())
