"""The OpenAPI document: requests and replies of every route, including errors and streams.

FastAPI derives the document from types. This module adds OpenAI's error shape, the statuses of each route, events and
examples. tests/server/test_openapi.py checks the server against it.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from stillroom.server.auth.guard import OPEN_PATHS
from stillroom.server.schemas.replies import ChatCompletionChunk, CompletionChunk, ErrorReply
from stillroom.server.schemas.requests import DocumentsRequest
from stillroom.server.schemas.responses import ResponseEvent

Document = dict[str, Any]

DESCRIPTION = (
    "Answers from your documents, with sources. Routes of OpenAI's API accept what its clients send; fields named "
    "`stillroom` are extensions. Every error has OpenAI's shape."
)
TAGS = {
    "answers": "Ask the documents, or continue a prompt.",
    "documents": "Add, list and remove the documents that answers are made from.",
    "search": "Search, embed and rerank without generating.",
    "operations": "Health, readiness, models and metrics.",
}
_KEY = "apiKey"
_REF = "#/components/schemas/"
_STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "The key is missing or unknown.",
    403: "The key, or the page that sent the request, may not do this.",
    404: "There is no such model, document, job or request.",
    408: "The request did not arrive in time.",
    409: "The knowledge base is empty, or the upload was cancelled.",
    410: "The file of the document is gone, or has changed since it was indexed.",
    413: "The body exceeds the server's limit.",
    415: "This route does not accept the body's content type.",
    422: "The document, or none of several, could be read.",
    429: "Too many requests; `Retry-After` says when to try again.",
    500: "Internal error; the server's log has the details.",
    502: "The remote engine refuses the request.",
    503: "Unavailable now; try again later.",
    504: "The request took too long.",
    507: "The disk is full or failing.",
}
_ALWAYS = (400, 403, 500, 503, 507)
_BODY = (408, 413, 415)
_GENERATING = (404, 409, 502, 504)
_MORE: dict[tuple[str, str], tuple[int, ...]] = {
    ("/v1/chat/completions", "post"): (*_BODY, *_GENERATING),
    ("/v1/responses", "post"): (*_BODY, *_GENERATING),
    ("/v1/completions", "post"): (*_BODY, *_GENERATING),
    ("/v1/embeddings", "post"): (*_BODY, 404),
    ("/tokenize", "post"): (*_BODY, 404, 502, 504),
    ("/detokenize", "post"): (*_BODY, 404, 502, 504),
    ("/v1/search", "post"): _BODY,
    **{(path, "post"): (*_BODY, 404) for path in ("/v1/rerank", "/v2/rerank")},
    ("/v1/documents", "post"): (*_BODY, 409),
    ("/v1/jobs/{job_id}", "get"): (404,),
    ("/v1/jobs/{job_id}", "delete"): (404,),
    ("/v1/models/{model}", "get"): (404,),
    ("/v1/documents/{document}", "get"): (404,),
    ("/v1/documents/{document}/content", "get"): (404, 410, 422),
    ("/v1/documents/{document}/pages/{page}.png", "get"): (404, 410, 422),
    ("/v1/documents/{document}", "delete"): (404,),
    ("/v1/requests/{request_id}", "get"): (404,),
}
_EVENTS = {
    ("/v1/chat/completions", "post"): "ChatCompletionChunk",
    ("/v1/responses", "post"): "ResponseEvent",
    ("/v1/completions", "post"): "CompletionChunk",
    ("/v1/documents", "post"): "UploadReply",
}
_QUESTION = {"role": "user", "content": "How do I rotate keys?"}
_EXAMPLES: dict[str, dict[str, Document]] = {
    "/v1/chat/completions": {
        "question": {"messages": [_QUESTION]},
        "conversation": {
            "messages": [
                _QUESTION,
                {"role": "assistant", "content": "Twice a year."},
                {"role": "user", "content": "Why?"},
            ],
            "stillroom": {"top_k": 3, "mode": "hybrid"},
            "max_tokens": 64,
        },
        "stream": {"messages": [_QUESTION], "stream": True, "stream_options": {"include_usage": True}},
    },
    "/v1/responses": {
        "question": {"input": "How do I rotate keys?"},
        "conversation": {
            "instructions": "Answer in one sentence.",
            "input": [
                _QUESTION,
                {"role": "assistant", "content": "Twice a year."},
                {"role": "user", "content": "Why?"},
            ],
            "max_output_tokens": 64,
            "store": False,
        },
        "stream": {"input": "How do I rotate keys?", "stream": True},
    },
    "/v1/completions": {
        "text": {"prompt": "Keys are rotated", "max_tokens": 16},
        "several": {"prompt": ["Keys are rotated", "A key is lost"], "n": 2, "logprobs": 1, "max_tokens": 4},
    },
    "/v1/embeddings": {
        "texts": {"input": ["one text", "another"]},
        "short vectors": {"input": "one text", "dimensions": 2, "encoding_format": "base64"},
    },
    "/tokenize": {
        "prompt": {"prompt": "Keys are rotated", "add_special_tokens": False},
        "chat": {"messages": [_QUESTION], "return_token_strs": True},
    },
    "/detokenize": {"tokens": {"tokens": [75, 101, 121]}},
    "/v1/search": {"hybrid": {"query": "rotate keys", "mode": "hybrid", "top_k": 3}},
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank"),
        {"texts": {"query": "rotate keys", "documents": ["Keys rotate.", "Cats sleep."], "top_n": 1}},
    ),
    "/v1/documents": {"text": {"documents": [{"name": "notes/keys.md", "text": "# Keys\n\nRotate them."}]}},
}


def install(app: FastAPI, *, asks_for_keys: bool) -> None:
    def document() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app, asks_for_keys=asks_for_keys)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def describe(app: FastAPI, *, asks_for_keys: bool) -> Document:
    found = get_openapi(
        title=app.title,
        version=app.version,
        description=DESCRIPTION,
        routes=app.routes,
        tags=[{"name": name, "description": text} for name, text in TAGS.items()],
    )
    components = found.setdefault("components", {})
    components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer", "description": "sk-stillroom-..."}}
    found["security"] = [{_KEY: []}] if asks_for_keys else [{_KEY: []}, {}]
    schemas = components.setdefault("schemas", {})
    for name, schema in _schemas().items():
        schemas.setdefault(name, schema)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    found["paths"] = {path.replace(":path}", "}"): item for path, item in found["paths"].items()}
    for path, item in found["paths"].items():
        for method, operation in item.items():
            operation.setdefault("tags", ["operations"])
            _complete(path, method, operation)
    return found


def _complete(path: str, method: str, operation: Document) -> None:
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    if path in OPEN_PATHS:
        operation["security"] = []
    else:
        responses.setdefault("401", _error(401))
    if method != "get":  # reads are not limited
        responses.setdefault("429", _error(429))
    for status in (*_ALWAYS, *_MORE.get((path, method), ())):
        responses.setdefault(str(status), _error(status))
    if events := _EVENTS.get((path, method)):
        responses["200"]["content"]["text/event-stream"] = {"schema": _event(events)}
    if (path, method) == ("/v1/documents", "post"):
        responses["422"] = _error(422, "UploadReply")
    for response in responses.values():
        for content in response.setdefault("content", {"application/json": {}}).values():
            content["schema"] = content.get("schema") or {"type": "object"}
        schema = {"type": "string"}
        response.setdefault("headers", {})["x-request-id"] = {
            "description": "Id of this request in the server's log.",
            "schema": schema,
        }
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None and path in _EXAMPLES:
        content["examples"] = {name: {"value": value} for name, value in _EXAMPLES[path].items()}


def _error(status: int, name: str = "ErrorReply") -> Document:
    return {
        "description": _STATUSES[status],
        "content": {"application/json": {"schema": {"$ref": _REF + name}}},
    }


def _event(name: str) -> Document:
    """Describe one server-sent event, as OpenAPI 3.2 does."""
    content = {"anyOf": [{"$ref": _REF + one} for one in (name, "ErrorReply")]}
    data = [{"contentMediaType": "application/json", "contentSchema": content}, {"const": "[DONE]"}]
    properties = {"data": {"type": "string", "anyOf": data}, "event": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _schemas() -> Document:
    """Return the schemas that no route names in its types."""
    models = (ErrorReply, ChatCompletionChunk, CompletionChunk, ResponseEvent, DocumentsRequest)
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=_REF + "{model}")
    schemas: Document = found["$defs"]
    return schemas
