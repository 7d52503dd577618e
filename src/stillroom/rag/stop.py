"""Ending an answer at a stop string, wherever the borders of its tokens lie.

Text is held back only as long as it could be the beginning of a stop string. What comes out does not depend on how the
text is cut into pieces: the stop string that is complete first ends the answer; of several, the longest.
"""

from collections.abc import Sequence


class StopMatcher:
    """Pieces of text in, the same text up to the first stop string out."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is everywhere"
        self.is_matched = False
        """Whether a stop string was found; nothing comes out any more."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is certain to be part of the answer."""
        if not self._stops or self.is_matched:
            return "" if self.is_matched else piece
        text = self._held + piece
        found = [(text.find(stop), len(stop)) for stop in self._stops if stop in text]
        if found:
            start, _ = min(found, key=lambda match: (match[0] + match[1], match[0]))
            self.is_matched, self._held = True, ""
            return text[:start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
