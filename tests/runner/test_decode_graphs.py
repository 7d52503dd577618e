"""Decoding from static tensors equals decoding from newly packed ones; on a GPU also when captured, without waiting.

On a CPU the step is computed launch by launch, with the kernels in Triton's interpreter.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stillroom.core.batch import Batch, SampleSpec, ScheduledSequence
from stillroom.core.ids import RequestId
from stillroom.core.request import SamplingParams
from stillroom.engine.engine import Engine
from stillroom.kvstore.device import DeviceStore, KVShape
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from stillroom.runner.decode_graphs import SIZES, DecodeGraphs, StaticDecoding
from stillroom.runner.torch_runner import TorchRunner
from tests.engine.harness import Run, engine_on, random_segments, request, samples_of
from tests.fakes import random_checkpoint
from tests.gpu_kernels import DEVICE, use_kernels

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 24}),
    "gemma2": ("Gemma2", {"head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 24}),
}
NUM_BLOCKS = 40


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, settings = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    random_checkpoint(path, kind, **settings)
    return path


class CountingDecoding(StaticDecoding):
    num_steps = 0

    def logits(self, batch: Batch) -> torch.Tensor:
        self.num_steps += 1
        return super().logits(batch)


def static(engine: Engine) -> CountingDecoding:
    """Let an engine decode from static tensors."""
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    runner.decoding = decoding = CountingDecoding(runner.decoder, runner.store)
    return decoding


def answers(engine: Engine) -> dict[str, list[int]]:
    """Return answers of requests that arrive while others decode, one with several samples, over too few blocks."""
    rng, run = np.random.default_rng(0), Run(engine)
    for index, lengths in enumerate([[5, 20, 9], [33], [1, 16, 17, 4]]):
        run.submit(request(str(index), random_segments(rng, 301, lengths), max_tokens=12))
        run.step()
    group = request("group", random_segments(rng, 301, [19]), max_tokens=9, temperature=0.8, seed=3)
    run.submit_samples(*samples_of(group, 2))
    run.finish()
    return run.tokens


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_engine_answers_the_same_with_static_decoding(folder: Path) -> None:
    engine = engine_on(folder, num_blocks=13)
    decoding = static(engine)
    assert answers(engine) == answers(engine_on(folder, num_blocks=13))
    assert decoding.num_steps > 10


def decode_batch(lengths: list[int], seed: int = 0) -> Batch:
    """Return a decoding step of sequences with these lengths on slots of their own; the last token of each is new."""
    rng = np.random.default_rng(seed)
    slots = np.split(rng.permutation(NUM_BLOCKS * 16)[: sum(lengths)], np.cumsum(lengths)[:-1])
    sequences = []
    for index, (length, context) in enumerate(zip(lengths, slots, strict=True)):
        token_ids = rng.integers(3, 301, size=length)
        spec = SampleSpec(RequestId(str(index)), SamplingParams(max_tokens=4), 0.0, token_ids, length)
        sequences.append(ScheduledSequence(spec.request_id, token_ids[-1:], length - 1, context, (spec,)))
    return Batch(tuple(sequences))


def store_for(decoder: Decoder, seed: int = 0) -> DeviceStore:
    """Return a store whose slots hold numbers, as after prompts."""
    spec = decoder.spec
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, decoder.dtype)
    store = DeviceStore(shape, NUM_BLOCKS, 16, decoder.device)
    generator = torch.Generator().manual_seed(seed)
    for kv in (store.k_LSGD, store.v_LSGD):
        kv.copy_(torch.randn(kv.shape, generator=generator))
        kv[:, store.scratch_slot :] = torch.nan  # as uninitialised memory may be
    return store


@pytest.mark.parametrize("way", ["kernels", pytest.param("reference", marks=pytest.mark.slow)])
def test_logits_are_the_same_and_padding_writes_to_the_scratch_slot_only(
    folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_own_decoder(folder, device="cpu")
    store, plain_store = store_for(plain), store_for(plain)
    runner = TorchRunner(plain, plain_store)
    if way == "kernels":
        if DEVICE.type == "cuda":
            pytest.skip("compiled kernels do not run on a CPU; the tests marked gpu run them")
        use_kernels(monkeypatch)
    decoder = load_own_decoder(folder, device="cpu")
    decoding = StaticDecoding(decoder, store)
    before = store.k_LSGD.clone()
    address = decoding._input._numbers.data_ptr()
    for lengths in ([40, 1, 17], [3, 90, 5, 6, 30], [11]):
        batch = decode_batch(lengths)
        logits = decoding.logits(batch)
        with monkeypatch.context() as plainly:
            plainly.setattr("stillroom.ops.attention.has_kernels", lambda device: False)
            expected = plain.logits(plain.hidden_states(runner._pack(batch.sequences), plain_store.layer))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        written = [int(sequence.slots[-1]) for sequence in batch.sequences] + [store.scratch_slot]
        before[:, written] = store.k_LSGD[:, written]
        assert torch.equal(store.k_LSGD.nan_to_num(), before.nan_to_num())
        assert decoding._input._numbers.data_ptr() == address
    assert store.k_LSGD[:, store.scratch_slot].isfinite().all()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_only_pure_decoding_steps_are_supported(folder: Path) -> None:
    decoder = load_own_decoder(folder, device="cpu")
    decoding = StaticDecoding(decoder, store_for(decoder))
    batch = decode_batch([3, 4])
    assert decoding.supports(batch)
    assert not decoding.supports(Batch(()))
    first, second = batch.sequences
    silent = ScheduledSequence(first.request_id, first.token_ids, first.first_position, first.slots, ())
    assert not decoding.supports(Batch((silent, second))), "a piece of a prompt"
    prompt = ScheduledSequence(first.request_id, np.array([4, 5]), 1, first.slots, first.samples)
    assert not decoding.supports(Batch((prompt, second)))
    assert not decoding.supports(Batch((first,) * (SIZES[-1] + 1)))
    long = ScheduledSequence(first.request_id, first.token_ids, 999, np.zeros(1000, np.int64), first.samples)
    assert not decoding.supports(Batch((long,) * 4)), "contexts longer than the static tensor"


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_without_a_gpu_there_are_no_graphs(folder: Path) -> None:
    decoder = load_own_decoder(folder, device="cpu")
    assert DecodeGraphs.of(decoder, store_for(decoder)) is None


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every operation that waits for the GPU raise."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_graph_computes_the_same_as_its_launches(folder: Path, dtype: Any) -> None:
    decoder = load_own_decoder(folder, device="cuda", dtype=dtype)
    graph_store, plain_store = store_for(decoder), store_for(decoder)
    graphs, plain = DecodeGraphs.of(decoder, graph_store), StaticDecoding(decoder, plain_store)
    assert graphs is not None
    for seed, lengths in enumerate([[40, 1, 17], [3, 90, 5, 6, 30], [11, 70, 2], [64] * 8, [9, 9, 9, 9]]):
        batch = decode_batch(lengths, seed)
        torch.testing.assert_close(graphs.logits(batch), plain.logits(batch))
        for ours, theirs in ((graph_store.k_LSGD, plain_store.k_LSGD), (graph_store.v_LSGD, plain_store.v_LSGD)):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.gpu
def test_engine_on_a_gpu_answers_the_same_with_and_without_graphs(folder: Path) -> None:
    """In float32, in which the random model has no near ties."""
    expected = answers(engine_on(folder, num_blocks=13, device="cpu"))
    engine = engine_on(folder, num_blocks=13, device="cuda")
    assert isinstance(engine.runner, TorchRunner) and engine.runner.decoding is not None
    assert answers(engine) == expected
    engine = engine_on(folder, num_blocks=13, device="cuda")
    assert isinstance(engine.runner, TorchRunner)
    engine.runner.decoding = None
    assert answers(engine) == expected


@pytest.mark.gpu
def test_no_layer_waits_for_the_gpu(folder: Path) -> None:
    decoder = load_own_decoder(folder, device="cuda")
    store = store_for(decoder)
    runner, graphs = TorchRunner(decoder, store), DecodeGraphs.of(decoder, store)
    assert graphs is not None
    decoding = decode_batch([40, 1, 17])
    first = decoding.sequences[0]
    prompt = ScheduledSequence(first.request_id, np.arange(3, 33), 10, first.slots, first.samples)
    mixed = Batch((prompt, *decoding.sequences[1:]))
    for batch in (decoding, mixed):
        packed = runner._pack(batch.sequences)
        decoder.logits(decoder.hidden_states(packed, store.layer))  # compiles kernels
        with no_waiting():
            decoder.logits(decoder.hidden_states(runner._pack(batch.sequences), store.layer))
    graphs.logits(decoding)
    with no_waiting():
        graphs.logits(decoding)
