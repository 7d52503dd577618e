"""Fuzzes the HTTP layer with atheris. Not part of `make test`.

    pip install atheris                 # for the Python versions it has
    python -m tests.fuzz.http_atheris FOLDER -max_total_time=300

The first byte of an input chooses the route, the rest is its body or the name in its path. Every answer must be a
documented one: no 5xx, and errors of OpenAI's shape. An input with another answer is written to the working folder as
`crash-...`; add it as an example to tests/server/test_fuzz.py.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "keys"}], "stop": ["x"], "n": 2, "seed": 1},
    "/v1/completions": {"prompt": "keys", "logprobs": 1, "echo": True, "stream": True},
    "/v1/embeddings": {"input": ["keys"], "encoding_format": "base64"},
    "/v1/search": {"query": "keys", "top_k": 3, "mode": "hybrid", "where": "year >= 2020 and not team in (a, b)"},
}
ROUTES = (*BODIES, "/v1/documents", "/v1/documents/{name}", "/v1/requests/{name}", "/")
_UPLOAD = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a/b.md"\r\n\r\n# Keys\r\n--b--\r\n'


def main() -> None:
    """Fuzz until libFuzzer stops."""
    import atheris

    with atheris.instrument_imports(include=["stillroom.server", "stillroom.retrieval.filters", "multipart"]):
        from stillroom.server.app import create_app
        from tests.server.fakes import FakeStillroom, as_stillroom

    folder, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    seeds = [*(json.dumps(body).encode() for body in BODIES.values()), _UPLOAD, b"a%2fb.md", b"req-1", b""]
    for number, seed in enumerate(seeds):
        (Path(folder) / f"seed-{number}").write_bytes(bytes([number]) + seed)
    app, loop = create_app(as_stillroom(FakeStillroom())), asyncio.new_event_loop()

    def run(data: bytes) -> None:
        if data:
            loop.run_until_complete(_check(app, ROUTES[data[0] % len(ROUTES)], data[1:]))

    atheris.Setup([sys.argv[0], folder, *rest], run)
    atheris.Fuzz()


async def _check(app: Any, route: str, body: bytes) -> None:
    """Raise AssertionError if the answer is not a documented one."""
    if "{name}" in route:
        method, body, name = ("DELETE" if "documents" in route else "GET"), b"", body
        raw_path = route.replace("{name}", quote_from_bytes(name, safe=b"%")).encode()
        path = route.replace("{name}", name.decode("utf-8", "replace"))
    else:
        method, path, raw_path = "GET" if route == "/" else "POST", route, route.encode()
    kind = b"multipart/form-data; boundary=b" if route == "/v1/documents" else b"application/json"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": raw_path,
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", kind)],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8321),
        "state": {},
    }
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    said: list[dict[str, Any]] = []
    is_over = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    await app(scope, receive, send)
    is_over.set()
    status, reply = said[0]["status"], b"".join(message.get("body", b"") for message in said[1:])
    assert 200 <= status < 500, (status, reply)
    if status >= 400 and path.startswith("/v1"):
        error = json.loads(reply)["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}, reply


if __name__ == "__main__":
    main()
