"""A manual clock, a small tokenizer and random checkpoints."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from stillroom.core.clock import VirtualClock

ManualClock = VirtualClock
"""Time that moves by `advance` only."""

BASE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,  # large enough that greedy choices are not near ties
}


def byte_tokenizer(vocab_size: int = 301) -> Any:
    """Return a transformers tokenizer for any text: GPT-2's bytes, merges of some JSON, and `<e>` (1), the end
    token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<s>", "<e>"], initial_alphabet=alphabet)
    raw.train_from_iterator(['{"name": "the lazy dog", "year": 1971, "ok": true, "tags": ["a", "b"]}'] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<e>")


def random_checkpoint(folder: Path, kind: str, *, seed: int = 0, shards: bool = False, **settings: Any) -> Any:
    """Save a random checkpoint of a transformers architecture (`Llama`, `Qwen3`, ...); return the oracle model."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**deepcopy({**BASE, **settings}))  # the class changes its arguments
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms start as zeros and ones, which would hide errors
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "1GB")
    return model


def random_cross_encoder(folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Save a small cross-encoder with random weights and the packaged embedder's vocabulary. Returns the folder."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from stillroom.retrieval.model_files import PACKAGED_MODEL, locate_model

    config = BertConfig(
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        | {"num_labels": 1, "initializer_range": 0.3, **settings}
    )
    torch.manual_seed(seed)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(locate_model(PACKAGED_MODEL))).save_pretrained(folder)
    return folder
