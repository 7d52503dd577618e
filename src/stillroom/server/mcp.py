"""Tools and resources of a knowledge base for programs that speak the Model Context Protocol (docs/mcp.md).

`stillroom mcp` runs them over stdin and stdout; with `server.mcp` the HTTP server has them at `/mcp`. Only these import
this module: the protocol's SDK is an optional dependency.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote

from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError, UnexpectedToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    CallToolResult,
    InputRequiredResult,
    ListResourcesResult,
    PaginatedRequestParams,
    Resource,
    ToolAnnotations,
)
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stillroom import __version__
from stillroom.core.document_content import DocumentContent
from stillroom.core.ids import public_id
from stillroom.errors import StillroomError, UnknownDocumentError
from stillroom.rag.answer import Answer, AskOptions, Citation, Support
from stillroom.server.auth.tenants import stillroom_of
from stillroom.server.limits.rates import admitted
from stillroom.server.mcp_arguments import unknown_arguments, wrong_arguments
from stillroom.server.mcp_reading import ReadReply, read_part, texts_of

if TYPE_CHECKING:
    from stillroom.core.document import DocumentInfo, ScoredChunk
    from stillroom.rag.stillroom import Stillroom

MAX_LISTED = 1000
MAX_TOP_K = 100
MAX_RESOURCES = 100
"""Most documents in one reply to `resources/list`; its cursor leads to the next ones."""

_CURSOR = "after:"
"""Beginning of each cursor; the name of a document follows."""
_MIN_PART = 3
"""Fewest characters of a wrong name that may be any part of a document's name."""

_INSTRUCTIONS = (
    "Documents of this organisation. Use `search` to find passages, `ask` for a short answer with citations, and "
    "`read_document` to read on around a passage. Quote the document and its lines or pages for what you take from it."
)
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)

T = TypeVar("T")


class Place(BaseModel):
    """Where a text stands in its document; lines and pages count from 1, and 0 means that the format has none."""

    document: str
    heading: str
    start_line: int
    end_line: int
    start_page: int
    end_page: int


class Passage(Place):
    text: str
    score: float


class SearchReply(BaseModel):
    passages: list[Passage]
    """Best first."""


class Quote(Place):
    """A sentence of the answer, and the words of a document that support it."""

    sentence: str
    quote: str
    is_fully_supported: bool


class AskReply(BaseModel):
    answer: str
    quotes: list[Quote]
    confidence: float | None
    """How sure the bundled reader is, from 0 to 1; null from other models."""
    warnings: list[str]


class ListedDocument(BaseModel):
    document: str
    title: str
    num_passages: int


class ListReply(BaseModel):
    documents: list[ListedDocument]
    next_after: str
    """Pass it as `after` for the next page; empty on the last one."""


Where = Annotated[
    str, Field(description="A filter on documents, such as `year >= 2020 and team = legal`; empty allows all.")
]
DocumentName = Annotated[str, Field(description="A document's name, as other tools return it.")]


def mcp_server(find: "Callable[[Request | None], Stillroom]") -> MCPServer[Any]:
    """Make the server.

    Args:
        find: returns the knowledge base to use for a request over HTTP; None: a request over stdin.
    """
    with _logging_unchanged():
        server = _Server("stillroom", title="Stillroom", instructions=_INSTRUCTIONS, version=__version__)

    def of(context: Context[Any, Any]) -> "Stillroom":
        return find(context.request_context.request)

    @server.tool(annotations=_READS)
    async def search(
        query: Annotated[str, Field(description="Words or a question.")],
        context: Context[Any, Any],
        top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K, description="Most passages.")] = 5,
        where: Where = "",
    ) -> SearchReply:
        """Find the passages of the documents that match a query best, by meaning and by words."""
        found = await _told(asyncio.to_thread(of(context).search, query, top_k=top_k, where=where))
        return SearchReply(passages=[_passage(scored) for scored in found.results])

    @server.tool(annotations=_READS)
    async def ask(
        question: Annotated[str, Field(description="A question that the documents may answer.")],
        context: Context[Any, Any],
        where: Where = "",
    ) -> AskReply:
        """Answer a question from the documents, with quotes that support the answer. Says so if they do not answer."""
        request = context.request_context.request
        answer = await _told(_answer(find(request), question, AskOptions(where=where), request))
        return AskReply(
            answer=answer.text,
            quotes=[_quote(answer, one) for one in answer.citations if one.source and one.quote],
            confidence=answer.confidence,
            warnings=list(answer.warnings),
        )

    @server.tool(annotations=_READS)
    async def list_documents(
        context: Context[Any, Any],
        after: Annotated[str, Field(description="`next_after` of the page before; empty for the first page.")] = "",
        limit: Annotated[int, Field(ge=1, le=MAX_LISTED, description="Most documents.")] = 100,
    ) -> ListReply:
        """List the documents by name, a page at a time."""
        infos = await _told(asyncio.to_thread(of(context).public_documents, after, limit + 1))
        documents = [_listed(info) for info in infos[:limit]]
        return ListReply(documents=documents, next_after=documents[-1].document if len(infos) > limit else "")

    @server.tool(annotations=_READS)
    async def read_document(
        document: DocumentName,
        context: Context[Any, Any],
        start_line: Annotated[int, Field(ge=0, description="First line, from 1; 0: from the beginning.")] = 0,
        end_line: Annotated[int, Field(ge=0, description="Last line; 0: as far as a reply goes.")] = 0,
        page: Annotated[int, Field(ge=0, description="Only this page, of a format with pages; 0: all.")] = 0,
    ) -> ReadReply:
        """Read the text of a document, or of some lines or a page of it."""
        content = await _told(asyncio.to_thread(_content, of(context), document))
        return await _told(asyncio.to_thread(read_part, content, (start_line, end_line), page))

    @server.resource(
        "stillroom://documents/{+document}",
        name="document",
        title="A document",
        description="The whole text of a document of the knowledge base; the tool `list_documents` has the names.",
        mime_type="text/plain",
    )
    async def document_text(document: str, context: Context[Any, Any]) -> str:
        try:
            content = await asyncio.to_thread(_content, of(context), document)
        except StillroomError as error:
            raise ResourceNotFoundError(str(error)) from error
        return "\n\n".join(texts_of(content, content.paragraphs, 0))

    async def list_resources(
        context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None
    ) -> ListResourcesResult:
        cursor = (params and params.cursor) or _CURSOR
        if not cursor.startswith(_CURSOR):
            message = f"there is no cursor {cursor[:60]!r}; send the nextCursor of the page before, or none"
            raise MCPError(INVALID_PARAMS, message)
        after = cursor.removeprefix(_CURSOR)
        infos = await asyncio.to_thread(find(context.request).public_documents, after, MAX_RESOURCES + 1)
        shown = [_listed(info) for info in infos[:MAX_RESOURCES]]
        following = f"{_CURSOR}{shown[-1].document}" if len(infos) > MAX_RESOURCES else None
        return ListResourcesResult(resources=[_resource(one) for one in shown], next_cursor=following)

    # the SDK's own handler lists resources that are known when the server is made, and has no pages
    server._lowlevel_server.add_request_handler("resources/list", PaginatedRequestParams, list_resources)
    return server


