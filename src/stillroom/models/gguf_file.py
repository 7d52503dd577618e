"""Converts a GGUF file to a checkpoint's folder, once.

transformers reads the file and widens its weights; the folder that is written has safetensors, tokenizer and chat
template, so that everything else works as with any checkpoint. Needs the extra `gguf`.
"""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from stillroom.config.places import cache_root
from stillroom.errors import ConfigError, ModelError, UnsupportedModelError
from stillroom.models.transformers_output import without_output

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
_VERSION = 1
"""Of the conversion; a folder of another version is not used."""
_DTYPES = {"F32": "float32", "F16": "float16"}
"""Dtype of the folder by the most frequent type of the file's matrices; bfloat16 for all others."""
_FACTORS = "rope_freqs.weight"
"""What a file's frequencies are divided by: Llama 3's RoPE scaling, which the file does not name otherwise."""


def converted(file: Path, *, needs_weights: bool = True) -> Path:
    """Return the folder of the checkpoint that was made of a GGUF file, under the cache folder; makes it if need be.

    Without weights it has config.json and the tokenizer only, unless there is a folder with weights already.

    A changed file is converted again. Of two processes, one converts and the other waits. What a killed process left
    is removed by the next one that converts the same file.

    Raises:
        UnsupportedModelError: transformers cannot read files of this architecture.
        ModelError: the file is damaged, or there is no room for the folder.
        ConfigError: the extra `gguf` is not installed.
    """
    folder = cache_root() / "gguf" / f"{file.stem}-{_digest(file)}-{_VERSION}"
    write = _write
    if not needs_weights and not folder.exists():
        folder, write = folder.with_name(f"{folder.name}-tokenizer"), _write_texts
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".lock-{folder.name}")):
            if not folder.exists():
                if needs_weights:
                    logger.warning("converting %s, once; this takes about as long as reading its weights twice", file)
                _convert(file, folder, write)
    except OSError as error:
        raise ModelError(
            f"{file} could not be converted to a checkpoint under {folder.parent}: {error}. It needs room for weights "
            "of 2 bytes each; XDG_CACHE_HOME names another cache folder"
        ) from error
    return folder


def _convert(file: Path, folder: Path, write: Callable[[Path, Path], None]) -> None:
    new = folder.with_name(f".new-{folder.name}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        write(file, new)
        for path in new.iterdir():
            with path.open("rb") as content:
                os.fsync(content.fileno())  # a power failure leaves no folder with empty files
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _digest(file: Path) -> str:
    hasher = xxhash.xxh3_64()
    try:
        with file.open("rb") as content:
            if content.read(4) != b"GGUF":
                raise ModelError(f"{file} is not a GGUF file; download it again")
            content.seek(0)
            while part := content.read(2**22):
                hasher.update(part)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    return hasher.hexdigest()


def _write(file: Path, folder: Path) -> None:
    """Write the folder; config.json comes last."""
    import torch
    from safetensors.torch import save_file

    reader = _reader(file)
    tensors = {one.name: one for one in reader.tensors}
    _refuse_other_rope(file, reader)
    fields = _tokenizer_fields(reader)
    types = Counter(one.tensor_type.name for one in reader.tensors if len(one.shape) > 1)
    name = _DTYPES.get(types.most_common(1)[0][0], "bfloat16") if types else "float32"
    num_bytes = os.stat(file).st_size if name != "bfloat16" else 2 * sum(int(one.n_elements) for one in reader.tensors)
    if shutil.disk_usage(folder).free < num_bytes:
        free = shutil.disk_usage(folder).free
        raise OSError(f"{num_bytes / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")
    model = _model(file, getattr(torch, name))
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights = {key: value for key, value in weights.items() if not key.endswith("lm_head.weight")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _write_tokenizer(file, folder, fields)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = getattr(torch, name)
    if _FACTORS in tensors:
        config.rope_parameters = _scaled(config, [float(value) for value in tensors[_FACTORS].data])
    _save_config(config, fields, folder)


def _write_texts(file: Path, folder: Path) -> None:
    """Write the folder without weights; config.json comes last."""
    fields = _tokenizer_fields(_reader(file))
    _write_tokenizer(file, folder, fields)
    from transformers import AutoConfig

    try:
        with without_output():
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # of many classes
        raise UnsupportedModelError(f"the settings in {file} cannot be read: {error}") from error
    _save_config(config, fields, folder)


def _save_config(config: Any, fields: dict[str, Any], folder: Path) -> None:
    for key in ("eos_token_id", "bos_token_id"):
        setattr(config, key, fields.get(f"tokenizer.ggml.{key}", getattr(config, key, None)))
    config.save_pretrained(folder)


def _reader(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError("GGUF files need the extra: pip install 'stillroom[gguf]'") from None
    try:
        return GGUFReader(file)
    except Exception as error:  # the library passes on what its parsing raises
        raise ModelError(f"{file} is damaged or incomplete; download it again") from error


def _refuse_other_rope(file: Path, reader: Any) -> None:
    """Raise UnsupportedModelError for a scaling of RoPE that transformers leaves out when it reads the file."""
    kinds = {field.contents() for name, field in reader.fields.items() if name.endswith(".rope.scaling.type")}
    found = sorted(kinds - {"none"}) or [one.name for one in reader.tensors if one.name.startswith("rope_factors")]
    if found:
        raise UnsupportedModelError(
            f"{file} scales RoPE by {found[0]!r}, which is not read; take the original checkpoint"
        )


def _tokenizer_fields(reader: Any) -> dict[str, Any]:
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.") and not name.endswith((".merges", ".scores"))
    }


def _model(file: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM, __version__

    try:
        with without_output():
            model, report = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except ImportError:
        raise ConfigError("GGUF files need the extra: pip install 'stillroom[gguf]'") from None
    except Exception as error:  # of many classes, by transformers and its reader
        if "accelerate is required" in str(error):
            raise ConfigError("GGUF files need the extra: pip install 'stillroom[gguf]'") from None
        raise UnsupportedModelError(
            f"transformers {__version__} cannot read {file}: {str(error).splitlines()[0]}; take the original checkpoint"
        ) from error
    if report["missing_keys"]:
        raise ModelError(f"{file} lacks weights, such as {sorted(report['missing_keys'])[0]}; download it again")
    return model


def _write_tokenizer(file: Path, folder: Path, fields: dict[str, Any]) -> None:
    """Write the tokenizer, with the file's special tokens and chat template."""
    from gguf import TokenType
    from transformers import AutoTokenizer

    try:
        with without_output():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # of many classes
        raise UnsupportedModelError(f"the tokenizer in {file} cannot be read: {error}") from error
    tokens, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", [])
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens({"additional_special_tokens": control}, replace_extra_special_tokens=False)
    for name in ("bos", "eos", "unknown", "padding"):
        place = fields.get(f"tokenizer.ggml.{name}_token_id")
        if place is not None:
            attribute = {"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")
            setattr(tokenizer, attribute, tokens[place])
    tokenizer.chat_template = fields.get("tokenizer.chat_template") or tokenizer.chat_template
    tokenizer.save_pretrained(folder)


def _scaled(config: Any, factors: list[float]) -> dict[str, Any]:
    """Return RoPE parameters whose frequencies are divided by these factors, without a factor on cosine and sine."""
    return {
        "rope_type": "longrope",
        "rope_theta": config.rope_parameters["rope_theta"],
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }
