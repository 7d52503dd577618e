"""Sampling equals its reference, and follows the distribution of the logits."""

import dataclasses
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.core.batch import SampleSpec
from stillroom.core.ids import RequestId
from stillroom.core.request import SamplingParams, uniform_at
from stillroom.errors import UsageError
from stillroom.ops.sampling import logprobs, non_finite_rows, sample, sample_reference
from tests.examples import most_examples

# Halves, and penalties that are powers of two: ties are exact in float32 too.
HALVES = st.integers(-8, 8).map(lambda n: n / 2)
LOGITS = st.lists(HALVES, min_size=1, max_size=12)
UNIFORM = st.floats(0, 1, exclude_max=True)


def spec(*, uniform: float = 0.0, prompt: Any = (), answer: Any = (), forbidden: Any = (), **params: Any) -> SampleSpec:
    token_ids = np.array([*prompt, *answer], dtype=np.int64)
    return SampleSpec(
        RequestId("r"), SamplingParams(**params), uniform, token_ids, len(list(prompt)), frozenset(forbidden)
    )


class FixedConstraint:
    """A constraint that allows the same tokens at every step."""

    is_complete = False
    error = None

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._words = np.zeros(1, dtype=np.int32)
        for token in token_ids:
            self._words[0] |= 1 << token

    def copy(self) -> "FixedConstraint":
        return self

    def allowed(self) -> NDArray[np.int32]:
        return self._words

    def allows(self, token_id: int) -> bool:
        raise AssertionError("sampling proposes nothing")

    def advance(self, token_id: int) -> None:
        raise AssertionError("sampling moves no constraint")


@st.composite
def rows(draw: st.DrawFn, size: int | None = None) -> tuple[list[float], SampleSpec]:
    logits = draw(LOGITS if size is None else st.lists(HALVES, min_size=size, max_size=size))
    token = st.integers(0, len(logits) - 1)
    forbidden = draw(st.sets(token, max_size=len(logits) - 1))
    free = sorted(set(range(len(logits))) - forbidden)
    one = spec(
        uniform=draw(UNIFORM),
        prompt=draw(st.lists(token, max_size=5)),
        answer=draw(st.lists(token, max_size=5)),
        forbidden=forbidden,
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 100])),
        top_p=draw(st.sampled_from([0.15, 0.5, 0.83, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        logit_bias=draw(st.dictionaries(token, HALVES, max_size=3)),
    )
    if draw(st.booleans()):
        allowed = draw(st.sets(token)) | {draw(st.sampled_from(free))}
        one = one._replace(constraint=FixedConstraint(allowed))
    return logits, one


def moved(one: SampleSpec, by: float) -> SampleSpec:
    params = dataclasses.replace(one.params, top_p=min(1.0, one.params.top_p + by))
    return one._replace(params=params, uniform=min(max(0.0, one.uniform + by), 1 - 1e-9))


@given(rows(), st.sampled_from([1, 2, 1024]))
@settings(max_examples=most_examples(300))
def test_row_equals_its_reference(row: tuple[list[float], SampleSpec], num_tried: int) -> None:
    logits, one = row
    with patch("stillroom.ops.sampling.NUM_TRIED", num_tried):
        ours = sample(torch.tensor([logits]), [one])[0]
    # The draws may differ by rounding exactly at a bound of the cumulative distribution.
    nearby = {
        sample_reference(logits, moved(one, p)._replace(uniform=moved(one, u).uniform))
        for p in (-1e-6, 0, 1e-6)
        for u in (-1e-6, 0, 1e-6)
    }
    assert ours == sample_reference(logits, one) or ours in nearby
    assert ours not in one.forbidden
    assert one.constraint is None or one.constraint.allowed()[0] >> ours & 1


@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    top_k=st.sampled_from([0, 5, 60, 64, 500]),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.2]),
)
def test_sorting_the_most_likely_first_changes_no_draw(
    seed: int, scale: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 700, generator=generator) * scale
    specs = [
        spec(uniform=uniform_at(seed, row), temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p) for row in range(8)
    ]
    with patch("stillroom.ops.sampling.NUM_TRIED", 64):
        tried = sample(logits, specs)
    assert tried == sample(logits, specs)


