"""The list of modules is the generated one, and every module says what it has."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_list_of_modules_is_up_to_date() -> None:
    page = runpy.run_path(str(DOCS / "_site" / "modules.py"))["render"]()
    assert (DOCS / "modules.md").read_text(encoding="utf-8") == page, (
        "run: python docs/_site/modules.py > docs/modules.md"
    )


def test_every_module_says_what_it_has() -> None:
    rows = [line for line in (DOCS / "modules.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [row for row in rows if row.endswith("|  |")]
