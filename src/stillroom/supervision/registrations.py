"""The engines that registered lately, for a service that lists them to fronts. Pure."""

CHECK_SECONDS = 2.0
"""An engine registers again after so long."""
MAX_SILENT_SECONDS = 10.0
"""An engine that did not register for longer is not listed."""


class Registrations:
    """Addresses of engines, and when each was last heard of."""

    def __init__(self, now: float) -> None:
        """
        Args:
            now: seconds of a monotonic clock, here and below.
        """
        self._complete_from = now + 2 * CHECK_SECONDS
        self._seen: dict[str, float] = {}

    def register(self, url: str, now: float) -> None:
        self._seen[url] = now

    def leave(self, url: str) -> None:
        """List the engine no longer."""
        self._seen.pop(url, None)

    def reply(self, now: float) -> tuple[str, int]:
        """Return the list, a line for each engine, and its HTTP status.

        It is 503 just after a start, when engines of before may not have registered again: fronts then keep those that
        they know.
        """
        self._seen = {url: seen for url, seen in self._seen.items() if now - seen < MAX_SILENT_SECONDS}
        return "".join(f"{url}\n" for url in sorted(self._seen)), 503 if now < self._complete_from else 200
