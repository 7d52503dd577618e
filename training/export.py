"""Exports a run as a checkpoint in Hugging Face's layout: bfloat16 safetensors, config, tokenizer, chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from training.checkpoint import check_identity, identity_of, load_checkpoint
from training.data.tokens import END, PAD, STOP
from training.model import Llama
from training.recipe import Recipe, Shape

MAX_BYTES = 64 * 2**20
"""Maximum size of the weights in the package."""
MAX_ANSWER_TOKENS = 48


def export_run(run: Path, data: Path, out: Path, recipe: Recipe) -> Path:
    """Write the checkpoint folder without a model card, which needs an evaluation; returns the folder.

    Raises:
        FileNotFoundError: the run has no checkpoint, or there is no data.
        ValueError: the data are incomplete, or the weights are too large to ship.
        ResumeError: the run is of another recipe, or of other data.
    """
    state = load_checkpoint(run)
    if state is None:
        raise FileNotFoundError(f"{run} has no checkpoint; train first: python -m training train --out {run}")
    check_identity(run, state, identity_of(recipe, data))
    model = Llama(recipe.shape, recipe.seed)
    model.load_state_dict(state["model"])
    return export_model(model, data, out)


def export_model(model: Llama, data: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the checkpoint folder; raises ValueError if the weights are too large to ship."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": one.to(dtype).contiguous() for name, one in model.state_dict().items()}
    size = sum(one.numel() * one.element_size() for one in tensors.values())
    if size > MAX_BYTES:
        raise ValueError(
            f"the weights take {size / 2**20:.0f} MiB, more than {MAX_BYTES / 2**20:.0f}; choose a smaller shape"
        )
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the library makes it readable by the owner only
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(data / "tokenizer" / name, out / name)
    shutil.copy(data / "ATTRIBUTION.md", out / "ATTRIBUTION.md")
    ids = _ids(data / "tokenizer" / "tokenizer.json")
    _write(out / "config.json", _config(model.shape, str(dtype).removeprefix("torch."), ids))
    _write(out / "generation_config.json", {"do_sample": False, "max_new_tokens": MAX_ANSWER_TOKENS, **ids})
    return out


def _ids(path: Path) -> dict[str, int]:
    ids = {one["content"]: int(one["id"]) for one in json.loads(path.read_text(encoding="utf-8"))["added_tokens"]}
    return {"bos_token_id": ids[END], "eos_token_id": ids[STOP], "pad_token_id": ids[PAD]}


def _config(shape: Shape, dtype: str, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "dtype": dtype,
        **ids,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
