"""The decoder against transformers' own models: logits within 1e-4 and 64 greedy tokens identical, in float32 on the
CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stillroom.models.decoder import PackedInput
from stillroom.models.loader import load_decoder
from stillroom.ops.attention import AttentionSpan
from tests.engine.harness import Run, engine_on, random_segments, request
from tests.fakes import random_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    kind, settings = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return folder, random_checkpoint(folder, kind, shards=request.param == "qwen2", **settings)


def all_logits(folder: Path, token_ids: list[int], pieces: list[int]) -> torch.Tensor:
    """Our logits [T, V] of every position, computed in prompt pieces of the given sizes over scattered slots."""
    decoder = load_decoder(folder, device="cpu")
    spec = decoder.spec
    num_slots = 2 * len(token_ids)
    slots = torch.from_numpy(np.random.default_rng(1).permutation(num_slots)[: len(token_ids)])
    kv = torch.full((2, spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim), torch.nan)
    rows, start = [], 0
    for size in pieces:
        end = start + size
        packed = PackedInput(
            token_ids_T=torch.tensor(token_ids[start:end]),
            positions_T=torch.arange(start, end),
            slots_T=slots[start:end],
            spans=[AttentionSpan(0, size, slots[:end], end)],
            wanted=list(range(size)),
        )
        rows.append(decoder.logits(decoder.hidden_states(packed, lambda layer: (kv[0, layer], kv[1, layer]))))
        start = end
    assert start == len(token_ids)
    return torch.cat(rows)


@pytest.mark.parametrize("pieces", [[90], [1, 37, 16, 1, 35]], ids=["whole", "pieces"])
def test_logits_equal_transformers(checkpoint: tuple[Path, Any], pieces: list[int]) -> None:
    folder, oracle = checkpoint
    token_ids = np.random.default_rng(0).integers(3, 301, size=sum(pieces)).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    ours = all_logits(folder, token_ids, pieces)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def greedy(oracle: Any, token_ids: list[int], count: int) -> list[int]:
    output = oracle.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(token_ids) :]]


def test_64_greedy_tokens_equal_transformers_alone_and_in_a_mixed_batch(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    rng = np.random.default_rng(2)
    prompts = [random_segments(rng, 301, lengths) for lengths in ([5, 20, 9], [33], [1, 16, 17, 4])]
    expected = [greedy(oracle, [t for segment in prompt for t in segment], 64) for prompt in prompts]

    for index, prompt in enumerate(prompts):
        alone = Run(engine_on(folder))
        alone.submit(request("alone", prompt))
        alone.finish()
        assert alone.tokens["alone"] == expected[index]

    together = Run(engine_on(folder, max_num_batched_tokens=24, max_num_seqs=3))
    for index, prompt in enumerate(prompts):  # they arrive while the earlier ones decode
        together.submit(request(str(index), prompt))
        together.step()
        together.step()
    together.finish()
    assert [together.tokens[str(index)] for index in range(len(prompts))] == expected


@pytest.mark.shared
def test_stories260k_reproduces_its_recorded_greedy_continuation(shared: Path) -> None:
    folder = shared / "models" / "stories260k"
    expected = json.loads((folder / "greedy_60.json").read_text())
    run = Run(engine_on(folder))
    run.submit(request("story", [expected[:1]], max_tokens=len(expected) - 1))
    run.finish()
    assert expected[:1] + run.tokens["story"] == expected


@pytest.mark.gpu
def test_logits_on_cuda_are_close_to_transformers_on_the_cpu(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    token_ids = np.random.default_rng(0).integers(3, 301, size=90).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    decoder = load_decoder(folder, device="cuda")
    spec = decoder.spec
    kv = torch.empty((2, spec.num_layers, 96, spec.num_kv_heads, spec.head_dim), device="cuda")
    positions = torch.arange(90, device="cuda")
    packed = PackedInput(
        torch.tensor(token_ids, device="cuda"),
        positions,
        positions,
        [AttentionSpan(0, 90, slice(0, 90), 90)],
        list(range(90)),
    )
    ours = decoder.logits(decoder.hidden_states(packed, lambda layer: (kv[0, layer], kv[1, layer])))
    torch.testing.assert_close(ours.cpu(), expected, atol=1e-3, rtol=1e-3)
