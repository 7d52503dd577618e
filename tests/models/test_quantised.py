"""A quantised checkpoint is the model that its layout says: logits within 1e-4 and 32 identical greedy tokens of
transformers' model with the widened weights, in float32 on the CPU. What is not read is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stillroom.errors import ModelError, UnsupportedModelError
from stillroom.models.decoder import Decoder
from stillroom.models.loader import fingerprint_of, load_decoder, load_model
from stillroom.models.quantised_files import WidenedFiles, open_weights, quantisation_of
from stillroom.models.transformers_decoder import TransformersDecoder
from tests.engine.harness import Run, engine_on, request
from tests.fakes import byte_tokenizer, random_checkpoint
from tests.models import quantised_checkpoints as written
from tests.models.test_oracle import all_logits, greedy

PROMPT = np.random.default_rng(0).integers(3, 301, size=60).tolist()


def said(method: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **settings}}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return said(
        "compressed-tensors", format=form, config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}
    )


def modelopt(algorithm: str) -> dict[str, Any]:
    return said("modelopt", quant_algo=algorithm)


NV = (".weight_packed", ".weight_scale", ".weight_global_scale")
NV_MODELOPT = (".weight", ".weight_scale", ".weight_scale_2")
MLX = {"quantization": {"group_size": written.GROUP, "bits": 4}}
EMBEDDINGS = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
GPT_OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
WHOLE = (1 << 20, 1 << 20)
TABLES = np.linspace(-1, 0.8, 16).astype(np.float32), np.linspace(-1, 1, 256).astype(np.float32)

CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "gptq": ("Llama", written.gptq(), said("gptq", bits=4, checkpoint_format="gptq"), {}),
    "gptq-v2-order": (
        "Qwen3",
        written.gptq(version=2, has_order=True, is_symmetric=False),
        said("gptq", bits=4, checkpoint_format="gptq_v2", desc_act=True),
        {"head_dim": 16},
    ),
    "gptq-asymmetric": ("Qwen2", written.gptq(is_symmetric=False), said("gptq", bits=4), {}),
    "gptq-8": ("Llama", written.gptq(bits=8), said("gptq", bits=8), {}),
    "gptq-by-transformers": ("Olmo2", written.gptq(), said("gptq", bits=4), {"pad_token_id": 0}),
    "awq": ("Qwen2", written.awq, said("awq", bits=4, version="gemm"), {}),
    "awq-fused": ("Phi3", written.awq, said("awq", bits=4, version="gemm"), {"pad_token_id": 0}),
    "awq-experts": ("Qwen3Moe", written.awq, said("awq", bits=4), EXPERTS),
    "awq-experts-by-transformers": ("Olmoe", written.awq, said("awq", bits=4), {**EXPERTS, "pad_token_id": 0}),
    "compressed-int4": ("Llama", written.compressed_packed(), compressed("pack-quantized", num_bits=4), {}),
    "compressed-int4-asymmetric": (
        "Llama",
        written.compressed_packed(is_symmetric=False),
        compressed("pack-quantized", num_bits=4),
        {},
    ),
    "compressed-int8-packed": (
        "Llama",
        written.compressed_packed(bits=8),
        compressed("pack-quantized", num_bits=8),
        {},
    ),
    "compressed-int8": ("Llama", written.compressed_int8, compressed("int-quantized", num_bits=8), {}),
    "compressed-fp8-rows": ("Llama", written.fp8(".weight_scale", (1, 1 << 20)), compressed("float-quantized"), {}),
    "compressed-fp8-blocks": (
        "Llama",
        written.fp8(".weight_scale", (40, 40)),
        compressed("float-quantized", block_structure=[40, 40]),
        {},
    ),
    "compressed-nvfp4": (
        "Llama",
        written.nvfp4(NV, is_divided=True),
        compressed("nvfp4-pack-quantized", num_bits=4),
        {},
    ),
    "fp8": ("Qwen3", written.fp8(".weight_scale_inv", (40, 40)), said("fp8", weight_block_size=[40, 40]), {}),
    "fp8-whole": ("Llama", written.fp8(".weight_scale_inv", WHOLE), said("fp8", weight_block_size=None), {}),
    "modelopt-fp8": ("Llama", written.fp8(".weight_scale", WHOLE), modelopt("FP8"), {}),
    "modelopt-nvfp4": ("Llama", written.nvfp4(NV_MODELOPT, is_divided=False), modelopt("NVFP4"), {}),
    "bitsandbytes-4": ("Llama", written.bitsandbytes_4bit(*TABLES), said("bitsandbytes", load_in_4bit=True), {}),
    "bitsandbytes-8": ("Llama", written.bitsandbytes_8bit, said("bitsandbytes", load_in_8bit=True), {}),
    "mlx-4": ("Llama", written.mlx(4), MLX, {"ends": EMBEDDINGS}),
    "mlx-6-tied": ("Qwen3", written.mlx(6), MLX, {"ends": EMBEDDINGS, "tie_word_embeddings": True}),
    "mlx-3": ("Llama", written.mlx(3), MLX, {}),
    "mxfp4": (
        "GptOss",
        written.mxfp4,
        said("mxfp4"),
        {"ends": ("experts.gate_up_proj", "experts.down_proj"), **GPT_OSS},
    ),
}
SLOW = (
    "gptq-asymmetric",
    "gptq-8",
    "awq-fused",
    "awq-experts",
    "awq-experts-by-transformers",
    "compressed-int4-asymmetric",
    "compressed-int8-packed",
    "compressed-fp8-rows",
    "compressed-fp8-blocks",
    "fp8-whole",
    "modelopt-fp8",
    "modelopt-nvfp4",
    "bitsandbytes-8",
    "mlx-4",
    "mlx-3",
)
BY_TRANSFORMERS = ("Olmo2", "Olmoe", "GptOss")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    kind, pack, config, settings = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return folder, written.quantised_checkpoint(folder, kind, pack, config, **settings)


def expected_logits(oracle: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([PROMPT])).logits[0]
    return logits


def test_logits_and_greedy_tokens_equal_those_of_the_widened_weights(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    torch.testing.assert_close(all_logits(folder, PROMPT, [41, 19]), expected_logits(oracle), atol=1e-4, rtol=1e-4)
    is_own = not type(oracle).__name__.startswith(BY_TRANSFORMERS)
    assert isinstance(load_decoder(folder, device="cpu"), Decoder if is_own else TransformersDecoder)
    run = Run(engine_on(folder))
    run.submit(request("alone", [PROMPT], max_tokens=32))
    run.finish()
    assert run.tokens["alone"] == greedy(oracle, [PROMPT], 32)[0]


EVEN: Any = ("Llama", written.fp8(".weight_scale_inv", (32, 32)), said("fp8", weight_block_size=[32, 32]), {})
"""Blocks that fill the weights, as transformers needs them."""


@pytest.mark.parametrize(
    "case",
    [EVEN, pytest.param(CASES["fp8-whole"], marks=pytest.mark.slow), CASES["mxfp4"]],
    ids=["fp8", "fp8-whole", "mxfp4"],
)
def test_transformers_reads_the_same_weights(tmp_path: Path, case: Any) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate")
    kind, pack, config, settings = case
    written.quantised_checkpoint(tmp_path, kind, pack, config, **settings)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ours = all_logits(tmp_path, PROMPT, [60])
    torch.testing.assert_close(ours, expected_logits(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("compressed")])
def test_the_library_compressed_tensors_reads_the_same_weights(tmp_path: Path, name: str) -> None:
    base = pytest.importorskip("compressed_tensors.compressors.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    kind, pack, config, settings = CASES[name]
    written.quantised_checkpoint(tmp_path, kind, pack, config, **settings)
    form = config["quantization_config"]["format"]
    is_float = "fp" in form or "float" in form
    stem = "model.layers.0.mlp.down_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {key.removeprefix(stem + "."): value for key, value in tensors.items() if key.startswith(stem + ".")}
    parts["weight_scale"] = parts["weight_scale"].float() if "nvfp4" not in form else parts["weight_scale"]
    strategy = {"pack-quantized": "group", "int-quantized": "channel", "nvfp4-pack-quantized": "tensor_group"}.get(form)
    arguments = {
        "num_bits": config["quantization_config"]["config_groups"]["group_0"]["weights"].get("num_bits", 8),
        "type": "float" if is_float else "int",
        "symmetric": "asymmetric" not in name,
        "strategy": strategy or ("block" if "blocks" in name else "channel"),
        "group_size": {"group": written.GROUP, "tensor_group": 16}.get(strategy or ""),
        "block_structure": [40, 40] if "blocks" in name else None,
    }
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))
    theirs = base.BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"]
    ours = open_weights(tmp_path).get(stem + ".weight").to(theirs.dtype)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["bitsandbytes-4", "bitsandbytes-8"])
def test_the_library_bitsandbytes_reads_the_same_weights(tmp_path: Path, name: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    kind, pack, config, settings = CASES[name]
    if name.endswith("4"):
        tables = functional.get_4bit_type("nf4", device="cpu"), functional.create_dynamic_map()
        pack = written.bitsandbytes_4bit(*(table.numpy() for table in tables))
    written.quantised_checkpoint(tmp_path, kind, pack, config, **settings)
    weight = "model.layers.0.mlp.up_proj.weight"  # its rows are whole blocks, which bitsandbytes' CPU kernel needs
    tensors = load_file(tmp_path / "model.safetensors")
    if name.endswith("8"):
        theirs = functional.int8_vectorwise_dequant(tensors[weight], tensors[weight.removesuffix("weight") + "SCB"])
    else:
        state = {
            key.removeprefix(weight + "."): value for key, value in tensors.items() if key.startswith(weight + ".")
        }
        theirs = functional.dequantize_4bit(tensors[weight], functional.QuantState.from_dict(state, device="cpu"))
    torch.testing.assert_close(open_weights(tmp_path).get(weight), theirs.float(), atol=1e-6, rtol=1e-5)


def test_tokenizer_chat_template_and_stop_tokens_are_those_of_the_folder(tmp_path: Path) -> None:
    kind, pack, config, settings = CASES["gptq"]
    written.quantised_checkpoint(tmp_path, kind, pack, config, **settings)
    model = load_model(str(tmp_path), device="cpu")
    assert model.stop_token_ids == {1, 7}, "of generation_config.json"
    assert model.tokenizer.render_chat([{"role": "user", "content": "hello"}]) == "<s>user: hello<s>"
    assert model.tokenizer.encode_template("<s>a<e>")[::2] == [0, 1]
    assert 1 not in model.tokenizer.encode_text("<s>a<e>")


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_can_be_rounded_again(tmp_path: Path, weights: Any) -> None:
    kind, pack, config, settings = CASES["compressed-int4"]
    oracle = written.quantised_checkpoint(tmp_path, kind, pack, config, **{**settings, "intermediate_size": 128})
    expected = expected_logits(oracle)
    error = (all_logits(tmp_path, PROMPT, [60], weights=weights) - expected).norm() / expected.norm()
    assert 0 < error < (0.05 if weights == "int8" else 0.9)


def test_dtype_of_a_config_without_one_is_bfloat16(tmp_path: Path) -> None:
    kind, pack, config, settings = CASES["awq"]
    written.quantised_checkpoint(tmp_path, kind, pack, {**config, "dtype": None, "torch_dtype": None}, **settings)
    assert load_decoder(tmp_path, device="cpu").dtype is torch.bfloat16


def test_models_of_one_file_in_different_versions_of_a_layout_share_no_kv(tmp_path: Path) -> None:
    kind, pack, config, settings = CASES["gptq"]
    written.quantised_checkpoint(tmp_path, kind, pack, config, **settings)
    first = fingerprint_of(tmp_path, load_decoder(tmp_path, device="cpu"))
    edit(tmp_path, **said("gptq", bits=4, checkpoint_format="gptq_v2"))
    assert fingerprint_of(tmp_path, load_decoder(tmp_path, device="cpu")) != first


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (said("hqq"), "layout 'hqq'"),
        (said("quanto"), "layout 'quanto'"),
        (said("torchao"), "layout 'torchao'"),
        (said("auto-round"), "layout 'auto-round'"),
        ({"quantization_config": {"bits": 4}}, "layout 'none'"),
        (said("gptq", bits=3), "of 3 bits"),
        (said("gptq", bits=4, checkpoint_format="marlin"), "form 'marlin'"),
        (said("gptq", bits=4, is_marlin_format=True), "form 'marlin'"),
        (said("awq", bits=4, version="gemv"), "version 'gemv' and 4 bits"),
        (compressed("marlin-24"), "format 'marlin-24'"),
        (compressed("pack-quantized", num_bits=3), "of 3 bits"),
        (
            said("compressed-tensors", format="mixed-precision", config_groups={"a": {"format": None}}),
            "'mixed-precision'",
        ),
        (
            said("compressed-tensors", format="float-quantized", sparsity_config={"format": "sparse-24-bitmask"}),
            "sparse",
        ),
        (
            said("compressed-tensors", format="int-quantized", transform_config={"config_groups": {"R": 1}}),
            "transforms",
        ),
        (modelopt("W4A16_AWQ"), "ModelOpt weights of W4A16_AWQ"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "MLX weights of mode 'mxfp4'"),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name_before_weights_are_read(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    """The folder has no weights and no tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(UnsupportedModelError, match=rf"{message}.*unquantised checkpoint .*--base-url"):
        load_model(str(tmp_path), device="cpu")


