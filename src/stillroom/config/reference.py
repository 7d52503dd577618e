"""Generates docs/configuration.md from the source of the settings classes.

python -m stillroom.config.reference > docs/configuration.md
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_type_hints

from stillroom.config.load import Setting, settings
from stillroom.config.settings import StillroomConfig

_HEAD = """\
# Configuration

<!-- Generated: python -m stillroom.config.reference > docs/configuration.md -->

After reading this page you can set any setting of Stillroom. Every setting has a default, so Stillroom runs without any
configuration. A setting can come from four sources; later ones win:

1. the default,
2. `stillroom.toml` in the current folder, or the file named by `--config FILE` (or `STILLROOM_CONFIG`),
3. the environment: `STILLROOM_`, the section, two underscores, the field,
4. a flag of the command, if it has one.

The same setting in a file and in the environment:

```toml
[runtime]
kv_bytes = "512MiB"
max_num_seqs = 8

[search]
top_k = 3
```

```sh
export STILLROOM_RUNTIME__KV_BYTES=512MiB
export STILLROOM_RUNTIME__MAX_NUM_SEQS=8
export STILLROOM_SEARCH__TOP_K=3
```

A size in bytes is a whole number or text with a unit: `B`, `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024), `KB`, `MB`,
`GB`, `TB` (powers of 1000), or a share of the machine's memory (`25%`). A path may begin with `~`, the user's home
folder. An unknown name or an impossible value stops the command with exit code 2 and a message that lists the allowed
values.

From Python, `Stillroom.open` reads none of these sources. Pass `Stillroom.open("kb", config=load_config())`, with
`stillroom.config.load.load_config`, or fill in the dataclasses of `stillroom.config.settings`.

Three environment variables are not settings: `STILLROOM_KB` and `STILLROOM_CONFIG` replace the flags `--kb` and
`--config`, and `STILLROOM_DEBUG=1` shows the stack trace of an error.
"""


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """A setting with its docstring."""

    setting: Setting
    type_name: str
    """Annotation as written in the source."""
    description: str


@dataclass(frozen=True, slots=True)
class SectionDoc:
    name: str
    description: str
    settings: tuple[SettingDoc, ...]


def list_settings() -> tuple[SectionDoc, ...]:
    """Return every section and setting with type, default and docstring, in the order of the source."""
    return tuple(_section(name, section_type) for name, section_type in get_type_hints(StillroomConfig).items())


def _section(section: str, section_type: type) -> SectionDoc:
    source = ast.parse(inspect.getsource(section_type)).body[0]
    assert isinstance(source, ast.ClassDef)
    return SectionDoc(
        name=section,
        description=ast.get_docstring(source) or "",
        settings=tuple(
            SettingDoc(settings()[f"{section}.{name}"], type_name, text) for name, type_name, text in _fields(source)
        ),
    )


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield name, annotation and docstring of each annotated field; the docstring is the string below it."""
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        yield statement.target.id, ast.unparse(statement.annotation), text


def render() -> str:
    """Return the page in Markdown."""
    return "\n".join([_HEAD, *(_render_section(section) for section in list_settings())])


def _render_section(section: SectionDoc) -> str:
    lines = [f"## `[{section.name}]`", "", section.description, "", "| setting | default | allowed | meaning |"]
    lines.append("|---|---|---|---|")
    for doc in section.settings:
        cells = (f"`{doc.setting.name}`", f"`{_show(doc.setting)}`", doc.setting.allowed, doc.description)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _show(setting: Setting) -> str:
    """Return the default as written in a TOML file; sizes in the largest unit that divides them."""
    value = setting.default
    if setting.is_size and isinstance(value, int):
        for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
            if value and value % 1024**exponent == 0:
                return f'"{value // 1024**exponent}{unit}"'
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(render(), end="")
