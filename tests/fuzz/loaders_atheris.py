"""Fuzzes document loaders with atheris. Not part of `make test`.

    pip install atheris                 # for the Python versions it has
    python -m tests.fuzz.loaders_atheris pdf CORPUS_FOLDER -max_total_time=300

The first argument is a format (pdf, docx, pptx, xlsx, epub, html, md, rst, ipynb, csv, py, rs, txt); the others are
libFuzzer's. The folder first gets a small valid file. A file for which a loader neither returns a document nor raises
DocumentError is written to the working folder as `crash-...`; add it to tests/retrieval/loaders/test_fuzz.py.
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
"""The fuzzed part of an archive; a mutated archive is nearly always unreadable."""


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
