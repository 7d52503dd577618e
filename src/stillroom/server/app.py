"""The HTTP application: OpenAI's routes, search, documents, health and metrics over one or more `Stillroom`s.

Nothing blocks the event loop: computation runs in threads, and answers are read with `async for`. Reference:
docs/http.md
"""

import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.middleware.cors import CORSMiddleware

from stillroom import __version__
from stillroom.core.clock import SystemClock
from stillroom.core.ids import public_id
from stillroom.errors import UsageError
from stillroom.models.bundled_models import reader_folder
from stillroom.rag.as_json import JsonObject, search_as_json
from stillroom.rag.hops import OnHop
from stillroom.server import error_replies
from stillroom.server.auth.cors import cors_options, origins_of
from stillroom.server.auth.guard import Guard, own_names
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import InactiveTenantCounts, Tenants, caller_of, stillroom_of
from stillroom.server.console import routes as console
from stillroom.server.limits.admission import AdmissionControl
from stillroom.server.limits.draining import Draining
from stillroom.server.limits.rates import Limits
from stillroom.server.limits.workers import Workers
from stillroom.server.middleware import RequestObserver
from stillroom.server.privacy import served_name
from stillroom.server.routes import chat, health, rerank
from stillroom.server.routes.answer_events import AnswerEvents, left, unless_left, whole_answers
from stillroom.server.routes.api_page import api_page_router
from stillroom.server.routes.chat import ask_options, read_question
from stillroom.server.routes.completions import Completions
from stillroom.server.routes.content_routes import ContentRoutes
from stillroom.server.routes.document_routes import DocumentRoutes
from stillroom.server.routes.health import Readiness
from stillroom.server.routes.hop_events import AskedQuestion, with_hops
from stillroom.server.routes.json_body import JsonRoute
from stillroom.server.routes.model_names import ALIAS, check_model
from stillroom.server.routes.responses import Responses
from stillroom.server.routes.token_routes import TokenRoutes
from stillroom.server.routes.tool_calls import has_tools, tool_chat_of
from stillroom.server.schemas import openapi
from stillroom.server.schemas.replies import (
    ChatCompletion,
    Completion,
    Health,
    Model,
    ModelList,
    RerankReply,
    SearchReply,
)
from stillroom.server.schemas.requests import ChatCompletionRequest, CompletionRequest, RerankRequest, SearchRequest
from stillroom.server.schemas.responses import ResponseReply, ResponsesRequest
from stillroom.telemetry.metrics import CONTENT_TYPE
from stillroom.telemetry.spans import Tracing

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom
    from stillroom.rag.stream import AsyncAnswerStream

logger = logging.getLogger(__name__)


def create_app(
    stillroom: "Stillroom",
    *,
    tenants: Tenants | None = None,
    keys: KeyRing | None = None,
    host: str = "127.0.0.1",
    tracing: Tracing | None = None,
) -> FastAPI:
    """Build the application. The caller closes `stillroom` and `tenants` after the server has stopped.

    Args:
        stillroom: of the default tenant.
        tenants: all tenants; None serves only the default one.
        keys: API keys; None asks for none.
        host: address that the server will listen on.
        tracing: exporter of traces; None writes none.
    """
    stillroom.hide_folders()
    for text in stillroom.warnings:
        logger.warning(text)
    app = FastAPI(title="Stillroom", version=__version__, docs_url=None, redoc_url=None)
    app.state.workers = workers = Workers()
    error_replies.install(app)
    openapi.install(app, asks_for_keys=keys is not None)
    app.state.tenants = tenants = tenants or Tenants(stillroom)
    config, clock = stillroom.config, SystemClock()
    hosts = own_names(host, config.server.allowed_hosts)
    runtime = config.runtime
    admission = AdmissionControl(runtime.max_num_seqs, runtime.max_waiting, config.server.max_wait_s, clock)
    app.state.admission = admission
    app.state.readiness = readiness = _readiness(tenants, admission)
    app.state.draining = Draining(admission, workers, stillroom.stop_generating, config.server.grace_s, clock)
    documents = DocumentRoutes(workers)
    app.state.begin = partial(documents.begin, tenants)
    routes = list(app.routes)
    for router in (
        _Api(workers).router(),
        TokenRoutes(workers).router(),
        console.router(),
        api_page_router(app.openapi, has_mcp=config.server.mcp),
        ContentRoutes(workers).router(),  # before the routes whose document's name may hold anything
        documents.router(),
        health.router(readiness),
    ):
        app.include_router(router)
        routes += router.routes
    if config.server.mcp:
        from stillroom.server.mcp import mcp_route

        routes.append(mcp_route())
        app.router.routes.append(routes[-1])
    app.add_middleware(Limits, config=config.server, admission=admission, metrics=stillroom.metrics, clock=clock)
    origins = origins_of(config.server.allowed_origins)
    app.add_middleware(Guard, tenants=tenants, keys=keys, hosts=hosts, origins=origins)
    if origins:  # outside of the guard, because a browser's preflight has no key
        app.add_middleware(CORSMiddleware, **cors_options(origins))
    app.add_middleware(RequestObserver, metrics=stillroom.metrics, clock=clock, routes=routes, tracing=tracing)
    stillroom.metrics.watch_corpora("tenants", InactiveTenantCounts(tenants))
    return app


