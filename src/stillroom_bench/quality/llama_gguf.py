"""Converts a Llama checkpoint to a GGUF file for llama.cpp.

Runs as a script under the Python that has `gguf`, so it imports nothing of Stillroom. PIECES.json is a list of the
vocabulary's pieces; without it, the file has no vocabulary and llama.cpp accepts token ids only.

    python llama_gguf.py MODEL_FOLDER OUT.gguf [PIECES.json]
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def main(folder: str, out: str, pieces: str | None = None) -> None:
    config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    writer = gguf.GGUFWriter(out, "llama")
    _add_config(writer, config)
    if pieces is None:
        writer.add_tokenizer_model("none")
    else:
        _add_tokenizer(writer, json.loads(Path(pieces).read_text("utf-8")))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, values in _tensors(Path(folder) / "model.safetensors"):
        _add_tensor(writer, names.get_name(name, try_suffixes=(".weight",)), _paired(name, values, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, pieces: list[str]) -> None:
    """Add the vocabulary: three control tokens, 256 bytes, then pieces in merge order."""
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (len(pieces) - 259)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(piece.replace(" ", "\u2581") for piece in pieces[3:])])
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces) - 259)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and values of each tensor of a safetensors file: float32, or the bits of bfloat16 as uint16."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            dtype = {"F32": np.float32, "BF16": np.uint16}[entry["dtype"]]
            yield name, np.frombuffer(content[start + first : start + last], dtype).reshape(entry["shape"])


def _paired(name: str, values: Any, config: dict[str, Any]) -> Any:
    """Permute Q and K to GGUF's layout, in which the two halves of a rotated pair are adjacent."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return values
    halves = values.reshape(config[heads], 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _add_tensor(writer: Any, name: str, values: Any) -> None:
    if values.dtype == np.float32:
        writer.add_tensor(name, values)
    elif values.ndim == 1:  # norms are float32
        writer.add_tensor(name, (values.astype(np.uint32) << 16).view(np.float32))
    else:
        writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    main(*sys.argv[1:])
