"""Building the local backend refuses unusable KV budgets and models; prompts that ask for citations."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stillroom.backends.assembly import build_device, kv_shape
from stillroom.backends.engine_building import build_engine
from stillroom.backends.local import build_backend
from stillroom.config.settings import ReuseConfig, RuntimeConfig, StillroomConfig
from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.errors import ConfigError, ModelError
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from tests.fakes import byte_tokenizer, random_checkpoint


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    return load_own_decoder(tmp_path, device="cpu")


@pytest.mark.parametrize(("kv_bytes", "message"), [(1, "raise it"), (2**60, "lower it"), (2**90, "lower it")])
def test_kv_budget_too_small_or_too_large_is_refused(decoder: Decoder, kv_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"runtime.kv_bytes={kv_bytes} .*{message}"):
        build_device(decoder, RuntimeConfig(kv_bytes=kv_bytes))


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("number", [1.0, float("nan"), float("inf")])
def test_model_that_computes_nan_is_refused_at_load(decoder: Decoder, block_size: int, number: float) -> None:
    decoder.weights.final_norm[3] = number
    config = RuntimeConfig(kv_bytes=block_size * kv_shape(decoder).bytes_per_token, block_size=block_size)
    if torch.tensor(number).isfinite():
        build_engine(decoder, config, SystemClock())
    else:
        with pytest.raises(ModelError, match="computes NaN"):
            build_engine(decoder, config, SystemClock())


def test_asking_for_citations_changes_the_question_only_and_restricts_numbers(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    byte_tokenizer().save_pretrained(tmp_path)
    runtime = RuntimeConfig(model=str(tmp_path), kv_bytes=2**22, num_threads=1)
    chunks = [Chunk(ChunkId(number), DocumentId("d"), number, f"text {number}") for number in (1, 2)]
    prepared = []
    backend = build_backend(StillroomConfig(runtime=runtime, reuse=ReuseConfig(mode="off")), SystemClock())
    try:
        for cites in (False, True):
            prepared.append(replace(backend, asks_for_citations=cites).prepare_prompt(chunks, "Why?", None))
        in_json = replace(backend, asks_for_citations=True).prepare_prompt(chunks, "Why?", None, {"type": "integer"})
    finally:
        backend.close()
    plain, asked = (one.prompt for one in prepared)
    assert isinstance(plain, SegmentedPrompt) and isinstance(asked, SegmentedPrompt)
    assert plain.segments[:-1] == asked.segments[:-1]
    assert len(asked.segments[-1].token_ids) > len(plain.segments[-1].token_ids)
    assert prepared[0].constraint is None and prepared[1].constraint is not None
    assert in_json.prompt == plain
