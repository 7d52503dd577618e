"""The HTTP application of an engine: answers for fronts, its information and state, health and metrics.

It searches nothing: no embedder and no index is loaded. Reference: docs/wire.md
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from stillroom import __version__
from stillroom.cluster.document_share import DocumentShare
from stillroom.cluster.prediction import EngineCosts
from stillroom.cluster.wire import MAX_BODY_BYTES, PREFIX, AnswerRequest
from stillroom.cluster.wire_reading import dump, parse
from stillroom.cluster.wire_state import EngineInfo
from stillroom.core.clock import Clock
from stillroom.engine.engine_reports import EngineReports
from stillroom.errors import EngineClosedError, WireError
from stillroom.models.numerics import kv_fingerprint
from stillroom.server import error_replies
from stillroom.server.auth.tenants import DEFAULT_TENANT, Tenants
from stillroom.server.engine.answer_requests import PlannedSample, backend_of, plan_samples, start
from stillroom.server.engine.engine_guard import EngineGuard
from stillroom.server.engine.event_lines import EventBuffer, EventLines
from stillroom.server.error_replies import Refused
from stillroom.server.limits.admission import AdmissionControl
from stillroom.server.limits.draining import Draining
from stillroom.server.limits.workers import Workers
from stillroom.server.middleware import RequestObserver
from stillroom.server.privacy import served_name
from stillroom.server.routes import health
from stillroom.server.routes.document_routes import begin_preparing
from stillroom.server.routes.health import Readiness
from stillroom.telemetry.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from stillroom.backends.local import LocalBackend
    from stillroom.rag.stillroom import Stillroom

_READING_SECONDS = 0.25
"""Longest time that a report waits for the engine's thread."""
_LARGE_BODY = 128 * 1024
"""Bodies of at least this many bytes are read in a thread, so that the event loop is not blocked."""


