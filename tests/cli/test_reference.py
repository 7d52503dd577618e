"""docs/cli.md equals the generated page and lists every option."""

from pathlib import Path

from stillroom.cli.reference import commands, render

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m stillroom.cli.reference > docs/cli.md"


def test_every_command_option_and_argument_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = dict(commands())

    assert {"add", "remove", "list", "digest", "search", "ask", "serve", "bench retrieval"} <= set(found)
    for path, command in found.items():
        _, _, section = page.partition(f"## `stillroom {path}`\n")
        section, _, _ = section.partition("\n## ")
        for parameter in command.params:
            assert parameter.help, f"{path}: {parameter.name} has no help"
            names = [parameter.metavar] if parameter.param_type_name == "argument" else parameter.opts
            assert all(f"`{name}`" in section for name in names)
