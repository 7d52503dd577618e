"""A llama's weights and pieces as a GGUF file, for llama.cpp. Run by the Python that has `gguf`, as a program.

python llama_gguf.py WEIGHTS.npz CONFIG_AND_PIECES.json OUT.gguf
"""

import json
import sys
from typing import Any

import gguf
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main(weights_path: str, about_path: str, out_path: str) -> None:
    with open(about_path, encoding="utf-8") as file:
        about = json.load(file)
    config, pieces = about["config"], about["pieces"]
    writer = gguf.GGUFWriter(out_path, "llama")
    add_config(writer, config)
    add_tokenizer(writer, pieces)
    weights = np.load(weights_path)
    for name in weights.files:
        writer.add_tensor(*converted(name, weights[name], config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def add_tokenizer(writer: Any, pieces: list[str]) -> None:
    """Three control tokens, 256 bytes, then pieces in the order in which they were merged."""
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


def converted(name: str, weight: Any, config: dict[str, Any]) -> tuple[str, Any]:
    """Name and layout of GGUF: Q and K have the two halves of a rotated pair side by side."""
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    whole["lm_head.weight"] = "output.weight"
    if name in whole:
        return whole[name], weight
    _, _, layer, rest = name.split(".", 3)
    rest = rest.removesuffix(".weight")
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    if rest in heads:
        height, width = weight.shape
        halves = weight.reshape(config[heads[rest]], 2, -1, width)
        weight = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(height, width)
    return f"blk.{layer}.{NAMES[rest]}.weight", weight


if __name__ == "__main__":
    main(*sys.argv[1:])
