"""`stillroom mcp`: serve a knowledge base to programs that speak the Model Context Protocol, over stdin and stdout."""

from stillroom.cli import opening
from stillroom.cli.options import (
    DEFAULT_KB,
    BaseUrlOption,
    ConfigOption,
    EngineModelOption,
    EngineOption,
    KbOption,
    ModelOption,
    ReuseOption,
    engine_settings,
    help_text,
)

HELP = help_text(
    "Serve a knowledge base to assistants and editors over MCP.",
    "Speaks the Model Context Protocol on stdin and stdout, with the tools search, ask, list_documents and "
    "read_document. An assistant starts it; docs/mcp.md has its settings. `stillroom serve --mcp` serves the same over "
    "HTTP, with keys.",
    "Needs the protocol's library: pip install 'stillroom[mcp]'.",
    examples=(
        "stillroom mcp --kb ./kb",
        "stillroom mcp --kb ./kb --model ./models/qwen2.5-0.5b",
        "npx @modelcontextprotocol/inspector stillroom mcp --kb ./kb     # try the tools by hand",
    ),
)


def mcp(  # noqa: PLR0913  one parameter per flag
    kb: KbOption = DEFAULT_KB,
    model: ModelOption = None,
    engine: EngineOption = None,
    base_url: BaseUrlOption = None,
    engine_model: EngineModelOption = None,
    reuse: ReuseOption = None,
    config: ConfigOption = None,
) -> None:
    flags: dict[str, object] = {"runtime.model": model, "reuse.mode": reuse}
    settings = opening.load_settings(config, flags | engine_settings(engine, base_url, engine_model))
    opening.needs_mcp()
    with opening.open_stillroom(kb, settings) as opened:
        from stillroom.server.mcp import mcp_server

        mcp_server(lambda _: opened).run("stdio")
