"""A real engine for fronts, on a small random model, in a thread of the test; and a client that reads its streams."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx

from stillroom.backends.local import LocalBackend
from stillroom.cluster.wire import AnswerRequest, Failure, FirstToken, WireSample, events_from_json
from stillroom.cluster.wire_state import EngineInfo, EngineState
from stillroom.config.settings import ClusterConfig, PrepareConfig, ReuseConfig, RuntimeConfig, StillroomConfig
from stillroom.core.batch import TokenLogprobs
from stillroom.core.clock import SystemClock
from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentKind
from stillroom.core.request import FinishReason, SamplingParams
from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.tenants import Tenants
from stillroom.server.engine.engine_app import create_engine_app
from stillroom.server.run import HttpServer
from tests.fakes import byte_tokenizer, random_checkpoint

EOS = 1


def small_model(folder: Path) -> Path:
    """Save a random model of two layers with a tokenizer of bytes."""
    random_checkpoint(folder, "Llama", num_hidden_layers=2, eos_token_id=EOS, max_position_embeddings=4096)
    byte_tokenizer().save_pretrained(folder)
    return folder


def settings_for(model: Path, *, mode: Any = "exact", secret: str = "", **runtime: Any) -> StillroomConfig:
    return StillroomConfig(
        runtime=RuntimeConfig(
            model=str(model), **{"dtype": "float32", "kv_bytes": 2**23, "num_threads": 1, "max_num_seqs": 8, **runtime}
        ),
        reuse=ReuseConfig(mode=mode, load="always", disk_writers=4),
        prepare=PrepareConfig(when_idle="off"),
        cluster=ClusterConfig(secret=secret),
    )


@dataclass
class Served:
    """A running engine, with its parts."""

    url: str
    tenants: Tenants
    backend: LocalBackend
    server: HttpServer

    @property
    def num_requests(self) -> int:
        return self.backend.engine.num_running + self.backend.engine.num_waiting

    def client(self, **options: Any) -> "EngineClient":
        return EngineClient(httpx.Client(base_url=self.url, timeout=60, **options))


@contextmanager
def engine_serving(kb: Path, config: StillroomConfig, *, tenants_folder: Path | None = None) -> Iterator[Served]:
    """Yield an engine on a knowledge base, which is created first if need be."""
    Stillroom.open(kb, config=config).close()
    server, ready = HttpServer("127.0.0.1", 0), Event()
    with Stillroom.open(kb, config=config, create=False) as stillroom:
        tenants = Tenants(stillroom, tenants_folder, creates=False)
        backend = stillroom.load_backend()
        assert isinstance(backend, LocalBackend)
        app = create_engine_app(tenants, backend, "the-run", SystemClock())
        thread = Thread(target=server.run, args=(lambda _: app, ready.set, config.server), name="test-engine")
        thread.start()
        try:
            assert ready.wait(20)
            yield Served(server.url, tenants, backend, server)
        finally:
            server.stop()
            server.stop()  # without the grace period
            thread.join(30)
            tenants.close()
        assert not thread.is_alive()


def sample(name: str = "a", generated: Sequence[int] = (), **sampling: Any) -> WireSample:
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return WireSample(request_id=RequestId(name), sampling=params, generated=tuple(generated))


def asking(*samples: WireSample, chunks: Sequence[Sequence[int]] = (), seed: int = 5, **fields: Any) -> AnswerRequest:
    """Return a request whose prompt has these chunks, which no knowledge base has, and a question of this seed."""
    found = [Segment(SegmentKind.SYSTEM, (3, 4, 5, 6)), *(Segment(SegmentKind.CHUNK, tuple(ids)) for ids in chunks)]
    found.append(Segment(SegmentKind.QUESTION, tuple(7 + (seed * 13 + index * 5) % 280 for index in range(9))))
    return AnswerRequest(segments=tuple(found), samples=samples or (sample(),), **fields)


@dataclass
class Answered:
    """What an engine sent for one sample."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first: FirstToken | None = None
    ends: list[FinishReason] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def result(self) -> tuple[list[int], FinishReason]:
        [end] = self.ends
        return self.tokens, end


class EngineClient:
    """Sends requests and checks what every stream promises."""

    def __init__(self, client: httpx.Client) -> None:
        self.http = client

    def ask(self, request: AnswerRequest) -> list[Answered]:
        """Return what was sent for each sample; every one has exactly one end."""
        with self.http.stream("POST", "/engine/v1/answers", json=request.to_json()) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        found = collected(lines, len(request.samples))
        assert all(len(one.ends) == 1 for one in found)
        return found

    def refusal(self, body: Any) -> tuple[int, str, str]:
        """Return status, code and message of a refused request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self.http.post("/engine/v1/answers", content=content)
        error = response.json()["error"]
        return response.status_code, error["code"], error["message"]

    def info(self) -> EngineInfo:
        return EngineInfo.from_json(self.http.get("/engine/v1/info").raise_for_status().json())

    def state(self, run: str = "", since: int = 0) -> EngineState:
        asked = {"run": run, "since": str(since)}
        return EngineState.from_json(self.http.get("/engine/v1/state", params=asked).raise_for_status().json())


def collected(lines: Sequence[str], num_samples: int) -> list[Answered]:
    found = [Answered() for _ in range(num_samples)]
    for line in lines:
        for event in events_from_json(json.loads(line)):
            one = found[event.sample]
            assert not one.ends, "an event behind the end"
            assert event.first is None or one.first is None, "the times of the first token twice"
            one.first = one.first or event.first
            assert one.first is not None or not event.tokens, "a token without the times of the first one"
            one.tokens += event.tokens
            one.logprobs += event.logprobs
            one.ends += [] if event.end is None else [event.end]
            one.failure = event.failure
    return found


def resumed(request: AnswerRequest, answers: Sequence[Answered], cuts: Sequence[int]) -> AnswerRequest:
    """Return the request as a front would send it to another engine after so many tokens of each sample."""
    samples = [
        replace(one, generated=tuple(answer.tokens[:cut]))
        for one, answer, cut in zip(request.samples, answers, cuts, strict=True)
    ]
    return replace(request, samples=tuple(samples))
