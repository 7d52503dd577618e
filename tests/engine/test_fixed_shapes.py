"""With fixed shapes reuse changes no bit in bfloat16 either: a kept piece and a computed one have the same rows."""

from collections.abc import Sequence

import numpy as np
import pytest

from stillroom.backends.engine_building import build_engine
from stillroom.config.runtime_settings import ReuseMode
from stillroom.config.settings import ReuseConfig, RuntimeConfig
from stillroom.core.batch import Batch, StepResult, TokenLogprobs
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_model
from tests.fakes import ManualClock

PAIRS = ((0, 1), (0, 1), (0, 2), (3, 0), (3, 1), (0, 2))
"""Document numbers of each question."""


@pytest.fixture(scope="module")
def decoder() -> CausalModel:
    return load_model("bundled:microworld", device="cpu", dtype="bfloat16").decoder


def questions(vocab_size: int) -> list[Request]:
    """Return questions over two documents each; the longest document exceeds a step."""
    randomness = np.random.RandomState(0)
    documents = [tuple(randomness.randint(4, vocab_size, size).tolist()) for size in (40, 130, 33, 90)]
    found = []
    for number, pair in enumerate(PAIRS):
        segments = [Segment(SegmentKind.SYSTEM, tuple(range(5, 15)))]
        segments += [Segment(SegmentKind.CHUNK, documents[one], ChunkId(one)) for one in pair]
        asked = tuple(randomness.randint(4, vocab_size, randomness.randint(1, 50)).tolist())
        segments.append(Segment(SegmentKind.QUESTION, asked))
        sampling = SamplingParams(max_tokens=4, logprobs=20)
        found.append(request(f"q{number}", segments, sampling))
    return found


def request(name: str, segments: Sequence[Segment], sampling: SamplingParams) -> Request:
    return Request(request_id=RequestId(name), prompt=SegmentedPrompt(tuple(segments)), sampling=sampling)


class SequentialEngine:
    """An engine that answers one request at a time."""

    def __init__(self, decoder: CausalModel, mode: ReuseMode, *, fixed_shapes: bool = True) -> None:
        config = RuntimeConfig(block_size=8, kv_bytes=2**22, max_num_batched_tokens=64, fixed_shapes=fixed_shapes)
        reuse = ReuseConfig(mode=mode, tail_blocks=2, load="always")
        profile = linear_profile(1e-3, 1e-4, 1e-7)
        self.engine, _ = build_engine(
            decoder, config, ManualClock(), reuse=reuse, fingerprint=b"m" * 32, profile=profile
        )
        self.batches: list[Batch] = []
        self._execute = self.engine.runner.execute
        self.engine.runner.execute = self._noting  # type: ignore[method-assign]

    def _noting(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        return self._execute(batch)

    @property
    def num_computed(self) -> int:
        return sum(one.num_scheduled_tokens for batch in self.batches for one in batch.sequences)

    def answer(self, one: Request) -> list[tuple[int, TokenLogprobs]]:
        self.engine.submit(one)
        return run(self.engine)


def run(engine: Engine) -> list[tuple[int, TokenLogprobs]]:
    found = []
    while engine.has_work:
        for event in engine.step():
            if event.token_id is not None and event.logprobs is not None:
                found.append((event.token_id, event.logprobs))
        engine.check_integrity()
    return found


def test_reuse_changes_no_bit_of_any_logprob_in_bfloat16(decoder: CausalModel) -> None:
    exact, off = SequentialEngine(decoder, "exact"), SequentialEngine(decoder, "off")
    for one in questions(decoder.spec.vocab_size):
        assert exact.answer(one) == off.answer(one), one.request_id
    assert exact.num_computed < 0.8 * off.num_computed, "much of the prompt was kept"


def ends_of(batches: Sequence[Batch]) -> list[int]:
    return [one.first_position + one.num_scheduled_tokens for batch in batches for one in batch.sequences]


def test_each_piece_is_computed_in_its_own_step(decoder: CausalModel) -> None:
    fixture = SequentialEngine(decoder, "off")
    lengths = 10, 100, 20
    segments = [Segment(SegmentKind.CHUNK, (7,) * length) for length in lengths]
    segments.append(Segment(SegmentKind.QUESTION, (8,) * 40))
    fixture.answer(request("q", segments, SamplingParams(max_tokens=1)))
    assert ends_of(fixture.batches) == [10, 74, 110, 130, 146, 162, 170], "64 tokens at a time, and 16 of the question"


def test_prompt_pieces_and_decodes_alternate_in_steps_of_their_own(decoder: CausalModel) -> None:
    fixture = SequentialEngine(decoder, "exact")
    first, second = questions(decoder.spec.vocab_size)[:2]
    fixture.engine.submit(first)
    while not fixture.batches or not fixture.batches[-1].sequences[0].samples:
        fixture.engine.step()
    fixture.engine.submit(second)
    run(fixture.engine)
    kinds = []
    for batch in fixture.batches:
        is_prefill = any(one.num_scheduled_tokens > 1 for one in batch.sequences)
        assert not is_prefill or len(batch.sequences) == 1
        kinds.append((batch.sequences[0].request_id, is_prefill))
    assert kinds.count((first.request_id, False)) + kinds.count((second.request_id, False)) >= 4
    begun = kinds.index((second.request_id, True))
    assert (first.request_id, False) in kinds[begun : begun + 3], "decoding does not wait for the whole prompt"
