"""What `stillroom bench anywhere` is answered, by us or by a peer, and how often a full prefill answers the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment

SYSTEM_TOKENS = 32
"""Of a prompt."""
ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class PromptReply:
    """To one prompt."""

    seconds: float
    """To the first token."""
    token_ids: tuple[int, ...]
    num_cached: int
    """Tokens of the prompt that were not computed; of a peer, those it had kept, computed again or not."""
    num_recomputed: int = 0
    sources: frozenset[Tier | None] = frozenset()
    """Where chunks came from."""


Ask = Callable[[Sequence[Segment]], PromptReply]


@dataclass(slots=True)
class Answers:
    """What each arm answered, to be compared with what its runtime answers in full."""

    found: dict[str, dict[int, PromptReply]] = field(default_factory=dict)

    def add(self, arm: str, repetition: int, reply: PromptReply) -> None:
        if repetition >= 0:
            self.found.setdefault(arm, {})[repetition] = reply

    def rows(self, references: Mapping[str, str]) -> list[dict[str, Any]]:
        """
        Args:
            references: arm -> the arm that answers the same prompts in full.
        """
        return [
            {"arm": arm} | agreement([(self.found[full][at], reply) for at, reply in self.found[arm].items()])
            for arm, full in references.items()
        ]


def agreement(pairs: Sequence[tuple[PromptReply, PromptReply]]) -> dict[str, str]:
    """How many replies begin with the same token as those in full, and how many are the same."""
    first = sum(full.token_ids[0] == reply.token_ids[0] for full, reply in pairs)
    whole = sum(full.token_ids == reply.token_ids for full, reply in pairs)
    return {"same first token": f"{first} of {len(pairs)}", f"same {ANSWER_TOKENS} tokens": f"{whole} of {len(pairs)}"}
