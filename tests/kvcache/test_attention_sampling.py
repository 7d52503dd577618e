"""Sampled attention masses of a prompt's chunks, compared with sums over a whole attention matrix."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.core.batch import AttentionMasses, MassRequest
from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey
from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.chunk_reuse.attention_sampling import AttentionMassSampler, mass_sample_every
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.pieces import Piece
from tests.kvcache.tree_fixture import SIZE, TreeFixture


def pieces_of(lengths: list[int]) -> list[Piece]:
    """A system prompt, chunks, and one piece of a question."""
    found, start = [], 0
    for index, length in enumerate(lengths):
        is_chunk = 0 < index < len(lengths) - 1
        kind = SegmentKind.CHUNK if is_chunk else SegmentKind.SYSTEM if index == 0 else SegmentKind.QUESTION
        key = NodeKey(bytes([index]) * 32)
        found.append(Piece(key, key, key, start, length, index, kind, ChunkId(index) if is_chunk else None))
        start += length
    return found


def attention_of(num_tokens: int) -> NDArray[np.float32]:
    """Causal weights [tokens, tokens]."""
    logits = np.where(np.tri(num_tokens, dtype=bool), np.random.default_rng(7).normal(size=(num_tokens,) * 2), -np.inf)
    weights = np.exp(logits)
    shares: NDArray[np.float64] = weights / weights.sum(1, keepdims=True)
    return shares.astype(np.float32)


def measure(weights: NDArray[np.float32], positions: NDArray[np.int64], request: MassRequest) -> AttentionMasses:
    """Answer a request as a runner does."""
    rows = weights[positions[request.rows]][:, : len(request.groups)]
    own = rows[np.arange(len(rows)), positions[request.rows]]
    paid = np.stack([rows[:, request.groups == group].sum(1) for group in range(request.num_groups)], axis=1)
    paid[np.arange(len(rows)), request.groups[positions[request.rows]]] -= own  # measured tokens are in a chunk
    return AttentionMasses(paid, own, rows.sum(0))


def take_masses(
    mass_sampler: AttentionMassSampler, weights: NDArray[np.float32], steps: list[NDArray[np.int64]]
) -> int:
    """Compute the tokens of these steps; return how many were measured."""
    count = 0
    for positions in steps:
        request = mass_sampler.mass_request(positions)
        if request is not None:
            count += len(request.rows)
            mass_sampler.add(positions, measure(weights, positions, request))
    return count


@given(st.lists(st.integers(1, 9), min_size=3, max_size=6), st.integers(1, 10))
def test_measuring_every_token_gives_the_sums_of_the_attention_matrix(lengths: list[int], budget: int) -> None:
    pieces, total = pieces_of(lengths), sum(lengths)
    weights, mass_sampler = attention_of(total), AttentionMassSampler(pieces, total, every=1)
    order = np.arange(total)
    take_masses(mass_sampler, weights, [order[start : start + budget] for start in range(0, total, budget)])
    assert mass_sampler.mass_of(0) is None and mass_sampler.mass_of(len(pieces) - 1) is None
    for index, piece in enumerate(pieces[1:-1], start=1):
        mass, own = mass_sampler.mass_of(index), weights[piece.start : piece.end]
        assert mass is not None and mass.prefix == tuple(one.content for one in pieces[1:index])
        inter = [own[:, one.start : one.end].sum() for one in pieces[1:index]]
        np.testing.assert_allclose(mass.inter, inter, rtol=1e-4, atol=1e-6)
        assert mass.intra == pytest.approx(
            float(np.tril(own[:, piece.start : piece.end], -1).sum()), rel=1e-4, abs=1e-6
        )
        assert mass.token_inter is not None and mass.received is not None
        paid = own[:, pieces[1].start : piece.start].sum(1)
        np.testing.assert_allclose(mass.token_inter, paid, rtol=1e-4, atol=1e-6)


def test_a_sample_covers_every_chunk_and_is_scaled_up() -> None:
    lengths = [4, 40, 3, 33, 5]
    pieces, total = pieces_of(lengths), sum(lengths)
    mass_sampler = AttentionMassSampler(pieces, total, every=16)
    weights = np.zeros((total, total), np.float32)
    for one in pieces:  # a fixed part of each token's attention goes to each earlier piece
        weights[one.start :, one.start : one.end] = 0.1 / one.num_tokens
    assert take_masses(mass_sampler, weights, [np.arange(total)]) == 2 + 1 + 2
    for index, length in ((1, 40), (2, 3), (3, 33)):
        mass = mass_sampler.mass_of(index)
        assert mass is not None and mass.num_tokens == length and mass.token_inter is None
        np.testing.assert_allclose(mass.inter, [0.1 * length] * (index - 1), rtol=1e-5)


def test_pieces_already_kept_are_not_measured() -> None:
    pieces = pieces_of([2, 5, 5, 2])
    mass_sampler = AttentionMassSampler(pieces, 14, every=1)
    mass_sampler.skip(1)
    request = mass_sampler.mass_request(np.arange(14))
    assert request is not None and request.rows.tolist() == [7, 8, 9, 10, 11]
    assert mass_sampler.mass_request(np.arange(7)) is None and mass_sampler.mass_of(1) is None


def test_selectors_that_rank_tokens_measure_every_token() -> None:
    assert (
        mass_sample_every(AnywhereOptions(0.1, "context")) == mass_sample_every(AnywhereOptions(0.1, "received")) == 1
    )
    assert mass_sample_every(AnywhereOptions(0.1, "question")) == 32


def test_a_preempted_request_is_measured_again() -> None:
    fixture = TreeFixture()
    assert fixture.manager.reuse is not None
    fixture.manager.reuse = replace(fixture.manager.reuse, mass_sample_every=1)
    lease = fixture.lease(1)
    for _ in range(2):
        fixture.manager.release(lease)
        assert fixture.admit(lease) == 0
        seen = AttentionMasses(np.ones((SIZE, 1), np.float32), np.ones(SIZE, np.float32), np.ones(2 * SIZE, np.float32))
        fixture.manager.take_masses(lease, np.arange(2 * SIZE), seen)
    fixture.compute(lease)
    assert (mass := lease.nodes[1].mass) is not None and mass.received is not None
    assert mass.received.tolist() == [1.0] * SIZE
