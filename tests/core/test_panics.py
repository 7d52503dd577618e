"""A real Rust panic becomes an ordinary exception."""

import asyncio
from pathlib import Path

import pytest
import tantivy

from stillroom.core.panics import ENDINGS, NativePanicError, panics_as_errors


def panic(folder: Path) -> None:
    """Make tantivy panic: its segment files are overwritten under an open index."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("body")
    index = tantivy.Index(builder.build(), path=str(folder))
    writer = index.writer(15_000_000, 1)
    document = tantivy.Document()
    document.add_text("body", "keys")
    writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    for path in folder.glob("*.idx"):
        with path.open("r+b") as stream:
            stream.write(b"\0" * path.stat().st_size)
    index.searcher().search(tantivy.Query.term_query(index.schema, "body", "keys"), 1)


def test_panic_is_not_caught_by_except_exception(tmp_path: Path) -> None:
    with pytest.raises(BaseException) as raised:
        panic(tmp_path)
    assert not isinstance(raised.value, Exception)


def test_panic_becomes_an_error_without_its_message(tmp_path: Path) -> None:
    with pytest.raises(NativePanicError, match="tantivy panicked") as raised, panics_as_errors("tantivy"):
        panic(tmp_path)
    assert "index out of bounds" not in str(raised.value)
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_other_exceptions_pass_unchanged(error: type[BaseException]) -> None:
    @panics_as_errors("tantivy")
    def fail() -> None:
        raise error

    with pytest.raises(error):
        fail()


def test_endings_are_not_subclasses_of_exception() -> None:
    assert not any(issubclass(one, Exception) for one in ENDINGS)
