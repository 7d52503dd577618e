"""Prompt lookup changes the number of steps and no token: beside engines without it, in float32."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stillroom.core.batch import Batch, SampledToken, SampleSpec, StepResult
from stillroom.core.ids import RequestId
from stillroom.core.request import Request, SamplingParams
from stillroom.models.decoder import Decoder
from stillroom.models.json_constraint import JsonConstraints
from stillroom.models.source_numbers import source_number_grammar
from stillroom.models.tokenizer import Tokenizer
from stillroom.scheduler.prompt_lookup import LookupAccounts, SequenceLookup
from tests.engine.engine_fixture import EngineFixture, question
from tests.engine.harness import Run, engine_on, request, samples_of
from tests.fakes import byte_tokenizer


class Eager(LookupAccounts):
    """Proposes everything that fits, so that many proposals are wrong."""

    def lengths(self, lookups: Sequence[SequenceLookup], budget: int) -> list[int]:
        lengths = []
        for lookup in lookups:
            lengths.append(min(budget, len(lookup.proposal.token_ids)))
            budget -= lengths[-1]
        return lengths


def requests() -> list[Request]:
    """Return requests whose prompts repeat themselves, with every way to sample."""
    rng = np.random.default_rng(5)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "seed": 3, "logprobs": 2},
        {"temperature": 1.5, "top_k": 4, "seed": 8},
        {"repetition_penalty": 1.05, "logprobs": 0},
        {"presence_penalty": 0.2, "frequency_penalty": 0.1, "min_tokens": 9},
        {"logit_bias": {4: 3.0, 5: 3.0, 6: 3.0}, "temperature": 0.8, "seed": 13},
        {"max_tokens": 1},
        {"max_tokens": 33},
    ]
    found = []
    for index, way in enumerate(ways):
        passage = rng.integers(3, 9, size=20).tolist()
        found.append(request(f"r{index}", [[3, 4, 5], passage, [7, *passage[:6]]], **{"stop": (1, 9), **way}))
    return found


def run(folder: Path, asked: Sequence[Request], *, lookup: int, eager: bool = True, **sizes: Any) -> Run:
    driven = Run(engine_on(folder, dtype="float32", prompt_lookup=lookup, **sizes))
    if eager:
        driven.engine.scheduler.proposer.accounts = Eager()
    driven.submit(*asked)
    driven.finish()
    return driven


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    "sizes", [{}, {"num_blocks": 17}, {"max_num_batched_tokens": 9, "max_num_seqs": 3}], ids=["wide", "few", "narrow"]
)
def test_answers_are_the_same_as_without_lookup(folder: Path, sizes: dict[str, Any], eager: bool) -> None:
    without = run(folder, requests(), lookup=0, **sizes)
    with_lookup = run(folder, requests(), lookup=7, eager=eager, **sizes)
    assert with_lookup.tokens == without.tokens
    assert with_lookup.reasons == without.reasons and not with_lookup.errors
    accounts = with_lookup.engine.scheduler.proposer.accounts
    assert 0 < accounts.num_accepted < accounts.num_proposed
    assert with_lookup.num_steps < without.num_steps
    assert (with_lookup.num_preemptions > 0) == (sizes.get("num_blocks") == 17)


def test_samples_of_one_prompt_are_the_same_as_without_lookup(folder: Path) -> None:
    group = samples_of(requests()[2], 4)
    runs = []
    for lookup in (0, 5):
        driven = Run(engine_on(folder, dtype="float32", prompt_lookup=lookup))
        driven.engine.scheduler.proposer.accounts = Eager()
        driven.submit_samples(*group)
        driven.finish()
        runs.append(driven)
    assert runs[0].tokens == runs[1].tokens
    assert runs[1].engine.scheduler.proposer.accounts.num_proposed


@pytest.mark.parametrize("max_tokens", range(2, 14))
def test_answer_ends_at_max_tokens_within_an_accepted_run(folder: Path, max_tokens: int) -> None:
    asked = [request("a", [[3], [4, 5, 6, 7]], max_tokens, logit_bias={5: 90.0})]
    driven = run(folder, asked, lookup=6)
    assert driven.tokens["a"] == [5] * max_tokens
    counts = driven.engine.lookup_counts
    assert counts.num_accepted == counts.num_proposed


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_constrained_answers_are_the_same_as_without_lookup(folder: Path, temperature: float) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    constraints = JsonConstraints(tokenizer, 301, frozenset({1}))
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "is_large": {"type": "boolean"}},
        "required": ["name", "is_large"],
        "additionalProperties": False,
    }
    text = tokenizer.encode_text('{"name": "ship", "is_large": true}{"name": "town", "is_large": false}')
    grammars = [constraints.compile(schema), constraints.compile_lark(source_number_grammar(2))]
    asked = [
        replace(
            request(str(index), [[3], text, [5, *text[:8]]], 40, [1], temperature=temperature, seed=index),
            constraint=grammar,
        )
        for index, grammar in enumerate(grammars * 2)
    ]
    without, with_lookup = run(folder, asked, lookup=0), run(folder, asked, lookup=7)
    assert with_lookup.tokens == without.tokens and with_lookup.reasons == without.reasons
    assert not with_lookup.errors and with_lookup.engine.scheduler.proposer.accounts.num_accepted > 10
    assert json.loads(tokenizer.decode(with_lookup.tokens["0"])).keys() == {"name", "is_large"}


def test_stop_token_ends_an_answer_within_a_proposal(folder: Path) -> None:
    asked = request("a", [[3], [4, 5, 6, 7]], 30, logit_bias={5: 90.0})
    engine = engine_on(folder, dtype="float32", prompt_lookup=6)
    execute, driven = engine.runner.execute, Run(engine)

    def stopping(batch: Batch) -> StepResult:
        result = execute(batch)
        following = {name: (SampledToken(2), *rest[1:]) for name, rest in result.following.items()}
        return replace(result, following=following)

    engine.runner.execute = stopping  # type: ignore[method-assign]
    driven.submit(replace(asked, stop_token_ids=frozenset({2})))
    driven.finish()
    assert set(driven.tokens["a"]) == {5} and driven.reasons["a"] == "stop"


def test_log_probabilities_are_those_without_lookup(folder: Path) -> None:
    found = []
    for lookup in (0, 7):
        engine = engine_on(folder, dtype="float32", prompt_lookup=lookup)
        engine.scheduler.proposer.accounts = Eager()
        for one in requests():
            engine.submit(replace(one, stop_token_ids=frozenset()))
        events = []
        while engine.has_work:
            events += engine.step()
        found.append(
            {
                name: [one.logprobs.logprob for one in events if one.request_id == name and one.logprobs]
                for name in ("r1", "r3")
            }
        )
    for name in ("r1", "r3"):
        assert len(found[0][name]) > 5
        np.testing.assert_allclose(found[1][name], found[0][name], atol=1e-4)


def test_cancelled_request_frees_the_blocks_of_its_proposals(folder: Path) -> None:
    driven = Run(engine_on(folder, dtype="float32", prompt_lookup=20))
    driven.engine.scheduler.proposer.accounts = Eager()
    driven.submit(*requests()[:3])
    for _ in range(4):
        driven.step()
    driven.cancel("r1")
    driven.finish()


def test_step_that_fails_with_proposals_runs_again_without_them(folder: Path) -> None:
    asked = requests()[:3]
    engine = engine_on(folder, dtype="float32", prompt_lookup=5)
    execute, driven, num_failed = engine.runner.execute, Run(engine), 0

    def failing(batch: Batch) -> StepResult:
        nonlocal num_failed
        if any(entry.num_proposed for entry in batch.sequences):
            num_failed += 1
            raise RuntimeError("too many rows")
        return execute(batch)

    engine.runner.execute = failing  # type: ignore[method-assign]
    driven.submit(*asked)
    driven.finish()
    assert num_failed and not driven.errors
    assert driven.tokens == run(folder, asked, lookup=0).tokens


def spec(name: str) -> SampleSpec:
    return SampleSpec(RequestId(name), SamplingParams(), 0.0, np.zeros(1, np.int64), 1)


def test_broken_logits_after_a_proposal_end_the_run_and_not_the_request() -> None:
    specs = [spec("a"), spec("a"), spec("a"), spec("b"), spec("c"), spec("c")]
    tokens = [SampledToken(token) for token in range(6)]
    result = StepResult.of_samples(specs, tokens, {1, 4})
    assert result.token_ids == {"a": 0, "b": 3, "c": 4}
    assert result.following == {} and result.non_finite == {"c"}


def test_kept_kv_holds_no_rejected_tokens(decoder: Decoder) -> None:
    with_lookup = EngineFixture(decoder, None, prompt_lookup=6, disk_records=0)
    without = EngineFixture(decoder, None, mode="off")
    with_lookup.engine.scheduler.proposer.accounts = Eager()
    num_kept = 0
    for index, documents in enumerate([(1, 2), (1, 2), (1, 3), (2, 1), (1, 2)]):
        for tail in (3, 13):
            asked = question(f"q{index}-{tail}", *documents, tail=tail)
            bias = dict.fromkeys(range(20, 25), 20.0)
            params = SamplingParams(max_tokens=20, temperature=1.0, seed=index, logit_bias=bias)
            asked = replace(asked, sampling=params)
            tokens, reuse = with_lookup.run(asked)
            assert tokens == without.run(asked)[0]
            num_kept += reuse.num_cached_tokens
    accounts = with_lookup.engine.scheduler.proposer.accounts
    assert 0 < accounts.num_accepted < accounts.num_proposed and num_kept
