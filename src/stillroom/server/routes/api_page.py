"""`GET /docs`: the OpenAPI document as one HTML page, made here. The page has no scripts and loads nothing.

It needs no key, because it says what the program does and nothing of a knowledge base.
"""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

Schema = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: light-dark(#5d625b, #a4a8a2);
  --accent: light-dark(#22664a, #84cbaa); --sunk: light-dark(#efece6, #262b2d); }
body { margin: 0; font: 1rem/1.5 system-ui, sans-serif; color: light-dark(#20241f, #e7e4dd);
  background: light-dark(#f7f5f1, #15181a); overflow-wrap: break-word; }
main, nav { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem; }
h3 { margin: 2rem 0 .25rem; }
nav h2 { border: 0; margin: 1rem 0 .25rem; font-size: 1rem; }
h4 { margin: 1rem 0 .25rem; font-size: 1rem; }
a { color: var(--accent); } nav ul { columns: 20rem; padding: 0; list-style: none; margin: .25rem 0 1rem; }
code, pre { font: .9em ui-monospace, Menlo, Consolas, monospace; }
pre { background: var(--sunk); padding: .75rem; white-space: pre-wrap; margin: .25rem 0 .75rem; }
table { border-collapse: collapse; width: 100%; margin: .25rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-top: 1px solid var(--line); }
th { font-weight: 600; border: 0; color: var(--dim); } td:first-child { white-space: nowrap; }
.top { position: fixed; right: .5rem; bottom: .5rem; padding: .25rem .75rem; background: var(--sunk);
  border: 1px solid var(--line); }
.dim { color: var(--dim); } :target { outline: 2px solid var(--accent); outline-offset: .25rem; }
td:not(:first-child) { overflow-wrap: anywhere; }
@media (max-width: 40rem) { thead { display: none; } table, tbody, tr { display: block; }
  tr { border-top: 1px solid var(--line); padding: .3rem 0; } td { display: inline; border: 0; }
  td:first-child { white-space: normal; } }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_ADDRESS = "http://ADDRESS"
_JSON = "application/json"
_REF = "#/components/schemas/"
_MANY = 2**31
"""A bound from here on, up or down, only keeps numbers in their type, and is not shown."""
_LIMITS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "minLength": "shortest length",
    "maxLength": "longest length",
    "minItems": "fewest items",
    "maxItems": "most items",
    "pattern": "matches",
}


def api_page_router(openapi: Callable[[], Schema], *, has_mcp: bool) -> APIRouter:
    """
    Args:
        openapi: returns the OpenAPI document.
        has_mcp: whether the server has the route `/mcp`.
    """
    router = APIRouter()
    page = cache(lambda: api_page(openapi(), has_mcp=has_mcp))

    async def docs(request: Request) -> Response:
        address = escape(str(request.base_url).rstrip("/"))
        return Response(page().replace(_ADDRESS, address), media_type="text/html; charset=utf-8", headers=_HEADERS)

    router.add_api_route("/docs", docs, methods=["GET", "HEAD"], include_in_schema=False)
    return router


def api_page(document: Schema, *, has_mcp: bool = False) -> str:
    """Return the page of an OpenAPI document."""
    title = escape(document["info"]["title"])
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}: HTTP API</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(_Page(document, has_mcp=has_mcp).parts()) + "\n</body>\n</html>\n"


class _Page:
    def __init__(self, document: Schema, *, has_mcp: bool) -> None:
        self._document = document
        self._has_mcp = has_mcp
        self._schemas: dict[str, Schema] = document["components"]["schemas"]
        self._needs_key = {} not in document["security"]
        self._by_tag: dict[str, list[tuple[str, str, Schema]]] = {tag["name"]: [] for tag in document["tags"]}
        for path, item in document["paths"].items():
            for method, operation in item.items():
                self._by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))

    def parts(self) -> Iterator[str]:
        info = self._document["info"]
        key = " Requests need an API key: <code>Authorization: Bearer KEY</code>." if self._needs_key else ""
        yield f'<nav aria-label="Routes">\n<h1 id="top">{escape(info["title"])}: HTTP API</h1>'
        yield f"<p>{_prose(info['description'])}{key}</p>"
        same = '<a href="openapi.json">an OpenAPI document</a>'
        if self._needs_key:  # a browser sends none when it follows a link
            same = "an OpenAPI document: <code>/openapi.json</code>, which needs a key too"
        yield f'<p>The same as {same}. <a href="./">The console</a>.</p>'
        if self._has_mcp:
            yield (
                "<p><code>POST /mcp</code> speaks the Model Context Protocol, for assistants and editors. It has no "
                "types here: its messages describe its tools.</p>"
            )
        for tag, operations in self._by_tag.items():
            links = "".join(
                f'<li><a href="#{_anchor(method, path)}"><code>{method} {escape(path)}</code></a></li>'
                for method, path, _ in operations
            )
            yield f"<h2>{escape(tag.capitalize())}</h2><ul>{links}</ul>"
        yield "</nav>\n<main>"
        for tag in self._document["tags"]:
            yield f"<h2>{escape(tag['name'].capitalize())}</h2><p>{_prose(tag['description'])}</p>"
            for method, path, operation in self._by_tag[tag["name"]]:
                yield from self._operation(method, path, operation)
        yield "<h2>Types</h2>"
        for name, schema in sorted(self._schemas.items()):
            yield f'<h3 id="type-{escape(name)}"><code>{escape(name)}</code></h3>'
            yield from self._type(schema)
        yield '<a class="top" href="#top">All routes</a>\n</main>'

    def _operation(self, method: str, path: str, operation: Schema) -> Iterator[str]:
        yield f'<h3 id="{_anchor(method, path)}"><code>{method} {escape(path)}</code></h3>'
        yield f"<p>{_prose(operation.get('description', ''))}</p>"
        parameters = operation.get("parameters", [])
        if parameters:
            rows = [
                (one["name"], f"{one['in']}{', required' if one.get('required') else ''}", one["schema"])
                for one in parameters
            ]
            yield _table(
                ("Parameter", "Where", "Type", "Meaning"),
                [(_code(name), where, self._kind(schema), _about(schema)) for name, where, schema in rows],
            )
        contents: Schema = operation.get("requestBody", {}).get("content", {})
        for media_type, content in contents.items():
            yield f"<h4>Body: <code>{escape(media_type)}</code>, {self._kind(content['schema'])}</h4>"
            yield from self._type(self._resolved(content["schema"]))
        yield from self._examples(method, path, contents.get(_JSON, {}).get("examples", {}))
        yield "<h4>Replies</h4>"
        replies = [
            (_code(status), _prose(reply.get("description", "")), self._contents(reply))
            for status, reply in sorted(operation["responses"].items())
        ]
        yield _table(("Status", "Meaning", "Type"), replies)

    def _examples(self, method: str, path: str, examples: Schema) -> Iterator[str]:
        key = ' \\\n  -H "Authorization: Bearer $STILLROOM_KEY"' if self._needs_key else ""
        verb = "" if method == "GET" else f" -X {method}"
        command = f"curl -s{verb} {shlex.quote(_ADDRESS + path)}{key}"
        if not examples and method != "POST":
            yield f"<pre><code>{escape(command)}</code></pre>"
        for name, example in examples.items():
            sent = shlex.quote(json.dumps(example["value"], ensure_ascii=False))
            whole = f"curl -s {_ADDRESS}{path}{key} \\\n  -H 'Content-Type: {_JSON}' \\\n  -d {sent}"
            yield f"<h4>Example: {escape(name)}</h4><pre><code>{escape(whole)}</code></pre>"

    def _contents(self, reply: Schema) -> str:
        return "<br>".join(
            f"{self._kind(content['schema'])} <span class=dim>{escape(media_type)}</span>"
            for media_type, content in reply.get("content", {}).items()
        )

    def _type(self, schema: Schema) -> Iterator[str]:
        """Yield what a type means, with a table of its fields if it has any."""
        if text := schema.get("description"):
            yield f"<p>{_prose(text)}</p>"
        fields: dict[str, Schema] = schema.get("properties", {})
        if not fields:
            yield f"<p>{self._kind(schema)}</p>"
            return
        required = schema.get("required", ())
        rows = [
            (_code(name), self._kind(one), ("Required. " if name in required else "") + _about(one))
            for name, one in sorted(fields.items(), key=lambda field: field[0] not in required)
        ]
        yield _table(("Field", "Type", "Meaning"), rows)

    def _kind(self, schema: Schema) -> str:
        """Return the type as HTML, with links to named types."""
        if "$ref" in schema:
            name = escape(schema["$ref"].removeprefix(_REF))
            return f'<a href="#type-{name}">{name}</a>'
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return " or ".join(dict.fromkeys(map(self._kind, schema[word])))
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            return " or ".join(_code(json.dumps(value)) for value in values)
        return self._plain_kind(schema) + _limits(schema)

    def _plain_kind(self, schema: Schema) -> str:
        kind = schema.get("type", "any JSON")
        if isinstance(kind, list):
            return " or ".join(map(escape, kind))
        if kind == "array":
            inner = schema.get("items") or {}
            return f"list of ({self._kind(inner)})" if "anyOf" in inner else f"list of {self._kind(inner)}"
        values = schema.get("additionalProperties")
        return f"object of {self._kind(values)}" if kind == "object" and isinstance(values, dict) else escape(kind)

    def _resolved(self, schema: Schema) -> Schema:
        return self._schemas[schema["$ref"].removeprefix(_REF)] if "$ref" in schema else schema


def _anchor(method: str, path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{method}{path}".lower()).strip("-")


def _about(schema: Schema) -> str:
    text = _prose(schema.get("description", ""))
    default = schema.get("default")
    return text if default is None else f"{text} Default: {_code(json.dumps(default))}.".strip()


def _limits(schema: Schema) -> str:
    shown = {name: schema[name] for name in _LIMITS if name in schema}
    if shown.get("exclusiveMaximum", 0) >= _MANY:
        del shown["exclusiveMaximum"]
    if shown.get("minimum", 0) <= -_MANY:
        del shown["minimum"]
    found = [f"{_LIMITS[name]} {_number(one) if isinstance(one, float) else one}" for name, one in shown.items()]
    return f' <span class="dim">({escape(", ".join(found))})</span>' if found else ""


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:g}"


def _prose(text: str) -> str:
    """Return text as HTML; what stands in backquotes is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
