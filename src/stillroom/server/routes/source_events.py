"""The sources of a streamed answer as open-webui's events, which it shows as citations (docs/open-webui.md)."""

from stillroom.rag.answer import Source
from stillroom.rag.as_json import JsonObject
from stillroom.server.routes.annotations import content_path


def source_event(source: Source, address: str) -> JsonObject:
    """Return the event of one source; events must be sent in order of positions, which number the citations.

    open-webui merges sources of equal ids, takes an id that begins with `http` for a link, and asks a search engine for
    the icon of a name that begins so.

    Args:
        source: with a public document id.
        address: of this server, as a browser reaches it, such as `https://answers.example.org`.
    """
    identity, name = f"{source.document}#{source.chunk_id}", _name(source)
    about: JsonObject = {"source": identity, "name": name}
    if source.start_page:
        about["page"] = source.start_page - 1  # it counts from 0 and shows from 1
    return {
        "type": "source",
        "data": {
            "source": {"id": identity, "name": name, "url": f"{address.rstrip('/')}{content_path(source)}"},
            "document": [source.text],
            "metadata": [about],
        },
    }


def _name(source: Source) -> str:
    name = source.document.rpartition("/")[2]
    if source.start_line:
        last = f"-{source.end_line}" if source.end_line > source.start_line else ""
        name += f":{source.start_line}{last}"
    return f"./{name}" if name.lower().startswith("http") else name
