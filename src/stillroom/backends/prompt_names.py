"""Names the pieces of a prompt for servers elsewhere, so that a prompt is sent where its beginning was sent before.

The name of a piece is a hash chain over the tenant's salt and the texts up to its end. Prompts with equal names begin
with the same text; lengths are estimates, because only the server knows its tokens.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stillroom.backends.conversation import History, new_chunks
from stillroom.cluster.routed_request import RoutedPiece, RoutedRequest
from stillroom.core.document import Chunk

CHARACTERS_PER_TOKEN = 4
"""Estimate for English text. Only ratios of lengths matter."""
RAW_PIECE = 1024
"""Characters, or tokens times `CHARACTERS_PER_TOKEN`, of a piece of a prompt that is sent as it is."""


class Part(NamedTuple):
    """A part of a prompt."""

    text: str
    is_chunk: bool = False


def request_of(parts: Iterable[Part], salt: str) -> RoutedRequest:
    """Return the request of a prompt that consists of these parts."""
    root = parent = hashlib.sha256(salt.encode()).digest()
    pieces = []
    for part in parts:
        content = hashlib.sha256(root + part.text.encode("utf-8", errors="surrogatepass")).digest()
        parent = hashlib.sha256(parent + content).digest()
        pieces.append(RoutedPiece(parent, content, 1 + len(part.text) // CHARACTERS_PER_TOKEN, part.is_chunk))
    return RoutedRequest(0, tuple(pieces))


def parts_of_question(chunks: Sequence[Chunk], question: str, history: History) -> list[Part]:
    """Return the parts of a prompt with documents: system, earlier turns, chunks in the given order, question."""
    *earlier, last = new_chunks(history.turns, chunks)
    parts = [Part(history.system)]
    for turn, added in zip(history.turns, earlier, strict=True):
        parts += [*map(_chunk, added), Part(turn.exchange.question), Part(turn.exchange.answer)]
    parts += [*map(_chunk, last), Part(question)]
    return [*parts, Part(history.answer_start)] if history.answer_start else parts


def parts_of_raw(prompt: str | Sequence[int]) -> list[Part]:
    """Return the parts of a prompt that is sent as it is: equal lengths, the rest left out."""
    if isinstance(prompt, str):
        return [Part(prompt[start : start + RAW_PIECE]) for start in range(0, len(prompt) - RAW_PIECE + 1, RAW_PIECE)]
    size = RAW_PIECE // CHARACTERS_PER_TOKEN
    starts = range(0, len(prompt) - size + 1, size)
    return [Part(" ".join(map(str, prompt[start : start + size]))) for start in starts]


def _chunk(chunk: Chunk) -> Part:
    return Part(chunk.indexed_text, is_chunk=True)
