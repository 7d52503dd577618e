"""docs/configuration.md is the generated page and lists every setting."""

import subprocess
import sys
from pathlib import Path

from stillroom.config.load import settings
from stillroom.config.reference import list_settings, render

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_page_is_up_to_date() -> None:
    expected = "run: python -m stillroom.config.reference > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == render(), expected


def test_every_setting_is_listed_with_a_docstring() -> None:
    listed = {doc.setting.path: doc for section in list_settings() for doc in section.settings}

    assert list(listed) == list(settings())
    assert all(doc.description and doc.type_name for doc in listed.values())
    assert all(section.description for section in list_settings())


def test_sizes_are_shown_with_units() -> None:
    assert '| `kv_bytes` | `"2GiB"` |' in render()


def test_loading_settings_needs_no_library() -> None:
    code = (
        "import sys, stillroom.config.load, stillroom.config.reference\n"
        "stillroom.config.load.load_config(env={})\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
