"""Supported layouts of checkpoints, and errors of unusable ones."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.errors import (
    ConfigError,
    ModelError,
    ModelNotFoundError,
    StillroomError,
    UnsupportedModelError,
)
from stillroom.models.checkpoint import WeightFiles, resolve
from stillroom.models.loader import fingerprint_of, load_model, load_own_decoder
from stillroom.models.spec import spec_from_config
from stillroom.ops.rope import inverse_frequencies
from tests.fakes import byte_tokenizer, random_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_both_layouts_of_rope_settings_are_equivalent() -> None:
    old = spec_from_config({**CONFIG, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = spec_from_config({**CONFIG, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    assert (old.rope.theta, old.rope.kind) == (new.rope.theta, new.rope.kind) == (5e5, "linear")
    assert spec_from_config(CONFIG).rope.theta == 10000.0


def test_windows_follow_each_family() -> None:
    assert spec_from_config({**CONFIG, "model_type": "mistral", "sliding_window": 8}).windows == (8,) * 4
    qwen = {**CONFIG, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3}
    assert spec_from_config(qwen).windows == (None,) * 4, "Qwen has windows only with use_sliding_window"
    assert spec_from_config({**qwen, "use_sliding_window": True}).windows == (None, None, None, 8)
    assert spec_from_config({**CONFIG, "sliding_window": 8}).windows == (None,) * 4, (
        "transformers' Llama has no windows"
    )
    mixed = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}
    assert spec_from_config({**CONFIG, **mixed, "model_type": "mistral"}).windows == (8,) * 4, "and ignores layer_types"
    assert spec_from_config({**qwen, **mixed, "use_sliding_window": True}).windows == (None, 8, None, 8)


GEMMA3_4B = {  # its text_config on the hub omits fields with defaults in transformers
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
PHI3_128K = {
    **CONFIG,
    "model_type": "phi3",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 512,
    "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "sliding_window": 1000,
}


def test_fields_that_hub_configurations_omit_have_defaults() -> None:
    gemma = spec_from_config(GEMMA3_4B)
    assert (gemma.vocab_size, gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (262208, 8, 4, 256)
    assert gemma.windows[:7] == (1024,) * 5 + (None, 1024) and gemma.is_tied
    assert gemma.local_rope is not None
    assert (gemma.rope.theta, gemma.rope.kind) == (1e6, "linear")
    assert (gemma.local_rope.theta, gemma.local_rope.kind) == (1e4, "default")
    gemma2 = spec_from_config({**CONFIG, "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh"})
    assert gemma2.windows == (4096, None, 4096, None) and gemma2.is_tied and gemma2.local_rope is None
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)


def test_both_layouts_of_gemma3_rope_settings_are_equivalent() -> None:
    base = {**CONFIG, "model_type": "gemma3_text", "head_dim": 8, "num_key_value_heads": 2}
    old = spec_from_config({**base, "rope_theta": 5e5, "rope_local_base_freq": 2e4})
    per_type = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    new = spec_from_config({**base, "rope_parameters": per_type})
    assert old.local_rope is not None and new.local_rope is not None
    assert (old.rope.theta, old.local_rope.theta) == (new.rope.theta, new.local_rope.theta) == (5e5, 2e4)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1 + i / 10 for i in range(32)], "long_factor": [4.0] * 32}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 100}},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 100}, "original_max_position_embeddings": 64},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN, "original_max_position_embeddings": 64},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 100}, "original_max_position_embeddings": 64},
        {"rope_scaling": {**YARN, "factor": None, "original_max_position_embeddings": 100}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "original_max_position_embeddings": 64},
        {"rope_scaling": {**LONG, "original_max_position_embeddings": 100}},
        {"rope_scaling": LONG},
        {"model_type": "phi3", "rope_scaling": LONG},
        {"model_type": "phi3", "rope_scaling": {**LONG, "original_max_position_embeddings": 100}},
    ],
)
def test_rope_parameters_have_the_precedence_of_transformers(config: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = {**CONFIG, "hidden_size": 384, "max_position_embeddings": 512, **config}
    theirs = AutoConfig.for_model(**deepcopy(config))
    expected, expected_factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu", seq_len=1)
    inv_freq, factor = inverse_frequencies(spec_from_config(config).rope)
    torch.testing.assert_close(inv_freq, expected)
    assert factor == pytest.approx(expected_factor)


def test_longrope_runs_at_its_original_length_unless_max_model_len_is_longer() -> None:
    assert spec_from_config(PHI3_128K).max_positions == 512
    assert spec_from_config(PHI3_128K, max_model_len=2000).max_positions == 2000
    assert spec_from_config(PHI3_128K, max_model_len=9999).max_positions == 4096
    assert spec_from_config(PHI3_128K).rope.kind == "longrope"
    inside = {**PHI3_128K["rope_scaling"], "original_max_position_embeddings": 4096}
    assert spec_from_config({**PHI3_128K, "rope_scaling": inside}).max_positions == 512, "transformers' precedence"
    assert spec_from_config(CONFIG, max_model_len=100).max_positions == 100
    assert spec_from_config(CONFIG).max_positions == 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; Stillroom runs gemma2, .*, qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic"}}, "RoPE scaling 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "lacks 'high_freq_factor'"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "layers of type chunked_attention"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "encoder"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "lacks 'short_factor'"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "lacks 'num_experts_per_tok'"),
        ({"model_type": "gemma3", "text_config": {}}, "lacks 'hidden_size'"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec_from_config({**CONFIG, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"max_position_embeddings": 512.5}, "max_position_embeddings = 512.5"),
        ({"num_attention_heads": 5}, "hidden_size = 48 must be a multiple of num_attention_heads = 5"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 6, and that of num_key_value_heads = 4"),
        ({"rms_norm_eps": "small"}, "an invalid value .*small"),
        ({"rope_parameters": 3}, "an invalid value"),
    ],
)
def test_invalid_values_of_config_json_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{message}.*download the checkpoint again"):
        spec_from_config({**CONFIG, **changes})


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama", "hidden_size": "64"}'])
def test_error_names_config_json_and_not_the_tokenizer(folder: Path, content: str) -> None:
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load_model(str(folder), device="cpu")
    assert "the tokenizer" not in str(caught.value)


def test_dtype_auto_is_that_of_the_checkpoint(folder: Path) -> None:
    assert load_own_decoder(folder, device="cpu").dtype is torch.float32
    assert load_own_decoder(folder, device="cpu", dtype="bfloat16").dtype is torch.bfloat16
    edit(folder, dtype="bfloat16")
    assert load_own_decoder(folder, device="cpu").dtype is torch.bfloat16


def test_weights_that_contradict_the_configuration_are_refused(folder: Path) -> None:
    edit(folder, intermediate_size=100)
    with pytest.raises(ModelError, match=r"has shape .* config\.json implies"):
        load_own_decoder(folder, device="cpu")
    edit(folder, intermediate_size=96, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\."):
        load_own_decoder(folder, device="cpu")
    random_checkpoint(folder, "Llama", num_hidden_layers=2)
    edit(folder, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"more layers than config\.json says \(1\)"):
        load_own_decoder(folder, device="cpu")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 64), "damaged"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-50]),
            "damaged",
        ),
        (lambda f: (f / "model.safetensors").unlink(), r"no model\.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "convert the checkpoint"),
    ],
)
def test_damaged_checkpoints_raise_errors_that_say_what_to_do(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_own_decoder(folder, device="cpu")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
@pytest.mark.parametrize("kind", ["Llama", pytest.param("Qwen3Moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "load",
    [{}, {"weights": "int8"}, {"weights": "int4"}, {"dtype": "bfloat16"}],
    ids=["as-is", "int8", "int4", "narrowed"],
)
def test_copied_tensors_are_unmapped_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, load: dict[str, Any]
) -> None:
    """The file is mapped once for tensors that are used in place, and once for the layer that is being copied."""
    random_checkpoint(tmp_path, kind, num_hidden_layers=3, attention_bias=True, head_dim=16)
    found: list[tuple[int, int]] = []

    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path / "model.safetensors"))

    def watched(files: WeightFiles) -> None:
        before = num_mapped()
        unmap(files)
        found.append((before, num_mapped()))

    unmap = WeightFiles.unmap
    monkeypatch.setattr(WeightFiles, "unmap", watched)
    decoder = load_own_decoder(tmp_path, device="cpu", **load)
    assert len(found) == len(decoder.weights.layers) + 1
    assert all(before <= 2 and after == 1 for before, after in found)
    assert found[-1] == (2, 1), "nothing was copied"


def test_missing_shard_is_named(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "Llama", shards=True)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(ModelNotFoundError, match=shard.name):
        load_own_decoder(tmp_path, device="cpu")


def test_unknown_model_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is not a folder"):
        resolve(str(tmp_path / "absent"))
    with pytest.raises(ModelNotFoundError, match="the model hub did not deliver it"):
        resolve("someone/no-such-model")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match=f"is a file; name its folder, {tmp_path}"):
        resolve(str(tmp_path / "model.safetensors"))


def test_variable_that_forbids_the_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE=1 forbids the network: unset it, or give the folder"):
        resolve("someone/no-such-model")
    monkeypatch.delenv("HF_HUB_OFFLINE")  # the hub's client has read it already
    with pytest.raises(ModelNotFoundError, match="check the name and the network"):
        resolve("someone/no-such-model")


@pytest.mark.parametrize("device", ["abacus", "meta"])
def test_unusable_device_is_refused(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}'"):
        load_own_decoder(folder, device=device)
    assert issubclass(ConfigError, StillroomError)


def test_bundled_model_loads_with_its_end_token() -> None:
    model = load_model("bundled:microworld", device="cpu")
    assert model.name == "bundled:microworld"
    assert model.stop_token_ids == {3}
    assert model.decoder.spec.max_positions == 2048


def test_fingerprint_ignores_max_model_len_and_depends_on_activations(folder: Path) -> None:
    short, long = (load_own_decoder(folder, device="cpu", max_model_len=length) for length in (32, 64))
    assert short.spec.max_positions != long.spec.max_positions
    assert fingerprint_of(folder, short) == fingerprint_of(folder, long)
    for decoder in (short, long):
        decoder.spec = replace(decoder.spec, rope=replace(decoder.spec.rope, kind="longrope"))
    assert fingerprint_of(folder, short) != fingerprint_of(folder, long), "longrope's rotations depend on it"
    other = load_own_decoder(folder, device="cpu")
    names = {fingerprint_of(folder, other)}
    other.activation_dtype = torch.bfloat16  # as on a device other than a CPU
    assert fingerprint_of(folder, other) not in names


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "an encoder reads text"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, "an encoder reads text"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "cross attention"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification does not generate"),
    ],
)
def test_models_that_do_not_generate_are_refused_before_weights_are_read(
    folder: Path, config: dict[str, Any], reason: str
) -> None:
    edit(folder, **config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        load_model(str(folder), device="cpu")
    assert "give --model (runtime.model) a model that generates" in str(raised.value)
