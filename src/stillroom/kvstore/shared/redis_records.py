"""Records of a shared tier on a server that speaks the Redis protocol: Valkey or Redis. No torch.

Names: `<prefix>:<namespace>:kv:<fingerprint>:<key>` is a record; `...:seen:<owner>:<chunk>` is the sorted set of an
owner's records that have seen a chunk, by the time when they expire, and `...:owner:<owner>` the set of the chunks that
have such sets. A record and its entries are written in one transaction, and removed in one, so every record has its
entries. Records expire; sets live twice as long, so that a server which evicts what expires first (`maxmemory-policy
volatile-ttl`) evicts a set after its records.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from stillroom.config.tier_address import TierAddress
from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, OwnerTag
from stillroom.kvstore.record import Buffer
from stillroom.kvstore.shared.records import TierFullError, namespace
from stillroom.kvstore.shared.resp import Argument, Reply, ReplyError, RespConnection

_NO_CHUNK = "none"
"""Stands for the chunk of records that have seen none, such as system prompts."""
_BATCH = 500


class RedisRecords:
    def __init__(
        self,
        address: TierAddress,
        fingerprint: bytes,
        *,
        group: str = "",
        timeout_seconds: float,
        ttl: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Connect with the first call.

        Args:
            fingerprint: of the model.
            group: as in `namespace`.
            ttl: seconds until the server drops a record.
            now: seconds since 1970.
        """
        self._connect: Callable[[], RespConnection] = lambda: RespConnection(address, timeout_seconds)
        self._root = f"{address.prefix}:{namespace(group)}"
        self._model = f"{self._root}:kv:{fingerprint.hex()[:32]}"
        self._ttl = max(1, int(ttl))
        self._now = now
        self._lock = Lock()
        self._idle: list[RespConnection] = []

    def num_present(self, keys: Sequence[NodeKey]) -> int:
        with self._connection() as connection:
            for start in range(0, len(keys), _BATCH):
                replies = _checked(connection.pipeline([["EXISTS", self._name(key)] for key in keys[start:][:_BATCH]]))
                for count, reply in enumerate(replies):
                    if reply != 1:
                        return start + count
        return len(keys)

    def read(self, key: NodeKey, max_bytes: int) -> bytearray | None:
        with self._connection() as connection:
            (reply,) = _checked([connection.call("GET", self._name(key), max_bytes=max_bytes)])
        return reply if isinstance(reply, bytearray) else None

    def write(self, key: NodeKey, parts: Sequence[Buffer], owner: OwnerTag | None, seen: Collection[ChunkId]) -> None:
        name = self._name(key)
        commands: list[list[Argument]] = [["MULTI"]]
        if owner is not None:
            commands += self._entries(name, owner, [f"{chunk_id:016x}" for chunk_id in seen] or [_NO_CHUNK])
        value: Buffer = parts[0] if len(parts) == 1 else b"".join(parts)
        commands += [["SET", name, value, "EX", self._ttl], ["EXEC"]]
        with self._connection() as connection:
            _checked(connection.pipeline(commands))

    def _entries(self, name: str, owner: OwnerTag, chunks: Sequence[str]) -> Iterator[list[Argument]]:
        """Yield the commands by which a removal of one of these chunks finds the record."""
        now, of_owner = int(self._now()), self._of_owner(owner)
        for chunk in chunks:
            of_chunk = self._of_chunk(owner, chunk)
            yield ["ZREMRANGEBYSCORE", of_chunk, "-inf", now - self._ttl]  # a margin for clocks that differ
            yield ["ZADD", of_chunk, now + self._ttl, name]
            yield ["EXPIRE", of_chunk, 2 * self._ttl]
            yield ["SADD", of_owner, chunk]
        yield ["EXPIRE", of_owner, 2 * self._ttl]

    def remove(self, key: NodeKey) -> None:
        with self._connection() as connection:
            _checked([connection.call("UNLINK", self._name(key))])

    def forget(self, owner: OwnerTag, chunk_ids: Collection[ChunkId] | None) -> int:
        with self._connection() as connection:
            if chunk_ids is None:
                chunks = _members(_checked([connection.call("SMEMBERS", self._of_owner(owner))])[0])
            else:
                chunks = [f"{chunk_id:016x}" for chunk_id in chunk_ids]
            return sum(
                self._forget(connection, owner, chunks[at : at + _BATCH]) for at in range(0, len(chunks), _BATCH)
            )

    def _forget(self, connection: RespConnection, owner: OwnerTag, chunks: Sequence[str]) -> int:
        found = _checked(connection.pipeline([["ZRANGE", self._of_chunk(owner, chunk), 0, -1] for chunk in chunks]))
        commands: list[list[Argument]] = [["MULTI"]]
        is_removal: list[bool] = []
        for chunk, reply in zip(chunks, found, strict=True):
            names = _members(reply)
            for start in range(0, len(names), _BATCH):
                batch = names[start : start + _BATCH]
                commands += [["UNLINK", *batch], ["ZREM", self._of_chunk(owner, chunk), *batch]]
                is_removal += [True, False]
            commands.append(["SREM", self._of_owner(owner), chunk])
            is_removal.append(False)
        *_, replies = _checked(connection.pipeline([*commands, ["EXEC"]]))
        assert isinstance(replies, list)
        counts = _checked(replies)
        return sum(one for one, counts_it in zip(counts, is_removal, strict=True) if counts_it and isinstance(one, int))

    def maintain(self) -> None:
        """Do nothing: the server evicts."""

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _name(self, key: NodeKey) -> str:
        return f"{self._model}:{key.hex()}"

    def _of_chunk(self, owner: OwnerTag, chunk: str) -> str:
        return f"{self._root}:seen:{owner.hex()}:{chunk}"

    def _of_owner(self, owner: OwnerTag) -> str:
        return f"{self._root}:owner:{owner.hex()}"

    @contextmanager
    def _connection(self) -> Iterator[RespConnection]:
        """A connection for one call. It is kept for the next one, unless the call fails."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)


def _checked(replies: Sequence[Reply]) -> Sequence[Reply]:
    """Return replies none of which is an error. Raises TierFullError, OSError."""
    errors = [str(reply) for reply in replies if isinstance(reply, ReplyError)]
    if not errors:
        return replies
    if any(error.startswith("OOM") for error in errors):
        raise TierFullError("the server's memory is full; let it evict (maxmemory-policy volatile-ttl)")
    raise OSError(f"the server replies: {errors[0]}")


def _members(reply: Reply) -> list[str]:
    """Return the members of a set; those that are no text are left out."""
    members = reply if isinstance(reply, list) else []
    return [member.decode("ascii", "ignore") for member in members if isinstance(member, bytearray)]
