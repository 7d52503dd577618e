"""Runs a front and an engine under a Ray of its own; prints JSON lines. Arguments: KB, ports of list and front."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from stillroom.supervision.ray_serve import app
from stillroom.supervision.served_process import Options

QUESTION = {
    "model": "bundled:microworld",
    "messages": [{"role": "user", "content": "Which ship did Remun Wurker buy?"}],
}
SECONDS = 400.0
"""For each step: a first engine compiles its kernels."""


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def wait_for(url: str, is_wanted: Any, body: Any = None) -> httpx.Response:
    """Ask again and again until the reply is as wanted."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            reply = httpx.get(url) if body is None else httpx.post(url, json=body, timeout=SECONDS)
            if is_wanted(reply):
                return reply
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url} did not reply as wanted")


def child_processes(name: str) -> list[int]:
    """Return the processes of `stillroom NAME` below Ray's workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"stillroom.cli.child" in words and name.encode() in words and sys.argv[1].encode() in words:
            found.append(int(path.parent.name))
    return found


def main() -> None:
    kb, port, front_port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ray.init(num_cpus=4, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    url = f"http://127.0.0.1:{port}/"
    options = Options(model="bundled:microworld", kb=kb, engines=1, cpus=1.0, front_port=front_port, list_url=url)
    serve.run(app(options), name="stillroom")
    front = f"http://127.0.0.1:{front_port}"

    def one_engine(reply: httpx.Response, but: str = "") -> bool:
        return reply.status_code == 200 and len(reply.text.split()) == 1 and reply.text.strip() != but

    first = wait_for(url, one_engine).text.strip()
    say(engine=first)
    wait_for(f"{front}/readyz", lambda reply: reply.status_code == 200)
    answer = wait_for(f"{front}/v1/chat/completions", lambda reply: reply.status_code == 200, QUESTION).json()
    say(answer=answer["choices"][0]["message"]["content"])

    (killed,) = child_processes("engine")
    os.kill(killed, signal.SIGKILL)
    say(engine=wait_for(url, lambda reply: one_engine(reply, first)).text.strip())
    again = wait_for(f"{front}/v1/chat/completions", lambda reply: reply.status_code == 200, QUESTION).json()
    say(answer=again["choices"][0]["message"]["content"])

    left = [*child_processes("engine"), *child_processes("serve")]
    serve.shutdown()
    ray.shutdown()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < end:
        time.sleep(0.1)
    say(num_processes=len(left), num_left=sum(Path(f"/proc/{pid}").exists() for pid in left))


if __name__ == "__main__":
    main()
