"""Loaders under atheris, which mutates towards code that was not reached yet. Not a part of `make test`.

    pip install atheris                 # for the Python versions it has
    python -m tests.fuzz.loaders_atheris pdf CORPUS_FOLDER -max_total_time=300

The first argument is a format (pdf, docx, pptx, xlsx, epub, html, md, rst, ipynb, csv, py, rs, txt); the rest is
libFuzzer's. The folder is filled with a small valid file first. A file that makes a loader do anything but give a
document or a DocumentError is written to the working folder as `crash-...`; make a test of it in
tests/retrieval/loaders/test_fuzz.py.
"""

import sys
import zipfile
from io import BytesIO
from pathlib import Path

_PARTS = {
    "docx": "word/document.xml",
    "pptx": "ppt/slides/slide1.xml",
    "xlsx": "xl/worksheets/sheet1.xml",
    "epub": "OEBPS/a.xhtml",
}
"""Of archives this part is fuzzed: a change of the archive itself is nearly always its end."""


def main() -> None:
    """Fuzz until libFuzzer stops."""
    import atheris

    with atheris.instrument_imports(include=["stillroom.retrieval", "docx", "pptx", "openpyxl", "bs4", "markdown_it"]):
        from tests.retrieval.loaders.make import archive
        from tests.retrieval.loaders.mutations import check, seeds

    extension, folder, *rest = sys.argv[1:]
    name, part = f"a.{extension}", _PARTS.get(extension)
    whole = seeds()[name]
    files: dict[str, str | bytes] = {}
    if part is not None:
        source = zipfile.ZipFile(BytesIO(whole))
        files = {entry: source.read(entry) for entry in source.namelist()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    seed = whole if part is None else files[part]
    assert isinstance(seed, bytes)
    (Path(folder) / f"seed.{extension}").write_bytes(seed)

    def run(data: bytes) -> None:
        check(name, data if part is None else archive({**files, part: data}))

    atheris.Setup([sys.argv[0], folder, *rest], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