@pytest.mark.gpu
@given(st.lists(rows(size=6), min_size=1, max_size=5))
def test_gpu_draws_the_same_tokens_as_the_cpu(batch: list[tuple[list[float], SampleSpec]]) -> None:
    logits, specs = torch.tensor([logits for logits, _ in batch]), [one for _, one in batch]
    ours = sample(logits.cuda(), specs)
    for row, (token, one) in enumerate(zip(ours, specs, strict=True)):
        nearby = {sample(logits[row : row + 1], [moved(one, by)])[0] for by in (-1e-6, 0, 1e-6)}
        assert token in nearby
    assert logprobs(logits.cuda(), ours, [2] * len(ours))[0].logprob <= 0


@given(st.lists(rows(size=6), min_size=2, max_size=5))
def test_row_does_not_depend_on_its_batch(batch: list[tuple[list[float], SampleSpec]]) -> None:
    together = sample(torch.tensor([logits for logits, _ in batch]), [one for _, one in batch])
    assert together == [sample(torch.tensor([logits]), [one])[0] for logits, one in batch]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}])
def test_last_digits_of_logits_change_no_draw(cut: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((200, 5_000), generator=generator) * 0.1
    changed = logits + torch.randn(logits.shape, generator=generator) * 1e-6
    specs = [spec(uniform=(row + 0.5) / 200, temperature=1.0, **cut) for row in range(200)]
    assert (logits.argsort() != changed.argsort()).any(dim=1).sum() > 150, "orders by probability differ"
    assert sample(logits, specs) == sample(changed, specs)


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    specs = [spec(temperature=1.0, uniform=uniform_at(7, index)) for index in range(4000)]
    drawn = sample(probabilities.log().repeat(4000, 1), specs)
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    torch.testing.assert_close(shares, probabilities, atol=0.025, rtol=0)  # more than three standard errors


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_p": 0.75}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"min_p": 0.35}, {0, 1}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # 0.5 of the 0.8 that are left is 0.625
        ({"top_k": 3, "min_p": 0.5}, {0, 1}),
    ],
)
def test_cuts_exclude_the_tail(cut: dict[str, float], kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(500, 1)
    specs = [spec(temperature=1.0, uniform=index / 500, **cut) for index in range(500)]
    assert set(sample(logits, specs)) == kept


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.5, 0.0]])
    assert sample(logits, [spec(prompt=[0], repetition_penalty=2.0)]) == [2], "2 / 2 < 1.5"
    assert sample(logits, [spec(prompt=[0], presence_penalty=1.0)]) == [0], "it does not apply to the prompt"
    assert sample(logits, [spec(answer=[0], presence_penalty=1.0)]) == [2], "2 - 1 < 1.5"
    assert sample(logits, [spec(answer=[0], frequency_penalty=0.4)]) == [0], "2 - 0.4 > 1.5"
    assert sample(logits, [spec(answer=[0, 0], frequency_penalty=0.4)]) == [2], "2 - 0.8 < 1.5"
    assert sample(logits, [spec(logit_bias={1: 5.0})]) == [1]
    assert sample(logits, [spec(forbidden=[0, 2])]) == [3]
    assert logits.tolist() == [[2.0, -1.0, 1.5, 0.0]], "the logits are unchanged"


EXTREME: list[dict[str, Any]] = [
    {"temperature": 1e-50},
    {"temperature": 1e-38},
    {"temperature": 1e-5},
    {"temperature": 1e300},
    {"temperature": 1.0, "repetition_penalty": 1e-50},
    {"temperature": 1.0, "repetition_penalty": 1e300},
    {"temperature": 1.0, "logit_bias": {2: 1e300, 3: -1e300}},
    {"temperature": 1e-3, "repetition_penalty": 1e-50, "logit_bias": {0: -1e300, 2: 1e300}},
    {"temperature": 1.0, "presence_penalty": 1e308, "frequency_penalty": 1e300},
]


