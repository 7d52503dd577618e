"""One knowledge base per tenant; one model answers for all of them.

Routes call `stillroom_of(request)` for the tenant's `Stillroom` and `caller_of(request)` for the rest; the `Guard` has
put both there. A tenant's knowledge base is opened by its first request and stays open. Only tenants that a key names
are opened.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from starlette.requests import Request

from stillroom.errors import ConfigError, EngineClosedError
from stillroom.server.auth.key_ring import ApiKey, check_name

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

logger = logging.getLogger(__name__)

DEFAULT_TENANT = "default"
"""Whose knowledge base is that of `--kb`."""

NO_PLACE = "their knowledge bases have no place; name a folder for them: --tenants DIR, or server.tenants_folder"
"""Of tenants other than the default one."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    name: str
    """As logs call him: the name of his key."""
    tenant: str
    """Empty: he has not said who he is, and reaches no knowledge base."""
    is_operator: bool
    """May see figures of all tenants."""
    key: ApiKey | None = None


ANYBODY = Caller("anybody", DEFAULT_TENANT, is_operator=True)
"""Every caller of a server that asks for no keys."""
STRANGER = Caller("stranger", "", is_operator=False)
"""Has no key where one is asked for; he learns whether the server lives, and nothing else."""


def caller_of(request: Request) -> Caller:
    """Who sent this request."""
    caller: Caller = request.state.caller
    return caller


def stillroom_of(request: Request) -> "Stillroom":
    """The room of whoever sent this request. It is open already, so this takes no time."""
    tenants: Tenants = request.app.state.tenants
    return tenants.stillroom(caller_of(request).tenant)


@dataclass(slots=True)
class Tenants:
    """The rooms of one process. Thread-safe. Whoever made it closes it, before the room of the default tenant."""

    own: "Stillroom"
    """The default tenant's; the caller closes it."""
    folder: Path | None = None
    """Has the other tenants' knowledge bases, each in a folder of the tenant's name. None: there are none."""
    on_open: "Callable[[str, Stillroom], None] | None" = None
    """Told of each room that was opened."""
    _rooms: "dict[str, Stillroom]" = field(default_factory=dict)
    _opening: Lock = field(default_factory=Lock)
    _is_closed: bool = False

    def stillroom(self, tenant: str) -> "Stillroom":
        """A tenant's room; it is made the first time.

        Raises:
            KnowledgeBaseError: what is in its folder cannot be used.
            UsageError: the name is not possible.
        """
        if tenant == DEFAULT_TENANT:
            return self.own
        found = self._rooms.get(tenant)
        if found is not None and found.is_there:
            return found
        with self._opening:
            if self._is_closed:
                raise EngineClosedError("the server is shutting down")
            found = self._rooms.get(tenant)
            if found is None or not found.is_there:
                if found is not None:
                    logger.warning(
                        "the knowledge base of the tenant %r was removed or replaced; opening it anew", tenant
                    )
                    del self._rooms[tenant]
                    found.close()
                found = self._rooms[tenant] = self.own.for_tenant(self._folder_of(tenant), tenant)
                if self.on_open is not None:
                    self.on_open(tenant, found)
            return found

    def has_place(self, tenant: str) -> bool:
        """Whether there is, or may be made, a knowledge base for a tenant."""
        return tenant == DEFAULT_TENANT or self.folder is not None

    def is_open(self, tenant: str) -> bool:
        """Whether `stillroom` takes no time."""
        found = self._rooms.get(tenant)
        return tenant == DEFAULT_TENANT or (found is not None and found.is_there)

    def close(self) -> None:
        """Close all rooms but the default tenant's. Idempotent."""
        with self._opening:
            self._is_closed = True
            rooms = list(self._rooms.values())
            self._rooms.clear()
        for stillroom in rooms:
            stillroom.close()

    def _folder_of(self, tenant: str) -> Path:
        check_name("tenant", tenant)
        if self.folder is None:
            raise ConfigError(f"the tenant {tenant!r} has no knowledge base: server.tenants_folder is not set")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # names of tenants are private
        return self.folder / tenant
