"""A request that begins with generated tokens ends as the run that generated them: beside uninterrupted runs, in
float32."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from stillroom.core.batch import TokenLogprobs
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.core.reuse import Reason
from stillroom.models.causal_model import CausalModel
from stillroom.models.json_constraint import JsonConstraints
from stillroom.models.loader import load_decoder
from stillroom.models.tokenizer import Tokenizer
from tests.engine.engine_fixture import EngineFixture, Oracle, anywhere_fixture, question
from tests.engine.harness import Run, engine_on, request, samples_of
from tests.fakes import byte_tokenizer, random_checkpoint

EOS = 1
SIZES: list[dict[str, Any]] = [
    {},
    {"num_blocks": 22},
    {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    {"prompt_lookup": 7, "max_num_batched_tokens": 64},
]


class LoggingRun(Run):
    """Keeps the log probabilities of the tokens too."""

    def __init__(self, folder: Path, sizes: dict[str, Any]) -> None:
        super().__init__(engine_on(folder, dtype="float32", **sizes))
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.firsts: dict[str, int] = {}
        """Events with an admission, by request."""
        step = self.engine.step

        def logging_step() -> Any:
            events = step()
            for event in events:
                if event.logprobs is not None:
                    self.logprobs.setdefault(event.request_id, []).append(event.logprobs)
                if event.admission is not None and event.token_id is not None:
                    self.firsts[event.request_id] = self.firsts.get(event.request_id, 0) + 1
            return events

        self.engine.step = logging_step  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def decoder(folder: Path) -> CausalModel:
    return load_decoder(folder, device="cpu", dtype="float32")


def requests() -> list[Request]:
    """Return requests with every way to sample."""
    rng = np.random.default_rng(5)
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}
    constraint = JsonConstraints(Tokenizer(byte_tokenizer()), 301, frozenset({EOS})).compile(schema)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "seed": 3, "logprobs": 2},
        {"temperature": 1.5, "top_k": 4, "min_p": 0.05, "seed": 8},
        {"repetition_penalty": 1.05, "logprobs": 0},
        {"presence_penalty": 0.2, "frequency_penalty": 0.1, "min_tokens": 9, "temperature": 0.9, "seed": 5},
        {"logit_bias": {4: 3.0, 5: 3.0, 6: 3.0}, "temperature": 0.8, "seed": 1, "min_tokens": 6},
        {"max_tokens": 2},
        {"temperature": 2.0, "seed": 4},
    ]
    found = []
    for index, way in enumerate(ways):
        passage = rng.integers(3, 9, size=20).tolist()
        segments = [[3, 4, 5], passage, [7, *passage[:6]]]
        found.append(request(f"r{index}", segments, **{"stop": (EOS, 9), "max_tokens": 24, **way}))
    found[-1] = replace(found[-1], stop_token_ids=frozenset({EOS}), constraint=constraint)
    return found


def run(folder: Path, asked: Sequence[Request], sizes: dict[str, Any]) -> LoggingRun:
    driven = LoggingRun(folder, sizes)
    driven.submit(*asked)
    driven.finish()
    assert not driven.errors
    return driven


def cuts_of(whole: LoggingRun, one: Request) -> range:
    """Return after how many tokens a request may be interrupted: it has one left to generate, or a stop token."""
    num_tokens = len(whole.tokens[one.request_id])
    ends_by_stop = whole.reasons[one.request_id] is FinishReason.STOP and one.constraint is None
    return range(num_tokens + ends_by_stop)


@pytest.mark.parametrize("sizes", SIZES, ids=["wide", "few", "narrow", "lookup"])
def test_a_resumed_answer_ends_as_the_uninterrupted_one(folder: Path, sizes: dict[str, Any]) -> None:
    asked, random = requests(), Random(7)
    whole = run(folder, asked, {})
    assert set(whole.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    for _ in range(4):
        cuts = [random.choice(cuts_of(whole, one)) for one in asked]
        resumed = [
            replace(one, generated=tuple(whole.tokens[one.request_id][:cut]))
            for one, cut in zip(asked, cuts, strict=True)
        ]
        rest = run(folder, resumed, sizes)
        assert rest.tokens == {
            one.request_id: whole.tokens[one.request_id][cut:] for one, cut in zip(asked, cuts, strict=True)
        }
        assert rest.reasons == whole.reasons
        assert rest.firsts == {name: 1 for name, tokens in rest.tokens.items() if tokens}
        if not sizes:
            check_logprobs(whole, rest, asked, cuts)


def check_logprobs(whole: LoggingRun, rest: LoggingRun, asked: Sequence[Request], cuts: Sequence[int]) -> None:
    for one, cut in zip(asked, cuts, strict=True):
        expected = whole.logprobs.get(one.request_id, [])[cut:]
        found = rest.logprobs.get(one.request_id, [])
        assert len(found) == len(expected)
        for here, there in zip(found, expected, strict=True):
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
            assert [token for token, _ in here.top] == [token for token, _ in there.top]


def test_every_place_of_an_answer_can_be_resumed(folder: Path) -> None:
    asked = requests()
    whole = run(folder, asked, {})
    for one in asked[1:3] + asked[-1:]:
        tokens = whole.tokens[one.request_id]
        parts = [
            replace(one, request_id=RequestId(str(cut)), generated=tuple(tokens[:cut])) for cut in cuts_of(whole, one)
        ]
        rest = run(folder, parts, {})
        assert rest.tokens == {part.request_id: tokens[len(part.generated) :] for part in parts}


def test_samples_resume_each_from_its_own_number_of_tokens(folder: Path) -> None:
    group = samples_of(request("g", [[3, 4, 5], [6, 7, 8, 3] * 5, [7, 3]], max_tokens=12, temperature=1.5, seed=2), 4)
    whole = LoggingRun(folder, {})
    whole.submit_samples(*group)
    whole.finish()
    cuts = [0, 0, 3, 11]
    parts = [
        replace(one, generated=tuple(whole.tokens[one.request_id][:cut])) for one, cut in zip(group, cuts, strict=True)
    ]
    rest = LoggingRun(folder, {})
    rest.submit_samples(*parts[:2])
    rest.submit(*parts[2:])
    rest.finish()
    assert rest.tokens == {
        one.request_id: whole.tokens[one.request_id][cut:] for one, cut in zip(group, cuts, strict=True)
    }


def test_a_resumed_request_uses_the_kept_kv_of_its_prompt(decoder: CausalModel) -> None:
    fixture, asked = EngineFixture(decoder, None), question("first", 4, 7, tail=9)
    whole, _ = fixture.run(asked)
    num_computed = fixture.num_computed
    again = replace(asked, request_id=RequestId("again"), generated=tuple(whole[:3]))
    rest, reuse = fixture.run(again)
    assert rest == whole[3:]
    assert reuse.num_cached_tokens > 0
    assert fixture.num_computed - num_computed == asked.prompt.num_tokens - reuse.num_cached_tokens + 3 + len(rest) - 1


def test_nothing_is_placed_for_a_resumed_request(decoder: CausalModel) -> None:
    fixture, oracle = anywhere_fixture(decoder), Oracle(decoder)
    fixture.run(question("first", 4, 7))
    asked = question("second", 7, 4)
    exact = oracle.answer(asked)
    placed, reuse = fixture.run(asked)
    assert reuse.has_placed, "the same request places, if it begins here"
    rest, reuse = fixture.run(replace(asked, request_id=RequestId("resumed"), generated=tuple(exact[:2])))
    assert rest == exact[2:] and not reuse.has_placed
    assert all(segment.reason is not Reason.ANYWHERE for segment in reuse.segments)


def test_a_resumed_request_is_cancelled_preempted_and_restarted_as_any_other(folder: Path) -> None:
    asked = requests()[4]
    whole = run(folder, [asked], {}).tokens[asked.request_id]
    driven = LoggingRun(folder, {})
    driven.submit(replace(asked, generated=tuple(whole[:3])))
    driven.step()
    driven.step()
    assert driven.engine.scheduler.num_prefilling == 0
    driven.engine.scheduler.restart(asked.request_id)
    driven.step()
    driven.engine.scheduler.lose_device()
    driven.finish()
    assert driven.tokens[asked.request_id] == whole[3:]
    driven.submit(replace(asked, generated=tuple(whole[:3])))
    assert driven.engine.scheduler.num_prefilling == 0
    driven.step()
    driven.cancel(asked.request_id)
    assert not driven.engine.has_work
