"""Writes docs/modules.md, the list of all modules: python docs/_site/modules.py > docs/modules.md"""

import ast
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
HEAD = """# Modules

<!-- Generated: python docs/_site/modules.py > docs/modules.md -->

Every module with the first sentence of its docstring, by package. [architecture.md](architecture.md) says what the
packages are for.
"""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.])(?<!Eq[.]) ", paragraph, maxsplit=1)[0]


def render() -> str:
    """Return the page."""
    packages: dict[str, list[Path]] = defaultdict(list)
    for path in sorted([*SOURCE.glob("stillroom/**/*.py"), *SOURCE.glob("stillroom_bench/**/*.py")]):
        if path.name != "__init__.py":
            packages[path.parent.relative_to(SOURCE).as_posix()].append(path)
    parts = [HEAD]
    for package, paths in sorted(packages.items()):
        parts.append(f"\n## {package}\n\n| module | what it has |\n|---|---|")
        parts += [f"\n| `{path.stem}` | {first_sentence(path).replace('|', '/')} |" for path in paths]
        parts.append("\n")
    return "".join(parts)


if __name__ == "__main__":
    print(render(), end="")
