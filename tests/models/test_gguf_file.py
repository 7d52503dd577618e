"""A model from a GGUF file is the model that the file was made of: logits, tokens, special tokens, chat template."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from stillroom.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from stillroom.models import gguf_file
from stillroom.models.checkpoint import resolve
from stillroom.models.loader import LoadedModel, load_model
from stillroom.models.vocabulary import load_vocabulary
from tests.fakes import byte_tokenizer, random_checkpoint
from tests.models.test_oracle import LLAMA3, all_logits

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
PROMPT = np.random.default_rng(0).integers(3, 301, size=60).tolist()
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "eos_token_id": 1, "bos_token_id": 0}
ARCHITECTURES = {"Llama": gguf.MODEL_ARCH.LLAMA, "Qwen2": gguf.MODEL_ARCH.QWEN2, "Qwen3": gguf.MODEL_ARCH.QWEN3}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_gguf(
    folder: Path, kind: str, type_name: str = "F32", *, scaling: str = "", **settings: Any
) -> tuple[Path, Any]:
    """Write a random checkpoint with a tokenizer, and a GGUF file of it, as llama.cpp's converter does."""
    oracle = random_checkpoint(folder, kind, **{**SIZES, **settings})
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    file = folder / f"{kind}-{type_name}.gguf"
    arch = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _add_config(writer, oracle.config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(arch, oracle.config.num_hidden_layers)
    for name, tensor in oracle.state_dict().items():
        if name == "lm_head.weight" and oracle.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if kind == "Llama":
            values = _paired(name, values, oracle.config)
        found = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if values.ndim == 1 or type_name == "F32":
            writer.add_tensor(found, values.astype(np.float32))
        else:
            quantised = gguf.GGMLQuantizationType[type_name]
            writer.add_tensor(found, gguf.quantize(values, quantised), raw_dtype=quantised)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    if "rope_parameters" in settings:
        plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16) * (10000.0 / 500000.0) ** (torch.arange(0, 16, 2) / 16)
        scaled = oracle.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, oracle


