"""Prompts of conversations without documents: the checkpoint's own chat template around what was said.

What users say is encoded as plain text, so it cannot imitate the template. A model without a template gets paragraphs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from stillroom.backends.conversation import History, num_turns_to_drop
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.errors import ModelError
from stillroom.models.tokenizer import Tokenizer


def chat_prompt(tokenizer: Tokenizer, question: str, max_tokens: int | None, history: History) -> SegmentedPrompt:
    """Build system message, earlier turns and question. A prompt of more than `max_tokens` (None: no limit) loses its
    oldest turns.

    Raises:
        ModelError: the checkpoint's template fails, or leaves out what was said.
    """

    @cache
    def without(num_dropped: int) -> SegmentedPrompt:
        talk = _Talk.of(tokenizer, question, history.without(num_dropped))
        return SegmentedPrompt(tuple(talk.segments(tokenizer, history.answer_start)))

    def fits(num_dropped: int) -> bool:
        return max_tokens is None or without(num_dropped).num_tokens <= max_tokens

    return without(num_turns_to_drop(len(history.turns), fits))


def chat_text(tokenizer: Tokenizer, question: str, history: History) -> str:
    """The prompt of `chat_prompt` as text, with all turns."""
    return _Talk.of(tokenizer, question, history).text + history.answer_start


@dataclass(frozen=True, slots=True)
class _Talk:
    """What was said, in order, and the template around it."""

    said: tuple[str, ...]
    """System message if there is one, then questions and answers in turn, then the question."""
    template: tuple[str, ...]
    """Before each text of `said`, and after the last one."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, question: str, history: History) -> "_Talk":
        exchanges = [turn.exchange for turn in history.turns]
        said = (*(text for one in exchanges for text in (one.question, one.answer)), question)
        if not history.system:
            return cls(said, _template(tokenizer, len(said)))
        try:
            return cls((history.system, *said), _template(tokenizer, len(said), has_system=True))
        except ModelError:  # some templates refuse the system role (Gemma 2), some leave it out
            first, *others = said
            return cls((f"{history.system}\n\n{first}", *others), _template(tokenizer, len(said)))

    @property
    def text(self) -> str:
        pairs = zip(self.template, self.said, strict=False)
        return "".join(part for pair in pairs for part in pair) + self.template[-1]

    def segments(self, tokenizer: Tokenizer, answer_start: str) -> Iterator[Segment]:
        """Yield the segments of the prompt: the template's beginning with the system message, each turn, the question
        with the beginning of its answer."""
        opening, *rest = self.template
        parts = [
            (*tokenizer.encode_text(text), *tokenizer.encode_template(after))
            for text, after in zip(self.said, rest, strict=True)
        ]
        first = tuple(tokenizer.encode_template(opening))
        if len(parts) % 2 == 0:
            first += parts.pop(0)
        if first:
            yield Segment(SegmentKind.SYSTEM, first)
        *turns, last = parts
        for asked, answered in zip(turns[::2], turns[1::2], strict=True):
            yield Segment(SegmentKind.TURN, asked + answered)
        yield Segment(SegmentKind.QUESTION, (*last, *tokenizer.encode_text(answer_start)))


def _template(tokenizer: Tokenizer, num_said: int, *, has_system: bool = False) -> tuple[str, ...]:
    """Render the template with placeholders, and cut it there.

    Args:
        num_said: texts after the system message: questions and answers in turn.

    Raises:
        ModelError: it fails, or leaves out a text.
    """
    roles = ["system"] * has_system + [("user", "assistant")[number % 2] for number in range(num_said)]
    if not tokenizer.has_chat_template:
        return (tokenizer.bos_token, *["\n\n"] * len(roles))
    slots = [f"@@STILLROOM-{number}@@" for number in range(len(roles))]
    rest = tokenizer.render_chat([{"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)])
    return tuple(_cut(rest, slots))


def _cut(rendered: str, slots: Sequence[str]) -> Iterator[str]:
    for slot in slots:
        before, found, rendered = rendered.partition(slot)
        if not found:
            raise ModelError(
                "the checkpoint's chat template leaves out a message; correct it or use another checkpoint"
            )
        yield before
    yield rendered