def _readiness(tenants: Tenants, admission: AdmissionControl) -> Readiness:
    def problem_of_queue() -> str | None:
        problem = admission.problem()
        return None if problem is None else str(problem)

    def problem_of_model() -> str | None:
        default = tenants.default
        return None if default.is_ready or not default.is_there else "the model is not loaded, or its engine failed"

    def problem_of_documents() -> str | None:
        return None if tenants.default.is_there else "the knowledge base was removed or replaced; restart the server"

    readiness = Readiness()
    readiness.add("model", problem_of_model)
    readiness.add("knowledge_base", problem_of_documents)
    readiness.add("device", lambda: tenants.default.device_problem)
    readiness.add("queue", problem_of_queue)
    readiness.add("open", lambda: "the server is shutting down" if admission.is_closing else None)
    return readiness


class _Api:
    """Functions of the routes. Each gets the tenant's `Stillroom` from `stillroom_of`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._started_at = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)

        def add(method: str, path: str, tag: str, reply: type, call: Callable[..., Any]) -> None:
            leaves_out = reply in (Health, RerankReply)  # absent fields
            router.add_api_route(
                path, call, methods=[method], response_model=reply, tags=[tag], response_model_exclude_none=leaves_out
            )

        add("POST", "/v1/chat/completions", "answers", ChatCompletion, self.chat_completions)
        add("POST", "/v1/responses", "answers", ResponseReply, self.responses)
        add("POST", "/v1/completions", "answers", Completion, self.completions)
        add("POST", "/v1/search", "search", SearchReply, self.search)
        for path in rerank.PATHS:
            add("POST", path, "search", RerankReply, self.rerank)
        add("GET", "/v1/models", "operations", ModelList, self.models)
        add("GET", "/v1/models/{model:path}", "operations", Model, self.model)
        add("GET", "/healthz", "operations", Health, self.healthz)
        router.add_api_route("/healthz", self.healthz, methods=["HEAD"], include_in_schema=False)
        router.add_api_route(
            "/metrics", self.metrics, methods=["GET"], response_class=PlainTextResponse, tags=["operations"]
        )
        return router

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Answer the last user message from the documents; earlier messages are the conversation."""
        stillroom = stillroom_of(request)
        ask, model = await self._asking(stillroom, body, calls_tools=True), served_name(stillroom.model_name)
        if not body.stream:
            streams = await unless_left(ask(), request)
            if streams is None:
                return left()
            form = streams[0].call_format
            return await whole_answers(
                streams, request, lambda answers: chat.whole_completion(answers, model, body, form)
            )
        asked = await unless_left(AskedQuestion(ask).begin(), request)  # an error before it has its own status
        if asked is None:
            return left()
        link_to = chat.events_link_to(body, stillroom.config.server, str(request.base_url))
        answers = partial(chat.chat_events, model=model, body=body, events_link_to=link_to)
        return AnswerEvents([asked], with_hops(asked, partial(chat.hop_event, model=model, body=body), answers))

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer from the documents, in the form of OpenAI's Responses API. Nothing is stored."""
        stillroom = stillroom_of(request)
        asked = body.as_chat()
        read_question(asked.messages, "input")
        streams = await unless_left((await self._asking(stillroom, asked))(), request)
        if streams is None:
            return left()
        reply = Responses(streams[0], served_name(stillroom.model_name), body, asked, stillroom.config.generation)
        if body.stream:
            return AnswerEvents(streams, reply.events(), reply.error)
        return await whole_answers(streams, request, lambda answers: reply.whole(answers[0]))

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue prompts as given, without a search. The bundled reader, which reads no prompts, cannot."""
        stillroom = stillroom_of(request)
        check_model(body.model, [stillroom.model_name], _not_generating(stillroom))
        found = await Completions.begin(stillroom, body)
        if body.stream:
            return AnswerEvents(found.streams, found.events(includes_usage=body.includes_usage))
        return await whole_answers(found.streams, request, found.whole)

    async def models(self, request: Request) -> ModelList:
        """List the generator, the embedder, the reranker if there is one, and the generator's name without a search,
        unless it is a reader."""
        return ModelList(data=[self._describe(name) for name in _names(stillroom_of(request))])

    async def model(self, model: str, request: Request) -> Model:
        """Return one model by name."""
        stillroom = stillroom_of(request)
        check_model(model, _names(stillroom))
        return self._describe(stillroom.model_name if model == ALIAS else model)

    async def search(self, body: SearchRequest, request: Request) -> JsonObject:
        """Search for chunks without generating an answer."""
        stillroom = stillroom_of(request)
        if not body.query.strip():
            raise UsageError("the query is empty; send words or a question", param="query")
        started = time.perf_counter()
        options = {"mode": body.mode, "top_k": body.top_k, "where": body.where or ""}
        found = await self._workers.run(None, stillroom.search, body.query, **options)
        mode = body.mode or stillroom.config.search.mode
        return search_as_json(body.query, mode, found, time.perf_counter() - started, public_id)

    async def rerank(self, body: RerankRequest, request: Request) -> RerankReply:
        """Order texts by their relevance to a query. Needs a cross-encoder, set as `search.reranker`."""
        stillroom = stillroom_of(request)
        if stillroom.config.search.reranker:
            check_model(body.model, [stillroom.config.search.reranker])
        path = request.url.path
        return await self._workers.run(self._workers.embeddings, rerank.reranked, stillroom, body, path)

    async def healthz(self, request: Request) -> dict[str, Any]:
        """Return the status; operators also get the model, document count and free KV blocks."""
        if not caller_of(request).is_operator:
            return {"status": "ok"}  # the rest is for operators only
        stillroom = stillroom_of(request)
        num_documents = await self._workers.run(self._workers.probes, lambda: stillroom.num_documents)
        lists = stillroom.list_figures
        further: dict[str, Any] = {}
        if lists is not None:
            on_devices = {"device": lists.num_lists_on_devices} if lists.num_lists_on_devices else {}
            further["index_lists"] = {**on_devices, "host": lists.num_lists_in_ram, "total": lists.num_lists}
        if (state := stillroom.copy_state) is not None:
            further["database"] = {"answers": state.answers, "copy_age_s": round(state.age_s, 1)}
        return {
            "status": "ok",
            "model": served_name(stillroom.model_name),
            "documents": num_documents,
            "kv_blocks": {"free": stillroom.num_free_blocks, "total": stillroom.num_blocks},
            **further,
        }

    async def metrics(self, request: Request) -> Response:
        """Return all metrics in Prometheus' text format."""
        content = await self._workers.run(self._workers.probes, stillroom_of(request).metrics.render)
        return Response(content, headers={"Content-Type": CONTENT_TYPE})

    async def _asking(
        self, stillroom: "Stillroom", body: ChatCompletionRequest, *, calls_tools: bool = False
    ) -> "Callable[..., Coroutine[Any, Any, list[AsyncAnswerStream]]]":
        """Return the function that starts `n` answers to the last user message; `calls_tools`: or calls of tools, where
        the model knows them."""
        if body.model != chat.CHAT_ALIAS:
            check_model(body.model, [stillroom.model_name], _not_generating(stillroom))
        conversation = read_question(body.messages)
        may_call = calls_tools and has_tools(body) and not chat.searches(body) and await stillroom.aknows_tools()
        tool_chat = tool_chat_of(body) if may_call else None
        options = ask_options(body, conversation, tool_chat, calls_tools=calls_tools)

        def ask(on_hop: OnHop | None = None) -> "Coroutine[Any, Any, list[AsyncAnswerStream]]":
            return stillroom.astreams(conversation.question, replace(options, on_hop=on_hop), n=body.n or 1)

        return ask

    def _describe(self, name: str) -> Model:
        return Model(id=served_name(name), created=self._started_at)


def _not_generating(stillroom: "Stillroom") -> dict[str, str]:
    reranker = stillroom.config.search.reranker
    ranks = {reranker: "ranks texts only, at /v1/rerank"} if reranker else {}
    return {stillroom.embedder_name: "makes embeddings only, at /v1/embeddings", **ranks}


def _names(stillroom: "Stillroom") -> list[str]:
    engine, model = stillroom.config.engine.kind, stillroom.config.runtime.model
    alone = [] if engine == "builtin" and reader_folder(model) is not None else [chat.CHAT_ALIAS]
    reranker = stillroom.config.search.reranker
    return [stillroom.model_name, stillroom.embedder_name, *([reranker] if reranker else []), *alone]
