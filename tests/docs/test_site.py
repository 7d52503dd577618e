"""The site that `make docs` builds: strictly, and without anything from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the extra docs"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there_and_the_readme_is_the_first(site: Path) -> None:
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    pages = {page.replace("README.html", "index.html") for page in pages}

    assert pages <= {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert "Ask your own documents" in (site / "index.html").read_text()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        found = [tag for tag in loads.findall(page.read_text()) if 'rel="canonical"' not in tag]
        assert not found, (page, found[:3])
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet
