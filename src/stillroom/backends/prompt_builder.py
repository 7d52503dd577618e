"""Builds a `SegmentedPrompt` from a question, its chunks and its history. Every segment is tokenised on its own.

A `PromptFormat` is the template text around content. A chunk's segment does not depend on its position in the prompt
(no numbering), so its tokens are always the same. Documents' and users' text is encoded as plain text, so it cannot
imitate the template.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stillroom.backends.conversation import NO_HISTORY, History, new_chunks, num_turns_to_drop
from stillroom.config.settings import ChunkOrder
from stillroom.core.document import Chunk
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.errors import ModelError
from stillroom.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

INSTRUCTIONS = (
    "Answer the question using only the documents below. "
    "Be brief and exact. If the documents do not contain the answer, say that they do not."
)
_CITE = (
    "After each sentence of the answer, write the number of the document that supports it in brackets, such as [1]. "
    "Documents are numbered from 1 in the order above."
)
_MARKERS = frozenset({"<chunk>", "</chunk>", "<q>", "<a>"})
_SLOT = "@@STILLROOM@@"
_ANSWER_SLOT = "@@STILLROOM-ANSWER@@"
_NEXT_SLOT = "@@STILLROOM-NEXT@@"


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Template text around system message, chunks and question. Special tokens in it are recognised."""

    system: str
    """Text before the caller's system message."""
    opening: str
    """Text from there to the first chunk."""
    chunk_start: str
    chunk_end: str
    question_start: str
    question_end: str
    next_turn: str
    """Text from the end of an answer to the next turn's first chunk, or its question."""
    shows_headings: bool = True
    """Whether title and headings precede a chunk's text."""


PLAIN_CHAT = PromptFormat(
    system="",
    opening="Documents:\n\n",
    chunk_start="<document>\n",
    chunk_end="\n</document>\n\n",
    question_start="Question: ",
    question_end="",
    next_turn="",
)
"""The user's message in a chat, without a template around it."""


def format_for(tokenizer: Tokenizer) -> PromptFormat:
    """The format of a checkpoint: Stillroom's markers if it has them, else its chat template, else plain text."""
    if tokenizer.special_tokens >= _MARKERS:
        return marker_format(tokenizer.bos_token)
    if tokenizer.has_chat_template:
        return chat_format(tokenizer)
    logger.warning(
        "the checkpoint has no chat template, so prompts are plain text, which a chat model may not follow; if it was "
        "published with chat_template.jinja or one in tokenizer_config.json, copy that file into its folder"
    )
    return plain_format(tokenizer.bos_token)


def marker_format(bos_token: str) -> PromptFormat:
    """For models trained on Stillroom's prompts, recognised by their special tokens."""
    return PromptFormat(
        system=f"{bos_token} Answer the question using only the chunks below .",
        opening="",
        chunk_start="<chunk> ",
        chunk_end=" </chunk>",
        question_start="<q> ",
        question_end=" <a>",
        next_turn="",
        shows_headings=False,
    )


def chat_format(tokenizer: Tokenizer) -> PromptFormat:
    """Render the checkpoint's chat template once with placeholders, and cut it there.

    Raises:
        ModelError: it fails, or omits the user's message.
    """
    slot = [{"role": "user", "content": _SLOT}]
    try:
        rendered = tokenizer.render_chat([{"role": "system", "content": INSTRUCTIONS}, *slot])
    except ModelError:
        rendered = ""
    if INSTRUCTIONS in rendered:
        before, found, after = rendered.partition(_SLOT)
        start, _, rest = before.partition(INSTRUCTIONS)
    else:  # some templates drop the system role, some refuse it (Gemma 2)
        start, found, after = tokenizer.render_chat(slot).partition(_SLOT)
        rest = "\n\n"
    if not found:
        raise ModelError(
            "the checkpoint's chat template leaves out what the user says; correct it or use another checkpoint"
        )
    return replace(
        PLAIN_CHAT,
        system=f"{start}{INSTRUCTIONS}",
        opening=f"{rest}{PLAIN_CHAT.opening}",
        question_end=after,
        next_turn=_next_turn(tokenizer),
    )


def _next_turn(tokenizer: Tokenizer) -> str:
    """Template text between an answer and the user's next message."""
    slots = [("user", _SLOT), ("assistant", _ANSWER_SLOT), ("user", _NEXT_SLOT)]
    try:
        rendered = tokenizer.render_chat([{"role": role, "content": content} for role, content in slots])
    except ModelError:
        rendered = ""
    _, _, rest = rendered.partition(_ANSWER_SLOT)
    between, found, _ = rest.partition(_NEXT_SLOT)
    return between if found else "\n\n"


def plain_format(bos_token: str) -> PromptFormat:
    """For base models without a chat template."""
    return PromptFormat(
        system=f"{bos_token}{INSTRUCTIONS}",
        opening="\n\n",
        chunk_start="Document:\n",
        chunk_end="\n\n",
        question_start="Question: ",
        question_end="\nAnswer:",
        next_turn="\n\n",
    )


def render(prompt_format: PromptFormat, chunks: Sequence[Chunk], question: str, history: History = NO_HISTORY) -> str:
    """The whole prompt as text. A tokenizer may recognise special tokens in the documents, which `PromptBuilder`
    prevents."""
    form = prompt_format
    *earlier, last = new_chunks(history.turns, chunks)
    parts = [form.system, *(["\n\n", history.system] if history.system else ()), form.opening]
    for turn, added in zip(history.turns, earlier, strict=True):
        parts += [_user_text(form, added, turn.exchange.question), turn.exchange.answer, form.next_turn]
    return "".join([*parts, _user_text(form, last, question), history.answer_start])


def ask_for_citations(question: str) -> str:
    """Return the question with the instruction to name sources. The tokens of the documents stay the same."""
    return f"{question}\n\n{_CITE}"


def raw_tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encode a raw prompt, in which special tokens are recognised; the begin token is added if it is missing."""
    begin = tokenizer.bos_token
    return tuple(tokenizer.encode_template(text if text.startswith(begin) else begin + text))


def user_messages(chunks: Sequence[Chunk], question: str, history: History) -> list[str]:
    """The user's message of each turn of a chat, without a template."""
    *earlier, last = new_chunks(history.turns, chunks)
    turns = zip(history.turns, earlier, strict=True)
    said = [_user_text(PLAIN_CHAT, added, turn.exchange.question) for turn, added in turns]
    said.append(_user_text(PLAIN_CHAT, last, question))
    return [PLAIN_CHAT.opening + said[0], *said[1:]]


def _user_text(form: PromptFormat, chunks: Sequence[Chunk], question: str) -> str:
    documents = [part for one in chunks for part in (form.chunk_start, _text_of(one, form), form.chunk_end)]
    return "".join([*documents, form.question_start, question, form.question_end])


def _text_of(chunk: Chunk, prompt_format: PromptFormat) -> str:
    return f"{chunk.heading}\n\n{chunk.text}" if prompt_format.shows_headings and chunk.heading else chunk.text