class _Server(MCPServer[Any]):
    """Reports what is wrong with a call in plain sentences, without the names of the SDK's exceptions."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        schemas = {tool.name: tool.input_schema for tool in await self.list_tools()}
        if name not in schemas:
            raise ToolError(f"there is no tool {name[:60]!r}; the tools are {', '.join(schemas)}")
        if problem := unknown_arguments(name, arguments, schemas[name]):
            raise ToolError(problem)
        try:
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError:
            raise
        except ToolError as error:
            if isinstance(error.__cause__, ValidationError):
                raise ToolError(wrong_arguments(error.__cause__, schemas[name])) from None
            raise ToolError(str(error.__cause__ or error)) from None


def mcp_route() -> Route:
    """The route `/mcp`: each request stands alone, without a session, and is answered with JSON. Its tenant is that of
    the caller's key."""
    server = mcp_server(lambda request: stillroom_of(_known(request)))

    class Endpoint:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            security = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # `Guard` checks hosts
            server.streamable_http_app(stateless_http=True, json_response=True, transport_security=security)
            manager = server.session_manager  # runs once, so each request has its own
            async with manager.run():
                await manager.handle_request(scope, receive, send)

    # by the protocol, a server without streams of its own answers GET with 405
    return Route("/mcp", Endpoint(), methods=["POST"], include_in_schema=False)


@contextlib.contextmanager
def _logging_unchanged() -> Iterator[None]:
    """The SDK gives the process a log of its own when a server is made."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _known(request: Request | None) -> Request:
    assert request is not None, "over HTTP every message has a request"
    return request


async def _told(work: Awaitable[T]) -> T:
    """Let the model read what went wrong and what to do."""
    try:
        return await work
    except StillroomError as error:
        raise ToolError(str(error)) from error


async def _answer(stillroom: "Stillroom", question: str, options: AskOptions, request: Request | None) -> Answer:
    with admitted(request):
        stream = await stillroom.astream(question, options)
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()  # the client may have gone
        return stream.answer


def _passage(scored: "ScoredChunk") -> Passage:
    chunk = scored.chunk
    return Passage(
        document=public_id(chunk.document_id),
        heading=chunk.heading,
        start_line=chunk.start_line,
        end_line=chunk.end_line,
        start_page=chunk.start_page,
        end_page=chunk.end_page,
        text=chunk.text,
        score=scored.score,
    )


def _quote(answer: Answer, citation: Citation) -> Quote:
    return Quote(
        document=public_id(citation.document),
        heading=citation.heading,
        start_line=citation.start_line,
        end_line=citation.end_line,
        start_page=citation.start_page,
        end_page=citation.end_page,
        sentence=answer.text[citation.start : citation.end],
        quote=citation.quote,
        is_fully_supported=citation.support is Support.SUPPORTED,
    )


def _listed(info: "DocumentInfo") -> ListedDocument:
    return ListedDocument(document=public_id(info.document_id), title=info.title, num_passages=info.num_chunks)


def _resource(document: ListedDocument) -> Resource:
    return Resource(
        uri=f"stillroom://documents/{quote(document.document)}",
        name=document.document,
        title=document.title or None,
        mime_type="text/plain",
    )


def _content(stillroom: "Stillroom", name: str) -> DocumentContent:
    """A document's text, by its name or the end of it.

    Raises:
        UnknownDocumentError, SeveralDocumentsError: no document has that name, or several have.
    """
    try:
        return stillroom.document_content(name)
    except UnknownDocumentError:
        found = stillroom.documents_like(name)
        if len(name) < _MIN_PART:  # too many names hold so short a part
            found = [one for one in found if public_id(one).rpartition("/")[2].partition(".")[0] == name]
        if len(found) == 1:
            return stillroom.document_content(public_id(found[0]))
        which = "; it may be " + ", ".join(map(public_id, found[:5])) if found else ""
        raise UnknownDocumentError(f"there is no document {name!r}{which}; list_documents has the names") from None
