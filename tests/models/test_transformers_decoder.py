"""Architectures that transformers computes and our attention serves equal transformers alone: logits within 1e-4 and 64
identical greedy tokens, in float32 on the CPU, also with kept KV. What cannot be served is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stillroom.errors import ConfigError, ModelError, UnsupportedModelError
from stillroom.models.decoder import Decoder
from stillroom.models.loader import fingerprint_of, load_decoder
from stillroom.models.transformers_decoder import TransformersDecoder
from tests.devices import TEST_DEVICE
from tests.engine.engine_fixture import EngineFixture, Oracle, anywhere_fixture, question
from tests.fakes import random_checkpoint
from tests.models.test_oracle import (  # with the checkpoints of this file
    Answers,
    answers,  # noqa: F401
    check_under_stress,
    test_64_greedy_tokens_alone_equal_transformers,  # noqa: F401
    test_logits_equal_transformers,  # noqa: F401
)
from tests.models.test_oracle import (
    test_half_precision_is_as_close_to_float32_as_in_transformers as compare_half_precision,
)

WINDOW = {"sliding_window": 24}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    **WINDOW,
}

CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt-oss-sinks": ("GptOss", {"head_dim": 16, **LOCAL_EXPERTS, **WINDOW}, True),
    "gpt2-learned-positions": ("GPT2", {}, False),
    "gemma4-two-shapes": ("Gemma4Text", GEMMA4, True),
    "deepseek-v3-latent": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 1}, True),
    "cohere2-neighbours-no-positions": ("Cohere2", {"head_dim": 8, **WINDOW}, True),
    "granite-multipliers": ("Granite", MULTIPLIERS, True),
    "gpt-neox": ("GPTNeoX", {}, True),
    "codegen": ("CodeGen", {"rotary_dim": 4}, False),
    "persimmon": ("Persimmon", {}, True),
    "stablelm": ("StableLm", {}, True),
    "gptj": ("GPTJ", {"rotary_dim": 4}, False),
    "gpt-bigcode-one-head": ("GPTBigCode", {}, False),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 48}, False),
    "phi": ("Phi", {}, True),
    "gemma": ("Gemma", {"head_dim": 16}, True),
    "cohere": ("Cohere", {}, True),
    "olmo": ("Olmo", {"pad_token_id": 0}, True),
    "olmo2-post-norms": ("Olmo2", {"pad_token_id": 0}, True),
    "olmo3": ("Olmo3", {"pad_token_id": 0, **WINDOW}, True),
    "olmoe": ("Olmoe", {"pad_token_id": 0, **EXPERTS}, True),
    "granite-moe": ("GraniteMoe", LOCAL_EXPERTS, True),
    "smollm3-no-positions": ("SmolLM3", {"pad_token_id": 0, "no_rope_layers": [1, 0, 1]}, True),
    "glm-neighbours": ("Glm", {"head_dim": 16, "pad_token_id": 0}, True),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}, True),
    "glm4-moe": ("Glm4Moe", {"head_dim": 16, **ROUTED}, True),
    "deepseek-v2": ("DeepseekV2", LATENT, True),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}, True),
    "ernie4.5": ("Ernie4_5", {"head_dim": 8}, True),
    "exaone4": ("Exaone4", {"head_dim": 8, "sliding_window_pattern": 2, **WINDOW}, True),
    "nemotron": ("Nemotron", {}, True),
    "starcoder2": ("Starcoder2", WINDOW, True),
    "helium": ("Helium", {"head_dim": 8, "pad_token_id": 0}, True),
    "arcee": ("Arcee", {}, True),
    "apertus": ("Apertus", {}, True),
    "seed-oss": ("SeedOss", {"head_dim": 8}, True),
    "hunyuan-norm-behind-rotation": ("HunYuanDenseV1", {"head_dim": 8}, False),
    "ministral3": ("Ministral3", {"head_dim": 8}, True),
    "phimoe": ("Phimoe", {"num_local_experts": 4}, True),
    "minimax-m2": ("MiniMaxM2", {"head_dim": 8, **LOCAL_EXPERTS}, True),
    "nanochat-turns-backwards": ("NanoChat", {}, True),
    "vaultgemma": ("VaultGemma", {"head_dim": 16, **WINDOW}, True),
}
"""The architecture, its settings, and whether its KV may be reused at other positions."""
IN_SHORT = 1
"""So many of the first cases run in `make test`, the others in `make test-all`."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "linear-attention": ("Qwen3_5Text", {"layer_types": ["linear_attention"] * 3}, "layers of type linear_attention"),
    "convolution": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention"]}, "layers of type conv"),
    "state-space": ("Mamba", {}, "layers of type"),
    "encoder": ("Bert", {}, "tokens see those behind them"),
    "own-masks": ("Doge", {}, "masks of its own"),
    "two-attentions": ("DiffLlama", {}, "attention is called 6 times, for 3 of its 3 layers"),
    "other-calls": ("LongcatFlash", {}, "its code in transformers stops"),
    "own-table": ("Falcon", {}, "does not go through transformers' interface"),
    "chunks": ("Llama4Text", {"head_dim": 8}, "layers of type chunked_attention are not computed here"),
    "no-interface": ("Bloom", {}, "does not go through transformers' interface"),
    "changing-frequencies": (
        "Olmo2",
        {"pad_token_id": 0, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "RoPE scaling 'dynamic'",
    ),
}


