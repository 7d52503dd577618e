"""A checkpoint's vocabulary: tokenizer, stop tokens and number of tokens. Reads no weights.

A front loads nothing else of the model that its engines run.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stillroom.errors import ModelError
from stillroom.models.bundled_models import short_name
from stillroom.models.checkpoint import read_json, resolve
from stillroom.models.generating import check_generates
from stillroom.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model."""

    name: str
    """The model's name."""
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    size: int
    """The model has embeddings of the tokens 0 to `size` - 1."""

    @cached_property
    def knows_all_tokens(self) -> bool:
        """Whether the model has an embedding for every token of its tokenizer."""
        return bool(max(self.tokenizer.hf_tokenizer.get_vocab().values()) < self.size)


def load_vocabulary(model: str) -> Vocabulary:
    """Load the vocabulary of a checkpoint.

    Args:
        model: a bundled decoder, a folder, a GGUF file, or a hub name, of which no weights are loaded.

    Raises:
        ModelNotFoundError: the checkpoint or one of its files is missing.
        UnsupportedModelError: it is a reader, or it does not generate text.
        ModelError: its files are damaged.
    """
    folder = resolve(model, needs_weights=False)
    config = read_json(folder, "config.json")
    check_generates(config)
    tokenizer = Tokenizer.load(folder)
    return Vocabulary(short_name(model), tokenizer, stop_token_ids(folder, tokenizer), _size(folder, config))


def stop_token_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the stop tokens that generation_config.json, config.json and the tokenizer name."""
    ids: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder, name).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def _size(folder: Path, config: dict[str, Any]) -> int:
    text = config.get("text_config") or config
    size = text.get("vocab_size") if isinstance(text, dict) else None
    if size is None:  # a default of the architecture, which transformers knows
        from transformers import AutoConfig

        try:
            size = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size
        except Exception as error:  # of many classes
            raise ModelError(f"{folder / 'config.json'} does not say vocab_size ({error})") from None
    if type(size) is not int or size < 1:
        raise ModelError(f"{folder / 'config.json'}: vocab_size = {size!r}, but it must be a whole number above 0")
    return size
