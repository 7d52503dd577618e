"""docs/architecture.md names files and functions that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "stillroom"
PAGE = ROOT / "docs" / "architecture.md"

NAMED = re.compile(r"`([A-Za-z_][\w.]*)`\s\(`([\w/]+\.py)`\)")
PATH = re.compile(r"`([\w./]+(?:\.py|/))`")


def find(path: str) -> Path | None:
    """Return a file or folder that the page names, below the package or the repository."""
    at = (SOURCE / path, ROOT / path, SOURCE.parent / path)
    nested = SOURCE.parent.glob(f"**/{path}") if "/" in path.rstrip("/") or path.endswith("/") else iter(())
    return next((one for one in at if one.exists()), next(nested, None))


def test_every_path_on_the_page_exists() -> None:
    paths = PATH.findall(PAGE.read_text(encoding="utf-8"))

    assert len(paths) > 60
    assert not [path for path in paths if find(path) is None]


def test_every_function_is_defined_in_the_file_beside_it() -> None:
    names = NAMED.findall(PAGE.read_text(encoding="utf-8"))

    assert len(names) > 20
    for name, path in names:
        file = find(path)
        assert file is not None, path
        text = file.read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"\b(?:class|def) {part}\b|^{part}\b", text, re.M), f"{name} is not in {path}"


def test_every_package_is_described() -> None:
    page = PAGE.read_text(encoding="utf-8")
    packages = [path.parent.name for path in SOURCE.glob("*/__init__.py")]

    assert not [name for name in packages if f"| `{name}/` |" not in page]