def create_engine_app(tenants: Tenants, backend: "LocalBackend", run: str, clock: Clock) -> FastAPI:
    """Build the application. The caller closes `tenants` and their `Stillroom`s after the server has stopped.

    Args:
        tenants: opened without embedders; `tenants.default` holds the settings.
        backend: of the default tenant.
        run: names this start of the engine.
    """
    stillroom = tenants.default
    config, runtime = stillroom.config, stillroom.config.runtime
    app = FastAPI(title="Stillroom engine", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    error_replies.install(app)
    app.state.workers = workers = Workers()
    admission = AdmissionControl(runtime.max_num_seqs, runtime.max_waiting, config.server.max_wait_s, clock)
    app.state.draining = Draining(admission, workers, stillroom.stop_generating, config.server.grace_s, clock)
    routes = _EngineRoutes(tenants, backend, EngineReports(backend.engine, run), admission, clock)
    app.state.begin = routes.begin
    for method, path, call in (
        ("GET", f"{PREFIX}/info", routes.info),
        ("POST", f"{PREFIX}/answers", routes.answers),
        ("GET", f"{PREFIX}/state", routes.state),
        ("POST", f"{PREFIX}/drain", routes.drain),
        ("GET", "/healthz", routes.healthz),
        ("GET", "/metrics", routes.metrics),
    ):
        app.add_api_route(path, call, methods=[method], response_model=None)
    app.include_router(health.router(_readiness(tenants, admission)))
    app.add_middleware(EngineGuard, config=config.cluster)
    app.add_middleware(RequestObserver, metrics=stillroom.metrics, clock=clock, routes=list(app.routes))
    return app


def _readiness(tenants: Tenants, admission: AdmissionControl) -> Readiness:
    def problem_of_model() -> str | None:
        default = tenants.default
        return None if default.is_ready or not default.is_there else "the model's engine failed"

    def problem_of_documents() -> str | None:
        return None if tenants.default.is_there else "the knowledge base was removed or replaced; restart the engine"

    readiness = Readiness()
    readiness.add("model", problem_of_model)
    readiness.add("knowledge_base", problem_of_documents)
    readiness.add("device", lambda: tenants.default.device_problem)
    readiness.add("open", lambda: "the engine is draining" if admission.is_closing else None)
    return readiness


class _EngineRoutes:
    """Functions of the routes."""

    def __init__(
        self,
        tenants: Tenants,
        backend: "LocalBackend",
        reports: EngineReports,
        admission: AdmissionControl,
        clock: Clock,
    ) -> None:
        """
        Args:
            admission: counts the requests in flight, and says whether the engine drains.
        """
        self._tenants = tenants
        self._backend = backend
        self._reports = reports
        self._admission = admission
        self._clock = clock
        self._vocabulary = backend.tokenizer.vocabulary_digest
        self._share = DocumentShare(waits=True)

    def begin(self) -> None:
        """Prepare this engine's share of the documents while no question comes, if the settings say so."""

        def opened(tenant: str, stillroom: "Stillroom") -> None:
            stillroom.preparing.share = self._share
            begin_preparing(stillroom)

        self._tenants.on_open = opened
        opened(DEFAULT_TENANT, self._tenants.default)

    async def info(self) -> Response:
        """Return what the engine is."""
        return _json(self._info().to_json())

    async def answers(self, request: Request) -> Response:
        """Continue a prompt, once for each sample; the reply is a stream of events."""
        received_at = self._clock.monotonic()
        self._admission.num_in_flight += 1
        is_streaming = False
        try:
            self._check_open()
            asked = await _read(request)
            backend = await self._backend_of(asked)
            planned = await _plan(asked, backend, received_at)
            self._check_open()
            reply = self._started(backend, planned, received_at)
            is_streaming = True
            return reply
        except WireError as error:
            raise Refused(400, "invalid_value", str(error)) from error
        finally:
            if not is_streaming:
                self._admission.num_in_flight -= 1

    async def _backend_of(self, asked: AnswerRequest) -> "LocalBackend":
        if asked.tenant is None:
            return backend_of(asked, self._tenants)  # is open
        return await asyncio.to_thread(backend_of, asked, self._tenants)

    def _started(self, backend: "LocalBackend", planned: list[PlannedSample], received_at: float) -> EventLines:
        buffer = EventBuffer(len(planned), received_at, lambda: self._backend.engine.is_alive)
        request_ids = start(backend, planned, [buffer.listener(index) for index in range(len(planned))])
        for index, one in enumerate(planned):
            if one.end is not None:
                buffer.end(index, one.end)
        self._reports.refresh()

        def end() -> None:
            self._admission.num_in_flight -= 1
            for request_id in request_ids:
                backend.cancel(request_id)

        return EventLines(buffer.lines(), end)

    def _check_open(self) -> None:
        """Raises EngineClosedError: the engine drains, or has failed."""
        self._admission.check_open()
        if not self._backend.engine.is_alive:
            raise EngineClosedError("the engine has failed; its log says why. Restart it")

    async def state(self, run: str = "", since: str = "0", engines: str = "", me: str = "") -> Response:
        """Return what the engine holds and does, since a front asked last."""
        if me and self._share.tell(engines.split(","), me, self._clock.monotonic()):
            self._tenants.default.preparing.wake()
        if not since.isdecimal() or len(since) > 18:
            raise Refused(400, "invalid_value", f"since={since[:40]!r}; it must be a whole number", "since")
        await asyncio.wait({asyncio.wrap_future(self._reports.refresh())}, timeout=_READING_SECONDS)
        return await asyncio.to_thread(self._state, run, int(since))

    def _state(self, run: str, since: int) -> Response:
        admission = self._admission
        state = self._reports.state(run, since, admission.num_in_flight, is_draining=admission.is_closing)
        return _json(state.to_json())

    async def drain(self) -> Response:
        """Take no more requests; those that run are completed. Only a restart ends it."""
        self._admission.is_closing = True
        return _json({"draining": True, "outstanding": self._admission.num_in_flight}, 202)

    async def healthz(self) -> Response:
        """Return that the process is alive."""
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Return all metrics in Prometheus' text format."""
        content = await asyncio.to_thread(self._tenants.default.metrics.render)
        return Response(content, headers={"Content-Type": CONTENT_TYPE})

    def _info(self) -> EngineInfo:
        backend, stillroom = self._backend, self._tenants.default
        spec, kv = backend.model.decoder.spec, backend.cache.manager
        reuse = kv.reuse
        fingerprint = kv_fingerprint(backend.model.fingerprint) if reuse is None else reuse.keys.fingerprint
        return EngineInfo(
            run=self._reports.run,
            version=__version__,
            model=served_name(backend.name),
            fingerprint=fingerprint,
            vocabulary=self._vocabulary,
            knowledge_base=stillroom.identity,
            vocab_size=spec.vocab_size,
            max_positions=backend.max_model_len,
            num_blocks=kv.pool.num_blocks,
            block_size=kv.pool.block_size,
            stop_token_ids=backend.model.stop_token_ids,
            max_num_seqs=stillroom.config.runtime.max_num_seqs,
            tail_tokens=0 if reuse is None else reuse.keys.tail_tokens,
            places_computed=stillroom.config.reuse.mode == "anywhere",
            costs=self._costs(),
        )

    def _costs(self) -> EngineCosts | None:
        """Return the costs as the engine decides by them now; None without kept KV."""
        reuse = self._backend.cache.manager.reuse
        if reuse is None:
            return None
        costs = EngineCosts(profile=reuse.tree.profile, bytes_per_token=reuse.tree.options.bytes_per_token)
        if reuse.anywhere is None:
            return costs
        share = 0.0 if reuse.anywhere.only_prepared else reuse.anywhere.recompute_ratio
        return replace(costs, recompute_share=share, has_query_pass=reuse.anywhere.looks_from_question)


async def _read(request: Request) -> AnswerRequest:
    """Read the body. Raises Refused: it is too large. Raises WireError: it is no request."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, "body_too_large", f"the request has more than {MAX_BODY_BYTES} bytes")
    if len(body) < _LARGE_BODY:
        return _parsed(bytes(body))
    return await asyncio.to_thread(_parsed, bytes(body))


def _parsed(body: bytes) -> AnswerRequest:
    return AnswerRequest.from_json(parse(body, "the request"))


async def _plan(asked: AnswerRequest, backend: "LocalBackend", received_at: float) -> list[PlannedSample]:
    if asked.grammar is None:
        return plan_samples(asked, backend, received_at)
    return await asyncio.to_thread(plan_samples, asked, backend, received_at)


def _json(content: object, status: int = 200) -> Response:
    return Response(dump(content), status, media_type="application/json")
