"""A real server that is killed, full, slow or something else entirely: misses, never errors."""

import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from stillroom.config.tier_address import parse_tier_address
from stillroom.core.ids import ChunkId
from stillroom.core.kv import NO_TENANT
from stillroom.kvstore.shared.resp import ReplyError, RespConnection
from tests.fakes import ManualClock
from tests.kvstore.nodes import key
from tests.kvstore.shared.redis_server import free_port, needs_server, redis_server
from tests.kvstore.shared.tier_fixture import opened
from tests.server.fakes import until

pytestmark = needs_server


def test_server_that_is_killed_is_a_miss_and_comes_back_empty(tmp_path: Path) -> None:
    clock = ManualClock()
    with redis_server(tmp_path) as server, opened(server.url, clock) as fixture:
        fixture.put(1, 10)
        fixture.tier.forget(NO_TENANT, [ChunkId(77)])
        assert fixture.tier.settle()
        server.kill()
        for _ in range(3):
            fixture.get(1)
        assert not fixture.tier.is_usable and fixture.tier.state.num_opened == 1
        assert fixture.count([(1, 10)]) is None and not fixture.put(2, 10), "an open breaker asks nothing"
        fixture.tier.forget(NO_TENANT, [ChunkId(10)])
        with redis_server(tmp_path, port=server.port):
            clock.advance(60.0)
            until(lambda: fixture.tier.is_usable and fixture.tier.state.num_to_forget == 0)
            assert fixture.count([(1, 10)]) == 0
            assert fixture.put(1, 10) and fixture.get(1) is not None


def test_server_that_stops_answering_opens_the_breaker(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url, kv_tier_timeout_s=1.0) as fixture:
        fixture.put(1, 10)
        server.stop_answering()
        lookups = [fixture.tier.look_up(NO_TENANT, [(key(1), ChunkId(10))]) for _ in range(3)]
        assert any(lookup is not None and lookup.num_found is None for lookup in lookups), "the caller does not wait"
        until(lambda: not fixture.tier.is_usable)
        server.answer_again()


@pytest.mark.parametrize("policy", ["noeviction", "volatile-ttl"])
def test_full_server_refuses_or_evicts_and_is_read_on(tmp_path: Path, policy: str) -> None:
    size = 256 * 1024
    options = ("--maxmemory", "5mb", "--maxmemory-policy", policy)
    with redis_server(tmp_path, *options) as server, opened(server.url) as fixture:
        for n in range(30):
            fixture.put(n, n, size=size)
        stats = fixture.tier.state.stats
        assert fixture.tier.is_usable and stats.num_written > 3
        if policy == "noeviction":
            assert stats.num_refused > 10 and fixture.get(0, size) is not None
        else:
            assert stats.num_refused == 0 and fixture.get(29, size) is not None


def test_records_expire(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url, kv_tier_ttl_s=300.0) as fixture:
        fixture.put(1, 10)
        (record,) = server.names("*:kv:*")
        (of_chunk,) = server.names("*:seen:*")
        times = [server.call("TTL", name) for name in (record, of_chunk)]
        assert isinstance(times[0], int) and isinstance(times[1], int)
        assert 290 <= times[0] <= 300 and 590 <= times[1] <= 600


def test_password_database_and_prefix(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "sesame") as server:
        url = f"redis://:sesame@127.0.0.1:{server.port}/3?prefix=team-a"
        with opened(url) as fixture:
            assert fixture.put(1, 10) and fixture.get(1) is not None
        connection = RespConnection(parse_tier_address("tier", url), 5.0)
        names = connection.call("KEYS", "*")
        connection.close()
        assert isinstance(names, list) and all(bytes(name).startswith(b"team-a:v") for name in names)
        with opened(f"redis://:wrong@127.0.0.1:{server.port}") as refused:
            assert not refused.tier.is_usable and refused.count([(1, 10)]) is None


def test_replies_of_all_kinds_are_read(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        connection = RespConnection(server.address, 5.0)
        large = bytes(range(256)) * 2000
        replies = connection.pipeline(
            [["SET", "a", large], ["GET", "a"], ["GET", "none"], ["INCR", "n"], ["LPUSH", "n", "x"], ["SADD", "s", "x"]]
        )
        assert replies[:4] == ["OK", large, None, 1] and isinstance(replies[4], ReplyError)
        assert connection.pipeline([["MULTI"], ["SMEMBERS", "s"], ["GET", "a"], ["EXEC"]])[-1] == [[b"x"], large]
        with pytest.raises(OSError, match="at most 10"):
            connection.call("GET", "a", max_bytes=10)
        connection.close()


def test_something_else_that_answers_is_no_tier() -> None:
    """A web server, garbage, or a connection that is closed at once."""
    garbage = (b"\0" * 100_000, b"$-7x\r\n", b"*1\r\n" * 5, b"")
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", *garbage):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve(listener: socket.socket = listener, answer: bytes = answer) -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(OSError):
                port = listener.getsockname()[1]
                RespConnection(parse_tier_address("tier", f"valkey://127.0.0.1:{port}"), 2.0)
            thread.join()


def test_entries_of_expired_records_are_dropped(tmp_path: Path) -> None:
    clock = ManualClock()
    with redis_server(tmp_path) as server, opened(server.url, clock, kv_tier_ttl_s=300.0) as fixture:
        fixture.put(1, 10)
        clock.advance(700.0)
        fixture.put(2, 10)
        (of_chunk,) = server.names("*:seen:*")
        assert server.call("ZCARD", of_chunk) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl on the PATH")
def test_tls_is_used_and_its_certificate_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key_file, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=tier -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*made.split(), "-keyout", key_file, "-out", certificate], check=True, capture_output=True)
    port = free_port()
    options = f"--tls-port {port} --tls-cert-file {certificate} --tls-key-file {key_file} --tls-auth-clients no"
    with redis_server(tmp_path, *options.split(), "--tls-ca-cert-file", str(certificate)):
        with opened(f"rediss://127.0.0.1:{port}?ca={certificate}") as fixture:
            assert fixture.put(1, 10) and fixture.get(1) is not None
        with opened(f"rediss://127.0.0.1:{port}") as distrusting:
            assert not distrusting.tier.is_usable
        with opened(f"rediss://127.0.0.1:{port}?ca={tmp_path}/none.pem"):
            assert f"ca={tmp_path}/none.pem cannot be used: No such file or directory" in caplog.text
