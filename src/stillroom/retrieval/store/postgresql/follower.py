"""A thread that notices commits of other machines.

A notification of PostgreSQL (`LISTEN`) wakes it at once, but is only a hint: it looks once a second in any case. While
the server is away it tries to connect again. Each outage is logged once, and its end.
"""

import logging
import select
import socket
import threading
from collections.abc import Callable

from stillroom.errors import KnowledgeBaseBusyError, KnowledgeBaseNotFoundError, StillroomError
from stillroom.retrieval.store.postgresql import statements as sql
from stillroom.retrieval.store.postgresql.database import Connection, Database

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class Follower:
    """Calls a function after each commit of any process, as far as the server can be reached."""

    def __init__(
        self, database: Database, kb: int, catch_up: Callable[[Connection], None], look_every_s: float = LOOK_EVERY_S
    ) -> None:
        """
        Args:
            catch_up: Cheap if there was no commit.
        """
        self._database, self._kb, self._catch_up = database, kb, catch_up
        self._look_every_s = look_every_s
        self._stop = threading.Event()
        self._woken, self._waker = socket.socketpair()
        self.is_away = False
        """Whether the last attempt to read the database failed."""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stillroom-postgresql", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop the thread and wait for it. Idempotent."""
        self._stop.set()
        self._waker.close()  # ends the wait for a notification
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._woken.close()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):  # a command that ends before needs no second connection
            try:
                with self._database.connect() as connection:
                    self._follow(connection)
            except KnowledgeBaseNotFoundError as error:
                logger.error("%s", error)
                return
            except Exception as error:
                if not self.is_away:
                    is_ours = isinstance(error, StillroomError)
                    text = error if is_ours else "changes of other machines cannot be read; trying again every second"
                    logger.warning("%s", text, exc_info=None if is_ours else error)
                self.is_away = True

    def _follow(self, connection: Connection) -> None:
        with self._database.translating_errors():
            connection.execute(f"LISTEN {sql.channel_of(self._kb)}")
        while not self._stop.is_set():
            try:
                with self._database.translating_errors():
                    self._catch_up(connection)
            except KnowledgeBaseBusyError:  # another process of this machine does it
                pass
            else:
                if self.is_away:
                    logger.warning("%s can be reached again", self._database.address)
                self.is_away = False
            select.select([connection.fileno(), self._woken], (), (), self._look_every_s)
            with self._database.translating_errors():
                for _ in connection.notifies(timeout=0):
                    pass