@pytest.mark.parametrize("num_tried", [2, 1024])
def test_extreme_parameters_of_a_request_do_not_fail_its_batch(num_tried: int) -> None:
    logits = torch.tensor([2.0, -1.0, 1.5, 0.0, 1.0]).repeat(2, 1)
    good = spec(temperature=1.0, uniform=0.6)
    alone = sample(logits[:1], [good])
    for params in EXTREME:
        bad = spec(prompt=[0, 1], answer=[4], forbidden=[1], uniform=0.9, **params)
        with patch("stillroom.ops.sampling.NUM_TRIED", num_tried):
            token, other = sample(logits, [bad, good])
        assert token != 1 and [other] == alone, params
        if "temperature" in params and params["temperature"] < 1e-3:
            assert token == 0
        if params.get("logit_bias"):
            assert token == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_rows_are_found(value: float, dtype: torch.dtype) -> None:
    logits = torch.full((4, 200_000), 30.0, dtype=dtype)
    assert non_finite_rows(logits) == []
    logits[1, 7] = logits[3, 199_999] = value
    assert non_finite_rows(logits) == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_largest_logits_fail_no_batch_and_break_no_rule(dtype: torch.dtype) -> None:
    logits = torch.tensor([[65504.0] * 5, [2.0, -1.0, 1.5, 0.0, 1.0]], dtype=dtype)
    good = spec(temperature=1.0, uniform=0.6)
    for temperature in (0.0, 1e-4, 1.0):
        bad = spec(temperature=temperature, uniform=0.5, forbidden=[0])._replace(constraint=FixedConstraint([0, 3]))
        assert sample(logits, [bad, good]) == [3, *sample(logits[1:], [good])]


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.linspace(-3, 3, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    for seen in ([39], list(range(0, 40, 2)), list(range(30))):
        theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), logits[None].clone())
        assert sample(logits[None], [spec(prompt=seen, repetition_penalty=1.7)]) == [int(theirs.argmax())]


def test_logprobs_are_those_of_the_original_logits() -> None:
    probabilities = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5]])
    first, second = logprobs(probabilities.log(), [0, 2], [2, 0])
    assert first.logprob == pytest.approx(np.log(0.1), abs=1e-6)
    assert [token for token, _ in first.top] == [1, 2]
    assert [value for _, value in first.top] == pytest.approx(np.log([0.6, 0.3]), abs=1e-6)
    assert second.logprob == pytest.approx(np.log(0.5), abs=1e-6)
    assert second.top == ()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": 4, "min_tokens": 5},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {1: float("nan")}},
        {"logprobs": 21},
        {"seed": -1},
        {"max_tokens": 1.5},
        {"min_tokens": True},
        {"top_k": "3"},
        {"logprobs": True},
        {"seed": None},
        {"temperature": "hot"},
        {"top_p": False},
        {"min_p": 10**400},
        {"logit_bias": {1: "x"}},
        {"logit_bias": {1: 0.0, 1.5: 0.0}},
        {"logit_bias": [1]},
    ],
)
def test_impossible_values_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{list(bad)[-1]}="):
        SamplingParams(**bad)


def test_numpy_numbers_are_accepted() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        logprobs=np.int32(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=1,
        logit_bias={np.int64(7): np.float64(1.0)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(max_tokens=3, logprobs=2, temperature=0.5, logit_bias={7: 1.0})
    kept = (params.max_tokens, params.logprobs, params.temperature, params.top_p, *params.logit_bias)
    assert [type(one) for one in kept] == [int, int, float, float, int]


def test_random_numbers_depend_on_seed_and_index_only() -> None:
    assert uniform_at(3, 5) == uniform_at(3, 5)
    assert len({uniform_at(seed, index) for seed in range(20) for index in range(20)}) == 400