ROWS = [pytest.param(name, marks=[pytest.mark.slow] if place >= IN_SHORT else []) for place, name in enumerate(CASES)]


@pytest.fixture(scope="module", params=ROWS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    kind, settings, _ = CASES[request.param]
    folder = tmp_path_factory.mktemp("model") / request.param
    return folder, random_checkpoint(folder, kind, **settings)


def test_64_greedy_tokens_of_a_batch_under_stress_equal_transformers(
    checkpoint: tuple[Path, Any],
    answers: Answers,  # noqa: F811  the fixture
) -> None:
    check_under_stress(checkpoint, answers)


def test_answers_with_kept_kv_equal_those_without(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """On the device, on the host and on disk, exactly; at other positions where keys turn, all tokens recomputed."""
    decoder = load_decoder(checkpoint[0], device=TEST_DEVICE)
    assert isinstance(decoder, TransformersDecoder)
    oracle, fixture = Oracle(decoder), EngineFixture(decoder, tmp_path, load="always")
    for number, documents in enumerate([(1, 2, 3), (1, 2, 3), (1, 2), (4, 5, 6), (1, 2, 3)]):
        one = question(f"exact{number}", *documents)
        tokens, reuse = fixture.run(one)
        assert tokens == oracle.answer(one)
        assert reuse.num_cached_tokens > 0 or number in (0, 3)
    if not CASES[checkpoint[0].name][2]:
        with pytest.raises(ConfigError, match=r"use reuse\.mode=exact"):
            anywhere_fixture(decoder)
        return
    for selector in ("question", "deviation"):
        placing = anywhere_fixture(decoder, ratio=1.0, selector=selector)
        for number, documents in enumerate([(1, 2, 3), (3, 1, 2), (2, 3)]):
            one = question(f"placed{number}", *documents)
            tokens, reuse = placing.run(one)
            assert tokens == oracle.answer(one)
            assert reuse.has_placed is (number > 0)


@pytest.mark.parametrize(
    "checkpoint",
    [row for row in ROWS if not any("experts" in key for key in CASES[str(row.values[0])][1])],
    indirect=True,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_without_experts_is_as_close_to_float32_as_in_transformers(
    checkpoint: tuple[Path, Any], dtype: str, tmp_path: Path
) -> None:
    """Rounding decides near ties between experts, which changes all later tokens."""
    compare_half_precision(checkpoint, dtype, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] if one == "other-calls" else []) for one in REFUSED]
)
def test_what_cannot_be_computed_by_slots_is_refused_by_name(tmp_path: Path, name: str) -> None:
    kind, settings, reason = REFUSED[name]
    random_checkpoint(tmp_path, kind, **settings)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_decoder(tmp_path, device="cpu")


def test_other_attention_than_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose attention does something that its call does not say."""
    from stillroom.models import transformers_decoder

    random_checkpoint(tmp_path, "Olmo2", pad_token_id=0)
    attend = transformers_decoder._attend

    def wrong(*tensors: Any, **named: Any) -> Any:
        return attend(*tensors, **{**named, "scaling": 1.3 * named["scaling"]})

    monkeypatch.setattr(transformers_decoder, "_attend", wrong)
    with pytest.raises(UnsupportedModelError, match="its logits differ by"):
        load_decoder(tmp_path, device="cpu")


def test_missing_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    random_checkpoint(tmp_path, "Olmo2", pad_token_id=0)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks 1 tensors, such as {name}"):
        load_decoder(tmp_path, device="cpu")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="no safetensors"):
        load_decoder(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("kind", "settings", "changes"),
    [
        ("Olmo2", {"pad_token_id": 0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("GptOss", {"head_dim": 16, **LOCAL_EXPERTS, "sliding_window": 128}, {"sliding_window": 16}),
        ("Granite", MULTIPLIERS, {"residual_multiplier": 0.25}),
    ],
)
def test_models_of_one_file_of_weights_and_different_configs_share_no_kv(
    tmp_path: Path, kind: str, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    folder, same, other = tmp_path / "model", tmp_path / "same", tmp_path / "other"
    random_checkpoint(folder, kind, **settings)
    for copied in (same, other):
        shutil.copytree(folder, copied)
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | changes))
    found = [fingerprint_of(one, load_decoder(one, device="cpu")) for one in (folder, same, other)]
    shorter = fingerprint_of(folder, load_decoder(folder, device="cpu", max_model_len=200))
    assert found[0] == found[1] == shorter != found[2]


def test_our_own_decoder_is_used_where_it_can_be(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "Llama")
    assert isinstance(load_decoder(tmp_path, device="cpu"), Decoder)