def in_document_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return chunks, given best first, document by document in its own order; the document of the best chunk first."""
    rank = {chunk.document_id: place for place, chunk in reversed(list(enumerate(chunks)))}
    return sorted(chunks, key=lambda chunk: (rank[chunk.document_id], chunk.ordinal))


class PromptBuilder:
    """Builds prompts with one model's tokenizer and format."""

    def __init__(self, tokenizer: Tokenizer, prompt_format: PromptFormat, chunk_order: ChunkOrder = "rank") -> None:
        """
        Args:
            chunk_order: `generation.chunk_order`.
        """
        self._tokenizer = tokenizer
        self._chunk_order = chunk_order
        self._format = prompt_format
        self._system = Segment(
            SegmentKind.SYSTEM, tuple(tokenizer.encode_template(prompt_format.system + prompt_format.opening))
        )

    def build(
        self, chunks: Sequence[Chunk], question: str, max_tokens: int | None, history: History = NO_HISTORY
    ) -> SegmentedPrompt:
        """Build system, earlier turns, chunks in the given order or that of their documents, and question.

        A prompt of more than `max_tokens` (None: no limit) loses its oldest turns until the chunks have half of the
        room, or all that they need; then its last chunks. Even without chunks it may be too long; the scheduler
        refuses it then.
        """
        system, last = self._system_with(history.system), self._question(question, history.answer_start)
        room = math.inf if max_tokens is None else max_tokens - len(system.token_ids) - len(last.token_ids)

        @cache
        def without(num_dropped: int) -> tuple[list[Segment], list[Chunk]]:
            return self._turns(history.without(num_dropped), chunks)

        def fits(num_dropped: int) -> bool:
            earlier, new = without(num_dropped)
            return _num_tokens(earlier) + min(_num_tokens(map(self._chunk, new)), room / 2) <= room

        earlier, new = without(num_turns_to_drop(len(history.turns), fits))
        return SegmentedPrompt((system, *earlier, *self._fitting(new, room - _num_tokens(earlier)), last))

    def build_documents(self, prompt: SegmentedPrompt, chunks: Sequence[Chunk]) -> SegmentedPrompt:
        """Return a prompt with other chunks, all of them before its earlier turns and its question.

        Args:
            prompt: as `build` made it.
            chunks: ordered by document as the first of each document, and within it as they stand there.
        """
        system, *others = (segment for segment in prompt.segments if segment.chunk_id is None)
        return SegmentedPrompt((system, *map(self._chunk, in_document_order(chunks)), *others))

    def _turns(self, history: History, chunks: Sequence[Chunk]) -> tuple[list[Segment], list[Chunk]]:
        """The segments of earlier turns, and the chunks that no earlier turn has."""
        *earlier, new = new_chunks(history.turns, chunks)
        found: list[Segment] = []
        for turn, added in zip(history.turns, earlier, strict=True):
            exchange = turn.exchange
            asked = self._wrap(self._format.question_start, exchange.question, self._format.question_end)
            answered = self._wrap("", exchange.answer, self._format.next_turn)
            found += [*map(self._chunk, added), Segment(SegmentKind.TURN, asked + answered)]
        return found, new

    def _fitting(self, chunks: Sequence[Chunk], room: float) -> list[Segment]:
        kept: dict[Chunk, Segment] = {}
        for chunk in chunks:
            segment = self._chunk(chunk)
            room -= len(segment.token_ids)
            if room < 0:
                break
            kept[chunk] = segment
        order = in_document_order(list(kept)) if self._chunk_order == "document" else kept
        return [kept[chunk] for chunk in order]

    def _system_with(self, said: str) -> Segment:
        if not said:
            return self._system
        return Segment(SegmentKind.SYSTEM, self._wrap(self._format.system, f"\n\n{said}", self._format.opening))

    def _chunk(self, chunk: Chunk) -> Segment:
        ids = self._wrap(self._format.chunk_start, _text_of(chunk, self._format), self._format.chunk_end)
        return Segment(SegmentKind.CHUNK, ids, chunk.chunk_id)

    def _question(self, question: str, answer_start: str) -> Segment:
        asked = self._wrap(self._format.question_start, question, self._format.question_end)
        return Segment(SegmentKind.QUESTION, (*asked, *self._tokenizer.encode_text(answer_start)))

    def _wrap(self, start: str, text: str, end: str) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        return (
            *tokenizer.encode_template(start),
            *tokenizer.encode_text(text),
            *tokenizer.encode_template(end),
        )


def _num_tokens(segments: Iterable[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments)
