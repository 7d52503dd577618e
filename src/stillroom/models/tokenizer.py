"""Text to tokens and back. Text from documents and users can never become a special token.

Two ways in: `encode_template` for what the prompt format itself writes (special tokens are parsed), and `encode_text`
for everything that comes from outside, where `<|im_end|>` is just nine characters.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from stillroom.core.panics import panics_as_errors
from stillroom.errors import ModelError, ModelNotFoundError

_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a blank."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_UNFINISHED = 3
"""Most replacement characters that a beginning of a character is decoded to: it has at most four bytes."""
_WAITING_ON = 12
"""Tokens that are kept of a window which became too long: the bytes of as many replacement characters."""
_MOST_WAITING = 24
"""Tokens of a window, which usually has a handful."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others are moved behind them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A checkpoint's fast tokenizer. Thread-safe."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._lock = Lock()  # one setting of the backend switches between the two ways in

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a checkpoint's folder.

        Raises:
            ModelNotFoundError: the folder has none.
            ModelError: its files are damaged.
        """
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ModelNotFoundError(f"{folder} has no tokenizer.json; Stillroom needs the checkpoint's tokenizer")
        from transformers import AutoTokenizer

        try:
            with panics_as_errors("the tokenizer"):
                return cls(AutoTokenizer.from_pretrained(folder, use_fast=True, local_files_only=True))
        except Exception as error:  # the library raises whatever its parsers raise
            raise ModelError(
                f"the tokenizer in {folder} could not be loaded ({type(error).__name__}: {error}); download it again"
            ) from error

    @property
    def hf_tokenizer(self) -> Any:
        """The wrapped tokenizer, for libraries that read its vocabulary."""
        return self._hf

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._hf.eos_token_id
        return token_id

    @property
    def bos_token(self) -> str:
        """The text of the begin token, empty if there is none."""
        return str(self._hf.bos_token or "")

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The text of every token that `encode_template` parses and `encode_text` does not."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens of these, which have no text in an answer."""
        tokens = self._backend.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in tokens if token.special)

    @cached_property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The messages in the checkpoint's chat template, up to where the assistant begins to speak.

        Raises:
            ModelError: the template refuses these messages.
        """
        # `enable_thinking` is read by the templates that know it (Qwen3): an answer should start at once.
        switches = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        try:
            return str(self._hf.apply_chat_template(list(messages), **switches))
        except Exception as error:  # a template may raise anything
            raise ModelError(f"the checkpoint's chat template failed: {error}") from error

    def encode_template(self, text: str) -> list[int]:
        """Tokens of text that the prompt format wrote: special tokens count as such. Nothing is added."""
        return self._encode(text, is_template=True)

    def encode_text(self, text: str) -> list[int]:
        """Tokens of text from outside: special tokens in it are ordinary characters. Nothing is added."""
        return self._encode(text, is_template=False)

    @panics_as_errors("the tokenizer")
    def _encode(self, text: str, is_template: bool) -> list[int]:
        with self._lock:
            self._backend.encode_special_tokens = not is_template
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    @panics_as_errors("the tokenizer")
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; its name, if it is special."""
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
        """Whether tokens are spelled in GPT-2's alphabet of bytes."""
        return self._backend.decoder is not None and b'"ByteLevel"' in self._backend.decoder.__getstate__()

    @panics_as_errors("the tokenizer")
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, without special ones."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))


class IncrementalDetokenizer:
    """Text as tokens arrive, never half a character. The pieces together are the text of all tokens.

    A token's text depends on its neighbours (leading blanks, bytes of one character), so each piece is the difference
    of two decodings of a short window: [prefix, read) is out already, [read, end) waits until it ends in whole
    characters. Bytes that never become one do not wait for ever, since each further token would decode them all again:
    of a long wait everything is out but the end, in which a character may still begin.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        """
        Args:
            after: the last tokens of the text before, which is out already.
        """
        self._tokenizer = tokenizer
        self._ids = list(after)  # the window, which begins at `prefix`
        self._read = 0
        self._num_out = 0  # characters of the window's text that are out
        self._begin_at(0)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        special_ids = self._tokenizer.special_ids
        self._ids.extend(token_id for token_id in token_ids if token_id not in special_ids)
        text = self._tokenizer.decode(self._ids)
        self._num_out = min(self._num_out, len(text))  # bytes that came out one by one may be fewer characters by now
        piece = text[self._num_out :]
        if piece and not piece.endswith(_REPLACEMENT):
            self._begin_at(self._read)
            return piece
        return self._give_way(text) if len(self._ids) > _MOST_WAITING else ""

    def flush(self) -> str:
        """What is left at the end, half a character included."""
        piece = self._tokenizer.decode(self._ids)[self._num_out :]
        self._begin_at(self._read)
        return piece

    def _begin_at(self, start: int) -> None:
        """Everything is out; what stands from `start` on is how the next tokens' text is found."""
        del self._ids[:start]
        self._read = len(self._ids)
        self._num_out = len(self._tokenizer.decode(self._ids))

    def _give_way(self, text: str) -> str:
        """All that waits but for an end that the next bytes may complete, of a window that has become too long."""
        unfinished = text[len(text.rstrip(_REPLACEMENT)) :][-_MAX_UNFINISHED:]
        del self._ids[:-_WAITING_ON]
        end = self._tokenizer.decode(self._ids)
        if not end.endswith(unfinished):  # cut there, it reads otherwise
            unfinished = ""
        piece = text[self._num_out : len(text) - len(unfinished)]
        self._read = 0
        self._num_out = len(end) - len(unfinished)
        return piece
