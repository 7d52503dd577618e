"""A server that loses its device: probes and callers are told, and serving resumes after recovery."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from stillroom.core.batch import Batch, StepResult
from stillroom.engine import recovery
from stillroom.rag.stillroom import Stillroom
from stillroom.runner.torch_runner import TorchRunner
from tests.server.fakes import until
from tests.server.harness import events, serving
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

pytestmark = pytest.mark.microworld

CHAT = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
ERROR = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported"


@dataclass
class Device:
    """Makes calls to the model's device fail."""

    monkeypatch: pytest.MonkeyPatch
    is_gone: bool = False
    num_steps: int = 0
    """Steps that succeed before the first failure."""

    def install(self) -> None:
        execute, recover = TorchRunner.execute, TorchRunner.recover

        def run(runner: TorchRunner, batch: Batch) -> StepResult:
            self._check()
            return execute(runner, batch)

        def try_to_recover(runner: TorchRunner) -> None:
            self._check()
            recover(runner)

        self.monkeypatch.setattr(TorchRunner, "execute", run)
        self.monkeypatch.setattr(TorchRunner, "recover", try_to_recover)

    def _check(self) -> None:
        self.num_steps -= self.is_gone
        if self.is_gone and self.num_steps < 0:
            raise getattr(torch, "AcceleratorError", RuntimeError)(ERROR)


@pytest.fixture(scope="module")
def stillroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder: Path = tmp_path_factory.mktemp("lost")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "FIRST_PAUSE", 0.005)
        patch.setattr(recovery, "LONGEST_PAUSE", 0.01)
        with Stillroom.open(folder / "kb") as stillroom:
            stillroom.add(write_knowledge(folder / "docs"))
            stillroom.warm_up()
            yield stillroom


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(monkeypatch)
    device.install()
    return device


def test_lost_device_makes_the_server_not_ready_until_recovery(stillroom: Stillroom, device: Device) -> None:
    with serving(stillroom) as url, httpx.Client(base_url=url, timeout=30) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert client.get("/readyz").json()["checks"]["device"] is True
        device.is_gone = True
        for _ in range(2):  # the running request, and one that arrives afterwards
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("device_lost", "service_unavailable_error")
            assert "unspecified launch failure" in error["message"] and "\n" not in error["message"]
        ready = client.get("/readyz")
        assert ready.status_code == 503 and ready.json()["checks"]["device"] is False
        assert any("unspecified launch failure" in reason for reason in ready.json()["reasons"])
        assert client.get("/healthz").status_code == 200 and client.get("/v1/models").status_code == 200
        assert 'stillroom_requests_total{outcome="failed"}' in client.get("/metrics").text
        assert "stillroom_device_losses_total 1.0" in client.get("/metrics").text

        device.is_gone = False
        until(lambda: client.get("/readyz").status_code == 200)
        answer = client.post("/v1/chat/completions", json=CHAT).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER


def test_stream_ends_with_device_lost_if_it_cannot_continue(stillroom: Stillroom, device: Device) -> None:
    prompt = {"prompt": "The mentor of", "max_tokens": 30, "min_tokens": 30, "stream": True}
    with serving(stillroom) as url, httpx.Client(base_url=url, timeout=30) as client:
        device.is_gone, device.num_steps = True, 3
        reply = client.post("/v1/completions", json=prompt)
        *pieces, last = events(reply)
        assert last["error"]["code"] == "device_lost" and "[DONE]" not in pieces
        device.is_gone = False
        until(lambda: client.get("/readyz").status_code == 200)