def test_weights_of_a_hub_model_are_not_loaded_if_its_layout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **said("hqq")}))
    loaded = []

    def snapshot(name: str, *, allow_patterns: list[str]) -> str:
        loaded.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(UnsupportedModelError, match="layout 'hqq'"):
        load_model("someone/model", device="cpu")
    assert loaded == [["*.json"]]


@pytest.mark.parametrize("kind", ["Llama", "Olmo2"])
def test_narrow_weights_that_nothing_explains_are_refused(tmp_path: Path, kind: str) -> None:
    """Widened without their scales they would be another model."""
    random_checkpoint(tmp_path, kind, pad_token_id=0)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"{name} is quantised \(F8_E4M3\), and nothing in the folder"):
        load_decoder(tmp_path, device="cpu")


def test_layouts_that_a_file_beside_config_json_names_are_read(tmp_path: Path) -> None:
    for name, file, content in (
        ("modelopt-fp8", "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": written.GROUP, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": written.GROUP, "version": "GEMM"}),
    ):
        kind, pack, _, settings = CASES[name]
        oracle = written.quantised_checkpoint(tmp_path / name, kind, pack, {}, **settings)
        (tmp_path / name / file).write_text(json.dumps(content))
        expected = expected_logits(oracle)
        torch.testing.assert_close(all_logits(tmp_path / name, PROMPT, [60]), expected, atol=1e-4, rtol=1e-4)
    random_checkpoint(tmp_path / "plain", "Llama")
    (tmp_path / "plain" / "quantize_config.json").write_text('{"bits": 4}')
    assert not isinstance(open_weights(tmp_path / "plain"), WidenedFiles), "a file that was left there"


def test_tensors_that_the_layout_does_not_explain_are_refused(tmp_path: Path) -> None:
    kind, pack, config, settings = CASES["modelopt-fp8"]
    written.quantised_checkpoint(tmp_path, kind, pack, config, **settings)
    weights = load_file(tmp_path / "model.safetensors")
    stem = "model.layers.0.mlp.up_proj"
    save_file({**weights, stem + ".pre_quant_scale": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"with .*up_proj\.pre_quant_scale are not read"):
        load_decoder(tmp_path, device="cpu")
    save_file({**weights, "model.layers.0.mlp.act.weight_scale": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"mlp\.act\.weight_scale and without codes"):
        load_decoder(tmp_path, device="cpu")


def test_parts_that_do_not_fit_and_missing_quantisation_are_clear_errors(tmp_path: Path) -> None:
    kind, pack, config, settings = CASES["gptq"]
    written.quantised_checkpoint(tmp_path, kind, pack, config, **settings)
    weights = load_file(tmp_path / "model.safetensors")
    stem = "model.layers.0.mlp.up_proj"
    save_file({**weights, stem + ".scales": weights[stem + ".scales"][:, :5].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"parts of model.layers.0.mlp.up_proj.weight do not fit the layout GPTQ"):
        load_decoder(tmp_path, device="cpu")
    del weights[stem + ".qzeros"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"do not fit the layout GPTQ \(KeyError"):
        load_decoder(tmp_path, device="cpu")
    random_checkpoint(tmp_path / "plain", "Llama")
    edit(tmp_path / "plain", **config)
    with pytest.raises(ModelError, match="but none is"):
        load_decoder(tmp_path / "plain", device="cpu")


def test_settings_of_single_weights_are_used(tmp_path: Path) -> None:
    """MLX: the group size of one weight differs."""
    kind, pack, config, settings = CASES["mlx-4"]
    oracle = written.quantised_checkpoint(tmp_path, kind, pack, config, **settings)
    stem = "model.layers.0.mlp.up_proj"
    edit(tmp_path, quantization={**MLX["quantization"], stem: {"group_size": 16, "bits": 4}})
    weights = load_file(tmp_path / "model.safetensors")
    for end in (".scales", ".biases"):
        weights[stem + end] = weights[stem + end].repeat_interleave(2, 1)
    save_file(weights, tmp_path / "model.safetensors")
    torch.testing.assert_close(all_logits(tmp_path, PROMPT, [60]), expected_logits(oracle), atol=1e-4, rtol=1e-4)


def test_a_checkpoint_that_is_not_quantised_is_read_as_before(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "Llama")
    byte_tokenizer().save_pretrained(tmp_path)
    assert quantisation_of(tmp_path) is None
    edit(tmp_path, quantization_config=None)
    assert quantisation_of(tmp_path) is None
