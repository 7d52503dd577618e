"""Writes the table of docs/metrics.md from the declarations: python docs/_site/metrics.py"""

import re
from pathlib import Path

from stillroom.telemetry.catalogue import reference

PAGE = Path(__file__).resolve().parents[1] / "metrics.md"
TABLE = re.compile(r"\| metric \|.*?\n(?=\n|\Z)", re.DOTALL)

if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: reference(), PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8")