def test_vocabulary_is_read_without_weights(tmp_path: Path) -> None:
    file, _ = write_gguf(tmp_path, "Llama")
    found = load_vocabulary(str(file))
    folder = resolve(str(file), needs_weights=False)
    assert not list(folder.glob("*.safetensors"))
    loaded = load_model(str(file))
    assert (found.stop_token_ids, found.size) == (loaded.stop_token_ids, loaded.decoder.spec.vocab_size)
    assert found.name == loaded.name
    text = "<s>Stra\N{LATIN SMALL LETTER SHARP S}e"
    assert found.tokenizer.encode_template(text) == loaded.tokenizer.encode_template(text)
    assert found.tokenizer.special_tokens == loaded.tokenizer.special_tokens
    message = [{"role": "user", "content": "Hello"}]
    assert found.tokenizer.render_chat(message) == loaded.tokenizer.render_chat(message)
    assert resolve(str(file), needs_weights=False) != folder, "a converted checkpoint is used"


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, content: dict[str, Any]) -> None:
    by_id = {place: token for token, place in content["model"]["vocab"].items()}
    special = {one["id"]: one["content"] for one in content["added_tokens"]}
    by_id |= special
    kinds = [
        gguf.TokenType.CONTROL
        if place in special
        else gguf.TokenType.NORMAL
        if place in by_id
        else gguf.TokenType.UNUSED
        for place in range(301)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(place, f"[PAD{place}]") for place in range(301)])
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def _paired(name: str, values: Any, config: Any) -> Any:
    """Permute Q and K to GGUF's layout of Llama, in which the two halves of a rotated pair are adjacent."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    return np.ascontiguousarray(values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2)).reshape(values.shape)


def expected_logits(oracle: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("Llama", {}, id="llama"),
        pytest.param("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, id="llama3-rope-tied"),
        pytest.param("Qwen2", {}, id="qwen2", marks=pytest.mark.slow),
        pytest.param("Qwen3", {"head_dim": 128}, id="qwen3", marks=pytest.mark.slow),
    ],
)
def test_the_model_of_a_file_is_the_one_it_was_made_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, settings: dict[str, Any]
) -> None:
    file, oracle = write_gguf(tmp_path, kind, **settings)
    capfd.readouterr()
    folder = gguf_file.converted(file)
    assert "%" not in capfd.readouterr().err, "a progress bar of a library"
    ours = all_logits(folder, PROMPT, [41, 19], dtype="float32")
    torch.testing.assert_close(ours, expected_logits(oracle), atol=1e-4, rtol=1e-4)
    from_file, from_folder = (load_model(str(place), device="cpu") for place in (file, tmp_path))
    assert_same_text(from_file, from_folder)
    assert from_file.name == file.name


def assert_same_text(found: LoadedModel, wanted: LoadedModel) -> None:
    for text in ('{"name": "the lazy dog"}', "<s>ünï <e> fox", "a\n\n b"):
        assert found.tokenizer.encode_text(text) == wanted.tokenizer.encode_text(text)
        assert found.tokenizer.encode_template(text) == wanted.tokenizer.encode_template(text)
    messages = [{"role": "user", "content": "hello"}]
    assert found.tokenizer.render_chat(messages) == wanted.tokenizer.render_chat(messages) == "<s>user: hello<s>"
    assert found.stop_token_ids == wanted.stop_token_ids == {1}
    assert {0, 1} <= found.tokenizer.special_ids


@pytest.mark.parametrize(("type_name", "share"), [("F16", 0.002), ("Q8_0", 0.05), ("Q4_0", 0.9)])
def test_rounded_weights_are_those_of_the_file(tmp_path: Path, type_name: str, share: float) -> None:
    file, oracle = write_gguf(tmp_path, "Llama", type_name)
    expected = expected_logits(oracle)
    ours = all_logits(gguf_file.converted(file), PROMPT, [60], dtype="float32")
    error = (ours - expected).norm() / expected.norm()
    assert 0 < error < share


def test_a_file_is_converted_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = write_gguf(tmp_path, "Llama")
    folder = gguf_file.converted(file)
    monkeypatch.setattr(gguf_file, "_write", None)  # would fail if it were called
    assert gguf_file.converted(file) == folder
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert gguf_file.converted(file) != folder


def test_an_interrupted_conversion_leaves_nothing_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write_gguf(tmp_path, "Llama")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "_write_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gguf_file.converted(file)
    cache = tmp_path / "cache" / "stillroom" / "gguf"
    assert [one for one in cache.iterdir() if one.is_dir()] == []
    left = cache / f".new-{next(cache.iterdir()).name.removeprefix('.lock-')}"  # as if the process had been killed
    left.mkdir()
    (left / "config.json").write_text("{}")
    assert (gguf_file.converted(file) / "model.safetensors").is_file() and not left.exists()


def test_a_full_disk_and_damaged_files_are_clear_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = write_gguf(tmp_path, "Llama")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
        with pytest.raises(ModelError, match="are free. It needs room"):
            gguf_file.converted(file)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 3])
    with pytest.raises(ModelError, match="is damaged or incomplete"):
        load_model(str(file), device="cpu")
    file.write_bytes(b"not a model")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load_model(str(file), device="cpu")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "no-such-architecture")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="take the original checkpoint"):
        load_model(str(tmp_path / "x.gguf"), device="cpu")


def test_missing_files_and_their_folder_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        load_model(str(tmp_path / "x.gguf"), device="cpu")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"give the file: --model .*x\.gguf"):
        load_model(str(tmp_path), device="cpu")


def test_rope_scaling_that_is_not_read_is_refused(tmp_path: Path) -> None:
    file, _ = write_gguf(tmp_path, "Llama", scaling="yarn")
    with pytest.raises(UnsupportedModelError, match="scales RoPE by 'yarn'"):
        load_model(str(file), device="cpu")
