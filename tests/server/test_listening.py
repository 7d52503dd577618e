"""The socket on which a server listens."""

import asyncio
import socket

from stillroom.server.run import _bind


def test_every_event_of_a_stream_is_sent_at_once() -> None:
    """Otherwise a client that keeps its connection waits for its own delayed acknowledgement, 40 ms."""

    async def is_undelayed() -> bool:
        found = asyncio.get_running_loop().create_future()

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(answer, sock=_bind("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.close()
            return bool(await found)

    assert asyncio.run(is_undelayed())
