"""Fuzzing of the server: any input gets a documented reply, never a 5xx, and the server keeps running.

Input is raw bytes over a socket, requests made of plausible parts, and nearly valid JSON. STILLROOM_FUZZ_EXAMPLES sets
the number of examples.
"""

import json
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stillroom.config.settings import ServerConfig, StillroomConfig
from tests.server.fakes import NUM_BLOCKS, FakeStillroom, as_stillroom, until
from tests.server.harness import serving

FAST = settings(
    max_examples=int(os.environ.get("STILLROOM_FUZZ_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ROUTES = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/search",
    "/v1/documents",
    "/v1/models",
)


@pytest.fixture(scope="module")
def stillroom() -> FakeStillroom:
    server = ServerConfig(head_timeout_s=2.0, body_timeout_s=2.0, requests_per_minute=0)
    return FakeStillroom(config=StillroomConfig(server=server))


@pytest.fixture(scope="module")
def url(stillroom: FakeStillroom) -> Iterator[str]:
    with serving(as_stillroom(stillroom)) as address:
        yield address
        until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)


def exchange(url: str, sent: bytes, *, is_half_closed: bool = True) -> bytes:
    """Send bytes and return the reply until the server closes."""
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), address.port), timeout=10) as connection:
        found = b""
        try:
            connection.sendall(sent)
            if is_half_closed:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                found += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
        return found


WORDS = """
GET 
POST 
DELETE 
PRI * HTTP/2.0
/v1/chat/completions
/v1/search
/
*
//
/../
/%2e%2e/
/%00
/v1/documents/%2e%2e%2fetc%2fpasswd
?
#
 HTTP/1.1
 HTTP/1.0
host: localhost
content-length: 
5
-1
99999999999999999999
transfer-encoding: chunked
transfer-encoding: gzip, chunked
content-type: application/json
expect: 100-continue
connection: close
connection: upgrade
upgrade: websocket
upgrade: h2c
authorization: Bearer 
{"query": "x"}
: 
x
origin: null
"""
ENDS = [b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"\x00", b"\xff", b"\t"]
TOKENS = st.sampled_from([word.encode() for word in WORDS.strip("\n").split("\n")] + ENDS)
STREAMS = st.lists(TOKENS | st.binary(max_size=8), max_size=24).map(b"".join)


@FAST
@given(STREAMS)
@example(b"POST /v1/search HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\nhello")
@example(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
@example(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50)
@example(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: http://[\r\nconnection: close\r\n\r\n")
def test_any_bytes_get_a_documented_reply(url: str, sent: bytes) -> None:
    reply = exchange(url, sent)
    for status in (line[9:12] for line in reply.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")):
        assert status[:1] in (b"1", b"2", b"3", b"4"), (sent, reply[:300])
    assert httpx.get(f"{url}/healthz").status_code == 200


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["user", "json_schema"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = """
messages prompt input query model stream n seed stop temperature top_p top_k max_tokens logprobs logit_bias
response_format stream_options stillroom deadline_seconds priority encoding_format dimensions mode where
documents top_n return_documents rank_fields
"""
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "keys"}]},
    "/v1/completions": {"prompt": "keys"},
    "/v1/responses": {"input": "keys"},
    "/v1/embeddings": {"input": "keys"},
    "/tokenize": {"prompt": "keys"},
    "/detokenize": {"tokens": [75]},
    "/v1/search": {"query": "keys"},
    "/v1/rerank": {"query": "keys", "documents": ["keys", {"text": "cats"}]},
}


@FAST
@given(st.sampled_from(sorted(GOOD)), st.dictionaries(st.sampled_from(FIELDS.split()), JSON, max_size=3))
def test_nearly_valid_json_gets_a_documented_reply(url: str, path: str, fields: dict[str, Any]) -> None:
    content = json.dumps(GOOD[path] | fields)
    response = httpx.post(f"{url}{path}", content=content, headers={"content-type": "application/json"}, timeout=20)
    assert response.status_code < 500, (content, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}


@FAST
@given(st.sampled_from(ROUTES), st.binary(max_size=200))
@example("/v1/search", b'{"query": "\\ud800"}')
@example("/v1/search", b'{"query": "\xff"}')
@example("/v1/search", b"[" * 100_000)
@example("/v1/search", b'{"query":' * 50_000)
@example("/v1/search", b'{"top_k": ' + b"9" * 5000 + b"}")
@example("/v1/search", b'{"query": "x", "top_k": 1e999}')
@example("/v1/search", b'{"query": "x", "query": "y"}')
@example("/v1/search", b"\xef\xbb\xbf{}")
def test_any_body_gets_a_documented_reply(url: str, path: str, content: bytes) -> None:
    response = httpx.post(f"{url}{path}", content=content, headers={"content-type": "application/json"}, timeout=20)
    assert 400 <= response.status_code < 500, (content, response.text)


@FAST
@given(
    st.sampled_from(["undefined", "unicode_escape", "utf-16", "punycode", "nosuch", "utf-8"]),
    st.binary(max_size=30).filter(lambda said: b"--x" not in said),
)
@example("undefined", b"{}")
@example("unicode_escape", b"\\\x00")
@example("unicode_escape", b'{"a": "\\ud800"}')
def test_any_form_charset_gets_a_documented_reply(url: str, charset: str, metadata: bytes) -> None:
    part = b'--x\r\ncontent-disposition: form-data; name="'
    content = part + b'file"; filename="\\ud800.md"\r\n\r\n\r\n' + part + b'metadata"\r\n\r\n' + metadata + b"\r\n--x--"
    headers = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
    response = httpx.post(f"{url}/v1/documents", content=content, headers=headers, timeout=20)
    assert 400 <= response.status_code < 500, response.text


@FAST
@given(
    st.text(max_size=30)
    | st.sampled_from(["../../etc/passwd", "..", "a/../../b", "%2e%2e", "\x00", "kb/manifest.json"])
)
def test_any_name_in_a_path_reaches_no_other_file(url: str, name: str) -> None:
    path = quote(name, safe="", errors="surrogatepass")
    sent = f"DELETE /v1/documents/{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    reply = exchange(url, sent.encode(), is_half_closed=False)
    assert reply[9:12] in (b"400", b"404", b"405"), reply
