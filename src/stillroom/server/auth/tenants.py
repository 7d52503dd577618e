"""Tenants: one knowledge base each, answered by one shared model.

Routes call `stillroom_of(request)` for the tenant's `Stillroom` and `caller_of(request)` for the caller; `Guard` has
set both. A tenant's knowledge base is opened by its first request and stays open. Only tenants of a key are opened.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from starlette.requests import Request

from stillroom.errors import ConfigError, EngineClosedError, StillroomError
from stillroom.retrieval.store.closed_corpus import State, counts_of, state_of
from stillroom.retrieval.store.folder import CORPUS
from stillroom.server.auth.key_ring import ApiKey, check_name

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

logger = logging.getLogger(__name__)

Counts = tuple[int, int]
"""Numbers of documents and chunks."""

DEFAULT_TENANT = "default"
"""The tenant of `serve --kb`."""

NO_TENANTS_FOLDER = "there is no folder for their knowledge bases; name one: --tenants DIR, or server.tenants_folder"
"""Follows the names of tenants other than the default one."""


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    """Name of the key; shown in the log."""
    tenant: str
    """Empty without a key: no knowledge base can be reached."""
    is_operator: bool
    """May read figures of all tenants."""
    key: ApiKey | None = None


KEYLESS_CALLER = Caller("anybody", DEFAULT_TENANT, is_operator=True)
"""Every caller of a server without keys."""
UNKNOWN_CALLER = Caller("stranger", "", is_operator=False)
"""A caller without a key on a server with keys; may read `OPEN_PATHS` only."""


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def stillroom_of(request: Request) -> "Stillroom":
    """Return the `Stillroom` of the caller's tenant; `Guard` has opened it."""
    tenants: Tenants = request.app.state.tenants
    return tenants.stillroom(caller_of(request).tenant)


@dataclass(slots=True)
class Tenants:
    """The tenants of one process. Thread-safe. Close it before the default tenant's `Stillroom`."""

    default: "Stillroom"
    """The default tenant's `Stillroom`; the caller closes it."""
    folder: Path | None = None
    """Holds a folder per other tenant, of the tenant's name. None: only the default tenant is served."""
    creates: bool = True
    """Whether the first request of a tenant creates its knowledge base."""
    on_open: "Callable[[str, Stillroom], None] | None" = None
    """Called with each tenant that was opened."""
    _open: "dict[str, Stillroom]" = field(default_factory=dict)
    _opening: Lock = field(default_factory=Lock)
    _is_closed: bool = False

    def stillroom(self, tenant: str) -> "Stillroom":
        """Return a tenant's `Stillroom`, opening it the first time.

        Raises:
            KnowledgeBaseError: the tenant's folder cannot be used.
            UsageError: the tenant's name is invalid.
        """
        if tenant == DEFAULT_TENANT:
            return self.default
        found = self._open.get(tenant)
        if found is not None and found.is_there:
            return found
        with self._opening:
            if self._is_closed:
                raise EngineClosedError("the server is shutting down")
            found = self._open.get(tenant)
            if found is None or not found.is_there:
                if found is not None:
                    logger.warning(
                        "the knowledge base of the tenant %r was removed or replaced; opening it again", tenant
                    )
                    del self._open[tenant]
                    found.close()
                found = self._open[tenant] = self.default.for_tenant(
                    self._folder_of(tenant), tenant, create=self.creates
                )
                if self.on_open is not None:
                    self.on_open(tenant, found)
            return found

    def is_servable(self, tenant: str) -> bool:
        """Whether this server has, or can make, a knowledge base for a tenant."""
        return tenant == DEFAULT_TENANT or self.folder is not None

    def is_open(self, tenant: str) -> bool:
        """Whether `stillroom(tenant)` returns at once."""
        found = self._open.get(tenant)
        return tenant == DEFAULT_TENANT or (found is not None and found.is_there)

    def close(self) -> None:
        """Close all but the default tenant. Idempotent."""
        with self._opening:
            self._is_closed = True
            opened = list(self._open.values())
            self._open.clear()
        for stillroom in opened:
            stillroom.close()

    def _folder_of(self, tenant: str) -> Path:
        check_name("tenant", tenant)
        if self.folder is None:
            raise ConfigError(f"the tenant {tenant!r} has no knowledge base; set server.tenants_folder")
        if self.creates:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users must not read tenants' names
        return self.folder / tenant


class InactiveTenantCounts:
    """Counts documents of tenants that are not open, for metrics, without opening them. Any thread.

    A corpus is counted again only when its file has changed.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._counted: dict[str, tuple[State, Counts]] = {}

    def __call__(self) -> dict[str, Counts]:
        """Return the counts by folder. Folders that are unreadable or no knowledge base are left out."""
        if self._tenants.folder is None:
            return {}
        folder = Path(os.path.abspath(self._tenants.folder))
        found: dict[str, Counts] = {}
        with suppress(OSError):  # the folder does not exist yet
            for path in folder.iterdir():
                if not self._tenants.is_open(path.name):
                    with suppress(OSError, StillroomError):
                        found[str(path)] = self._counts_of(path)
        return found

    def _counts_of(self, path: Path) -> Counts:
        corpus = path / CORPUS
        state = state_of(corpus)
        known = self._counted.get(str(path))
        if known is None or known[0] != state:
            known = self._counted[str(path)] = state, counts_of(corpus)
        return known[1]
