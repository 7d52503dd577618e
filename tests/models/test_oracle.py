"""The decoder equals transformers' models: logits within 1e-4 and 64 identical greedy tokens, in float32 on the
CPU."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stillroom.models.loader import load_decoder
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionSpan
from tests.devices import TEST_DEVICE
from tests.engine.harness import Run, engine_on, random_segments, request, samples_of
from tests.fakes import BASE, random_checkpoint

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
PARTLY = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    **PARTLY,
    "short_factor": [1.0, 1.3],
    "long_factor": [1.5, 4.0],
}
PHI3_LONG: dict[str, Any] = {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 200}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SOME_DENSE = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True}
LOCAL_AND_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
PER_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}

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
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-window": ("Phi3", {"pad_token_id": 0, "sliding_window": 24}),
    "phi3-partly-rotated": ("Phi3", {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", **PARTLY}}),
    "phi3-longrope": ("Phi3", PHI3_LONG),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral-window-one-expert": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 24}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "qwen3-moe-normalised": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "num_experts_per_tok": 3}),
    "qwen3-moe-some-dense": ("Qwen3Moe", {**EXPERTS, "num_hidden_layers": 4, **SOME_DENSE}),
    "gemma2": ("Gemma2", {"head_dim": 16, **CAPS}),
    "gemma2-window": ("Gemma2", {"head_dim": 16, **CAPS, "sliding_window": 24, "query_pre_attn_scalar": 10}),
    "gemma2-uncapped": ("Gemma2", {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "num_hidden_layers": 4, "layer_types": LOCAL_AND_GLOBAL}),
    "gemma3-window": (
        "Gemma3Text",
        {"head_dim": 16, "layer_types": LOCAL_AND_GLOBAL[1:], "sliding_window": 24, "rope_parameters": PER_TYPE},
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    kind, settings = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return folder, random_checkpoint(folder, kind, shards=request.param == "qwen2", **settings)


def all_logits(folder: Path, token_ids: list[int], pieces: list[int], **load: Any) -> torch.Tensor:
    """Return the decoder's logits [T, V] of every position, in prompt pieces of these sizes over scattered slots."""
    decoder = load_decoder(folder, device=TEST_DEVICE, **load)
    spec = decoder.spec
    num_slots = 2 * len(token_ids)
    slots = torch.from_numpy(np.random.default_rng(1).permutation(num_slots)[: len(token_ids)]).to(TEST_DEVICE)
    shape = (2, spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
    kv = torch.full(shape, torch.nan, dtype=decoder.dtype, device=TEST_DEVICE)
    rows, start = [], 0
    for size in pieces:
        end = start + size
        packed = PackedInput(
            token_ids_T=torch.tensor(token_ids[start:end], device=TEST_DEVICE),
            positions_T=torch.arange(start, end, device=TEST_DEVICE),
            slots_T=slots[start:end],
            spans=[AttentionSpan(0, size, slots[:end], end)],
            wanted=list(range(size)),
        )
        rows.append(decoder.logits(decoder.hidden_states(packed, lambda layer: (kv[0, layer], kv[1, layer]))))
        start = end
    assert start == len(token_ids)
    return torch.cat(rows).cpu()


@pytest.mark.parametrize("pieces", [[90], [1, 37, 16, 1, 35]], ids=["whole", "pieces"])
def test_logits_equal_transformers(checkpoint: tuple[Path, Any], pieces: list[int]) -> None:
    folder, oracle = checkpoint
    token_ids = np.random.default_rng(0).integers(3, 301, size=sum(pieces)).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    ours = all_logits(folder, token_ids, pieces)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {"sliding_window": 24}),
        ("Mistral", {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}),
        ("Phi3", {"sliding_window": 24, "use_sliding_window": False, "pad_token_id": 0}),
    ],
)
def test_windows_are_read_where_transformers_reads_them(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    oracle = random_checkpoint(tmp_path, kind, num_hidden_layers=2, **settings)
    token_ids = np.random.default_rng(0).integers(3, 301, size=90).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(all_logits(tmp_path, token_ids, [60, 30]), expected, atol=1e-4, rtol=1e-4)


def with_all_experts(folder: Path, copy: Path) -> Path:
    """Make every expert of a checkpoint active for every token, so that there is no choice of experts."""
    shutil.copytree(folder, copy)
    config = json.loads((folder / "config.json").read_text())
    if "num_local_experts" in config:
        config["num_experts_per_tok"] = config["num_local_experts"]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_is_as_close_to_float32_as_in_transformers(
    checkpoint: tuple[Path, Any], dtype: str, tmp_path: Path
) -> None:
    """All experts are active, because rounding would decide near ties between two, which changes all later tokens."""
    from transformers import AutoModelForCausalLM

    folder = with_all_experts(checkpoint[0], tmp_path / "copy")
    token_ids = np.random.default_rng(0).integers(3, 301, size=90).tolist()
    exact, theirs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name), attn_implementation="eager")
        for name in ("float32", dtype)
    )
    with torch.inference_mode():
        expected, other = (model(torch.tensor([token_ids])).logits[0].float() for model in (exact, theirs))
    ours = all_logits(folder, token_ids, [1, 37, 16, 1, 35], dtype=dtype)
    assert (ours - expected).abs().mean() < 1.25 * (other - expected).abs().mean()


