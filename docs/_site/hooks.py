"""What `mkdocs` must know to make a site of Markdown that reads as well in the repository.

The README is the site's first page, and reports of `benchmarks/` are pages of it; links from one to the other are
turned accordingly. Links to files that are no pages are left as text.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
BESIDE = {"README.md": "index.md", "SECURITY.md": "security.md"}
"""Pages that are kept at the root of the repository, where everybody looks for them."""

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)*)([^)#:\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in the folder of pages."""
    for name, page in BESIDE.items():
        if (ROOT / name).is_file():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for report in sorted((ROOT / "benchmarks").glob("*.md")):
        files.append(File.generated(config, f"benchmarks/{report.name}", abs_src_path=str(report)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them; those into the source become text."""
    source = Path(page.file.abs_src_path)

    def turned(link: re.Match[str]) -> str:
        text, up, path, anchor = link[1], link[2], link[3], link[4] or ""
        if not path:
            return link[0]
        target = (source.parent / (up + path)).resolve()
        uri = _uri(target)
        if uri is None:
            return link[0]
        if files.get_file_from_path(uri) is None:
            return text
        depth = page.file.src_uri.count("/")
        return f"[{text}]({'../' * depth}{uri}{anchor})"

    return _LINK.sub(turned, markdown)


def _uri(target: Path) -> str | None:
    """Where a file of the repository is on the site; None outside of it."""
    if not target.is_relative_to(ROOT):
        return None
    path = target.relative_to(ROOT)
    if str(path) in BESIDE:
        return BESIDE[str(path)]
    if target.is_dir():
        path /= "README.md"
    return str(path.relative_to("docs")) if path.is_relative_to("docs") else str(path)
