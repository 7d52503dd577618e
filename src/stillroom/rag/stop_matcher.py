"""Stop strings: the text of an answer ends before the first of them."""

from collections.abc import Sequence


class StopMatcher:
    """Ends a text at the first complete stop string; of several that end at the same place, the longest.

    Text is held back only while it could be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is everywhere"
        self.is_matched = False
        """Whether a stop string was found; nothing is returned after it."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """Take a piece; return the text that is certain to be part of the answer."""
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
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