def test_longrope_beyond_its_original_length(tmp_path: Path) -> None:
    oracle = random_checkpoint(tmp_path, "Phi3", **PHI3_LONG)
    token_ids = np.random.default_rng(0).integers(3, 301, size=230).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    ours = all_logits(tmp_path, token_ids, [100, 1, 129], max_model_len=400)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    with_short_factors = all_logits(tmp_path, token_ids, [230])
    assert (with_short_factors - expected).abs().max() > 1, "this test cannot tell the two sets of factors apart"


@pytest.mark.parametrize("base", ["language_model.model.", "model.language_model."])
def test_language_model_of_a_checkpoint_with_a_vision_tower(tmp_path: Path, base: str) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    text = {**BASE, "head_dim": 16, "sliding_window": 24, "layer_types": LOCAL_AND_GLOBAL[1:], "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**text, "tie_word_embeddings": True},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        image_token_index=300,
    )
    torch.manual_seed(0)
    oracle = transformers.Gemma3ForConditionalGeneration(config).eval()
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("language_model.model.", base): tensor for name, tensor in tensors.items()}
    assert base + "norm.weight" in renamed
    save_file(renamed, tmp_path / "model.safetensors")
    token_ids = np.random.default_rng(0).integers(3, 299, size=60).tolist()
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(all_logits(tmp_path, token_ids, [13, 47]), expected, atol=1e-4, rtol=1e-4)


def greedy(oracle: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return the tokens that transformers generates for each prompt, in one batch padded on the left."""
    longest = max(map(len, prompts))
    output = oracle.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [[int(token) for token in row] for row in output[:, longest:]]


Answers = list[tuple[list[list[int]], list[int]]]


@pytest.fixture(scope="module")
def answers(checkpoint: tuple[Path, Any]) -> Answers:
    """Prompts of different lengths in segments, and the 64 tokens that transformers generates for each."""
    rng = np.random.default_rng(2)
    lengths = [60], [5, 20, 9], [33], [1, 16, 17, 4], [2, 47], [18, 3, 7]
    prompts = [random_segments(rng, 301, segments) for segments in lengths]
    expected = greedy(checkpoint[1], [[t for segment in prompt for t in segment] for prompt in prompts], 64)
    return list(zip(prompts, expected, strict=True))


@pytest.mark.slow  # those of a batch under stress are of the same engine
def test_64_greedy_tokens_alone_equal_transformers(checkpoint: tuple[Path, Any], answers: Answers) -> None:
    for prompt, expected in answers[:3]:
        run = Run(engine_on(checkpoint[0]))
        run.submit(request("alone", prompt))
        run.finish()
        assert run.tokens["alone"] == expected


UNDER_STRESS = (
    "llama-tied-mha",
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "phi3-longrope",
    "mixtral-window-one-expert",
    "qwen3-moe-some-dense",
    "gemma2-window",
    "gemma3-window",
)
"""One of each kind in `make test`; the logits in prompt pieces, of all."""


@pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(name, marks=[] if name in UNDER_STRESS else [pytest.mark.slow]) for name in CASES],
    indirect=True,
)
def test_64_greedy_tokens_of_a_batch_under_stress_equal_transformers(
    checkpoint: tuple[Path, Any], answers: Answers
) -> None:
    check_under_stress(checkpoint, answers)


def check_under_stress(checkpoint: tuple[Path, Any], answers: Answers) -> None:
    """Eight requests at once, odd prompt pieces, three samples of one prompt, cancellations, and too few blocks."""
    run = Run(engine_on(checkpoint[0], num_blocks=34, max_num_batched_tokens=13, max_num_seqs=8))
    (oldest, _), (forked, _), *others = answers
    run.submit(request("0", oldest))
    run.submit_samples(*samples_of(request("1", forked), 3))
    for index, (prompt, _) in enumerate(others):
        run.submit(request(str(index + 2), prompt))
        run.step()
    while len(run.tokens["0"]) < 33 or not run.num_preemptions:
        run.step()
    assert run.most_running == 8 and run.most_users == 3
    assert run.cancel("0") == 6, "the blocks of 60 tokens and 32 more"
    run.cancel("1/1")
    num_preemptions = run.num_preemptions
    run.finish()
    assert run.num_preemptions > num_preemptions, "also after the cancellations"
    assert set(run.tokens) - set(run.reasons) == {"0", "1/1"}
    for name, tokens in run.tokens.items():
        expected = answers[int(name[0])][1]
        assert tokens == (expected if name in run.reasons else expected[: len(tokens)]), name


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
