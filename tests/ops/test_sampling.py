"""Sampling against its slow twin, and against the distribution it promises."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.request import uniform_at
from stillroom.ops.sampling import sample, sample_reference

LOGITS = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=12)
UNIFORM = st.floats(0, 1, exclude_max=True)


@given(LOGITS, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([0.15, 0.5, 0.83, 1.0]), UNIFORM)
def test_a_row_equals_its_twin(logits: list[float], temperature: float, top_p: float, uniform: float) -> None:
    ours = sample(torch.tensor([logits]), [temperature], [top_p], [uniform])[0]
    twin = sample_reference(logits, temperature, top_p, uniform)
    # Equal up to rounding exactly on a border of the cumulative distribution.
    nearby = {
        sample_reference(logits, temperature, p, u)
        for p in (top_p - 1e-6, min(1.0, top_p + 1e-6))
        for u in (max(0.0, uniform - 1e-6), min(1 - 1e-9, uniform + 1e-6))
    }
    assert ours == twin or ours in nearby


@given(
    st.lists(LOGITS.filter(lambda row: len(row) > 3).map(lambda row: row[:4]), min_size=2, max_size=5),
    UNIFORM,
)
def test_a_row_does_not_depend_on_its_batch(rows: list[list[float]], uniform: float) -> None:
    temperatures = [float(index % 3) for index in range(len(rows))]
    together = sample(torch.tensor(rows), temperatures, [0.9] * len(rows), [uniform] * len(rows))
    alone = [sample(torch.tensor([row]), [t], [0.9], [uniform])[0] for row, t in zip(rows, temperatures, strict=True)]
    assert together == alone


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = probabilities.log().repeat(4000, 1)
    drawn = sample(rows, [1.0] * 4000, [1.0] * 4000, [uniform_at(7, index) for index in range(4000)])
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    torch.testing.assert_close(shares, probabilities, atol=0.025, rtol=0)  # over three standard errors


def test_nucleus_excludes_the_tail() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(500, 1)
    drawn = sample(logits, [1.0] * 500, [0.75] * 500, [index / 500 for index in range(500)])
    assert set(drawn) == {0, 1}


def test_random_numbers_depend_on_seed_and_index_only() -> None:
    assert uniform_at(3, 5) == uniform_at(3, 5)
    assert len({uniform_at(seed, index) for seed in range(20) for index in range(20)}) == 400
