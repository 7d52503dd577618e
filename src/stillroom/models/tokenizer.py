"""Converts text to tokens and back, so that text of documents and users never becomes a special token.

`encode_template` encodes text of the prompt format and parses special tokens; `encode_text` encodes all other text, in
which `<|im_end|>` is ten characters.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from stillroom.core.panics import panics_as_errors
from stillroom.errors import ModelError, ModelNotFoundError

_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a blank."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_UNFINISHED = 3
"""Most replacement characters of an unfinished character, which has at most four bytes."""
_NUM_KEPT = 12
"""Tokens that are kept of a window that exceeded `_MAX_WINDOW`."""
_MAX_WINDOW = 24
"""Longest window, in tokens; a usual one has a handful."""


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable bytes stand for themselves, the others follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A checkpoint's fast tokenizer. Thread-safe."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._lock = Lock()  # `encode_special_tokens` is a setting of the backend

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Load the tokenizer of a checkpoint's folder.

        Raises:
            ModelNotFoundError: the folder has no tokenizer.
            ModelError: its files are damaged.
        """
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ModelNotFoundError(f"{folder} has no tokenizer.json; Stillroom needs the checkpoint's tokenizer")
        from transformers import AutoTokenizer

        try:
            with panics_as_errors("the tokenizer"):
                return cls(AutoTokenizer.from_pretrained(folder, use_fast=True, local_files_only=True))
        except Exception as error:  # the library passes on its parsers' exceptions
            raise ModelError(
                f"the tokenizer in {folder} could not be loaded ({type(error).__name__}: {error}); download it again"
            ) from error

    @property
    def hf_tokenizer(self) -> Any:
        """The wrapped tokenizer, for libraries that read its vocabulary."""
        return self._hf

    @cached_property
    def vocabulary_digest(self) -> bytes:
        """SHA-256 of all tokens with their ids: equal for equal vocabularies, whatever their files look like."""
        tokens = sorted((token_id, token) for token, token_id in self._hf.get_vocab().items())
        return hashlib.sha256(json.dumps(tokens).encode()).digest()

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._hf.eos_token_id
        return token_id

    @property
    def bos_token(self) -> str:
        """Text of the begin token; empty if there is none."""
        return str(self._hf.bos_token or "")

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Texts of the tokens that `encode_template` parses and `encode_text` does not."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which have no text in an answer."""
        tokens = self._backend.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in tokens if token.special)

    @cached_property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def added_tokens_in(self, text: str) -> list[tuple[int, str]]:
        """Return the added tokens, special or not, that a template with this text has, in order, with their names."""
        known = {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}
        names = sorted(known, key=len, reverse=True)
        found = re.findall("|".join(map(re.escape, names)), text) if names else []
        return [(known[name], name) for name in found]

    def render_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Render messages with the checkpoint's chat template, up to the beginning of the assistant's turn.

        Args:
            tools: OpenAI's definitions of the tools that may be called, for templates that know tools.

        Raises:
            ModelError: the template refuses these messages.
        """
        # Qwen3's template reads `enable_thinking`: False makes the answer start at once.
        switches = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        given = {} if tools is None else {"tools": list(tools)}
        try:
            return str(self._hf.apply_chat_template(list(messages), **switches, **given))
        except Exception as error:  # a template may raise anything
            raise ModelError(f"the checkpoint's chat template failed: {error}") from error

    def encode_template(self, text: str) -> list[int]:
        """Encode text of the prompt format; special tokens are parsed, none is added."""
        return self._encode(text, is_template=True)

    def encode_text(self, text: str) -> list[int]:
        """Encode text of documents and users; special tokens are ordinary characters, none is added."""
        return self._encode(text, is_template=False)

    @panics_as_errors("the tokenizer")
    def _encode(self, text: str, is_template: bool) -> list[int]:
        with self._lock:
            self._backend.encode_special_tokens = not is_template
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    @panics_as_errors("the tokenizer")
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; its name if it is special."""
        with self._lock:
            text = self._backend.id_to_token(token_id)
        if text is None:  # a vocabulary may be padded to a round size
            return b""
        if token_id in self._added_ids:
            return str(text).encode()
        if self._is_byte_level and _BYTE_OF.keys() >= set(text):
            return bytes(_BYTE_OF[char] for char in text)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return str(text).replace(_BLANK, " ").encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether tokens are written in GPT-2's byte alphabet."""
        return self._backend.decoder is not None and b'"ByteLevel"' in self._backend.decoder.__getstate__()

    @panics_as_errors("the tokenizer")
    def decode(self, token_ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Return the text of tokens; `keeps_special`: with special tokens."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=not keeps_special))

    @panics_as_errors("the tokenizer")
    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it; empty for a number without a token."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]


class IncrementalDetokenizer:
    """Decodes tokens as they arrive into pieces of whole characters; the pieces together are the text of all tokens.

    A token's text depends on its neighbours (leading blanks, bytes of one character), so each piece is the difference
    of two decodings of a short window: [prefix, read) was returned already, [read, end) waits until it ends in whole
    characters. A window of bytes that never become a character is returned when it exceeds `_MAX_WINDOW`, except for an
    end in which a character may still begin.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        """
        Args:
            after: last tokens of the text before, which was returned already.
        """
        self._tokenizer = tokenizer
        self._ids = list(after)  # the window, which begins at `prefix`
        self._read = 0
        self._num_out = 0  # characters of the window's text that were returned
        self._begin_at(0)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; empty while a character is unfinished."""
        special_ids = self._tokenizer.special_ids
        self._ids.extend(token_id for token_id in token_ids if token_id not in special_ids)
        text = self._tokenizer.decode(self._ids)
        self._num_out = min(self._num_out, len(text))  # bytes that were returned one by one may have become characters
        piece = text[self._num_out :]
        if piece and not piece.endswith(_REPLACEMENT):
            self._begin_at(self._read)
            return piece
        return self._shorten_window(text) if len(self._ids) > _MAX_WINDOW else ""

    def flush(self) -> str:
        """Return the rest of the text, an unfinished character included."""
        piece = self._tokenizer.decode(self._ids)[self._num_out :]
        self._begin_at(self._read)
        return piece

    def _begin_at(self, start: int) -> None:
        """Begin a window at `start`, all of whose text was returned."""
        del self._ids[:start]
        self._read = len(self._ids)
        self._num_out = len(self._tokenizer.decode(self._ids))

    def _shorten_window(self, text: str) -> str:
        """Return the text that waits, except for an end that the next bytes may complete, and shorten the window."""
        unfinished = text[len(text.rstrip(_REPLACEMENT)) :][-_MAX_UNFINISHED:]
        del self._ids[:-_NUM_KEPT]
        end = self._tokenizer.decode(self._ids)
        if not end.endswith(unfinished):  # the shortened window decodes to another end
            unfinished = ""
        piece = text[self._num_out : len(text) - len(unfinished)]
        self._read = 0
        self._num_out = len(end) - len(unfinished)
        return piece
