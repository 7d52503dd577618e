"""How a question and its chunks become a `SegmentedPrompt`. Every segment is tokenised on its own.

A format is five pieces of text around what comes from outside. Nothing in a chunk's segment depends on its place in the
prompt (no numbering), so its tokens are the same wherever it stands; text from documents and users is encoded as plain
text, so it cannot imitate the template.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stillroom.core.document import Chunk
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.errors import ModelError
from stillroom.models.tokenizer import Tokenizer

INSTRUCTIONS = (
    "Answer the question using only the documents below. "
    "Be brief and exact. If the documents do not contain the answer, say that they do not."
)
_MARKERS = frozenset({"<chunk>", "</chunk>", "<q>", "<a>"})
_SLOT = "@@STILLROOM@@"


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """The text around system, chunks and question. Special tokens in it are meant as such."""

    system: str
    chunk_start: str
    chunk_end: str
    question_start: str
    question_end: str
    shows_headings: bool = True
    """Whether a chunk's text is preceded by its title and headings."""


PLAIN_CHAT = PromptFormat(
    system="Documents:\n\n",
    chunk_start="<document>\n",
    chunk_end="\n</document>\n\n",
    question_start="Question: ",
    question_end="",
)
"""The user's message in a chat, without a template around it."""


def format_for(tokenizer: Tokenizer) -> PromptFormat:
    """The format a checkpoint was made for: our own markers, else its chat template, else plain text."""
    if tokenizer.special_tokens >= _MARKERS:
        return marker_format(tokenizer.bos_token)
    if tokenizer.has_chat_template:
        return chat_format(tokenizer)
    return plain_format(tokenizer.bos_token)


def marker_format(bos_token: str) -> PromptFormat:
    """For models trained on Stillroom's own prompts, recognised by their special tokens."""
    return PromptFormat(
        system=f"{bos_token} Answer the question using only the chunks below .",
        chunk_start="<chunk> ",
        chunk_end=" </chunk>",
        question_start="<q> ",
        question_end=" <a>",
        shows_headings=False,
    )


def chat_format(tokenizer: Tokenizer) -> PromptFormat:
    """The checkpoint's chat template, rendered once around a slot and cut there."""
    slot = [{"role": "user", "content": _SLOT}]
    try:
        rendered = tokenizer.render_chat([{"role": "system", "content": INSTRUCTIONS}, *slot])
    except ModelError:
        rendered = ""
    instructions = ""
    if INSTRUCTIONS not in rendered:  # some templates drop the system role, some refuse it (Gemma 2)
        rendered = tokenizer.render_chat(slot)
        instructions = INSTRUCTIONS + "\n\n"
    before, _, after = rendered.partition(_SLOT)
    return replace(PLAIN_CHAT, system=f"{before}{instructions}{PLAIN_CHAT.system}", question_end=after)


def plain_format(bos_token: str) -> PromptFormat:
    """For base models without a chat template."""
    return PromptFormat(
        system=f"{bos_token}{INSTRUCTIONS}\n\n",
        chunk_start="Document:\n",
        chunk_end="\n\n",
        question_start="Question: ",
        question_end="\nAnswer:",
    )


def render(prompt_format: PromptFormat, chunks: Sequence[Chunk], question: str) -> str:
    """The whole prompt as text. A tokenizer may read special tokens in the documents; `PromptBuilder` prevents that."""
    parts = [prompt_format.system]
    for chunk in chunks:
        parts += [prompt_format.chunk_start, _text_of(chunk, prompt_format), prompt_format.chunk_end]
    return "".join([*parts, prompt_format.question_start, question, prompt_format.question_end])


def _text_of(chunk: Chunk, prompt_format: PromptFormat) -> str:
    return f"{chunk.heading}\n\n{chunk.text}" if prompt_format.shows_headings and chunk.heading else chunk.text


class PromptBuilder:
    """Segments for one model's tokenizer and format."""

    def __init__(self, tokenizer: Tokenizer, prompt_format: PromptFormat) -> None:
        self._tokenizer = tokenizer
        self._format = prompt_format
        self._system = Segment(SegmentKind.SYSTEM, tuple(tokenizer.encode_template(prompt_format.system)))

    def build(self, chunks: Sequence[Chunk], question: str, max_tokens: int | None) -> SegmentedPrompt:
        """System, chunks in the given order, question; the last chunks are left out where more than `max_tokens` would
        result; None is no limit.

        Without any chunk the prompt may still be longer: the scheduler then says so.
        """
        last = self._question(question)
        room = math.inf if max_tokens is None else max_tokens - len(self._system.token_ids) - len(last.token_ids)
        kept = []
        for chunk in chunks:
            segment = self._chunk(chunk)
            room -= len(segment.token_ids)
            if room < 0:
                break
            kept.append(segment)
        return SegmentedPrompt((self._system, *kept, last))

    def _chunk(self, chunk: Chunk) -> Segment:
        ids = self._wrap(self._format.chunk_start, _text_of(chunk, self._format), self._format.chunk_end)
        return Segment(SegmentKind.CHUNK, ids, chunk.chunk_id)

    def _question(self, question: str) -> Segment:
        return Segment(
            SegmentKind.QUESTION, self._wrap(self._format.question_start, question, self._format.question_end)
        )

    def _wrap(self, start: str, text: str, end: str) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        return (
            *tokenizer.encode_template(start),
            *tokenizer.encode_text(text),
            *tokenizer.encode_template(end),
        )
