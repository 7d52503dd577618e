"""Repeated texts are shown once, and chunks without a text of their own after all others."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.retrieval.selection import Selected, is_bare, select
from tests.retrieval.conftest import MODES, MakeFile, OpenKb, names

TABLE = "| key | days |\n|---|---|\n| vault | 30 |\n| gate | 60 |\n| tower | 90 |"


def chunk(text: str, number: int = 1, title: str = "", path: Sequence[str] = (), record: str | None = None) -> Chunk:
    return Chunk(ChunkId(number), DocumentId(f"d{number}"), 0, text, title, tuple(path), record_id=record)


@pytest.mark.parametrize("text", ["", "|---|---|", "| 1 | 2 |", "====", "References", "Footnotes\n---", "About us"])
def test_rules_and_headings_are_bare(text: str) -> None:
    assert is_bare(chunk(text, title="PEP 650"))


@pytest.mark.parametrize(
    "text", ["None.", "Yes!", "port 8321", "Keys rotate every month", '"None."', "\u5bc6\u94a5\u6bcf\u6708\u8f6e\u6362"]
)
def test_short_answers_are_not_bare(text: str) -> None:
    assert not is_bare(chunk(text, title="PEP 802"))


def test_short_text_is_bare_if_it_repeats_its_heading_only() -> None:
    assert is_bare(chunk("Examples", title="Examples")) and is_bare(chunk("---", record="7"))
    assert not is_bare(chunk("Hypertext Transfer Protocol", title="HTTP", record="7"))
    assert is_bare(chunk("Key rotation", title="Vault", path=["Key rotation"]))
    assert not is_bare(chunk("Not planned", title="Vault", path=["Key rotation"]))


TEXTS = st.sampled_from(["one text of eight words that counts here", "another text of at least four words", "Heading"])


@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=60), st.integers(1, 30))
def test_selection_equals_that_of_all_chunks_at_once(drawn: list[tuple[str, bool]], num: int) -> None:
    chunks = {
        ChunkId(at): chunk(f"{text}{' ' * at}", at, title=f"t{at % 3}")
        for at, (text, exists) in enumerate(drawn)
        if exists
    }
    ranking = [(ChunkId(at), -float(at)) for at in range(len(drawn))]
    found = select(ranking, lambda ids: {one: chunks[one] for one in ids if one in chunks}, num)

    firsts: dict[object, Chunk] = {}
    for one in chunks.values():
        text = " ".join(one.text.split())
        firsts.setdefault(text if len(text.split()) >= 8 else (one.heading, text), one)
    expected = sorted(firsts.values(), key=lambda one: (one.text.strip() == "Heading", one.chunk_id))[:num]
    assert [one.chunk for one in found] == expected
    for selected in found:
        kept = selected.chunk
        assert all(" ".join(copy.text.split()) == " ".join(kept.text.split()) for copy in selected.copies)
        assert selected == Selected(kept, -float(kept.chunk_id), selected.copies)


@pytest.mark.parametrize("mode", MODES)
def test_copies_of_a_table_fill_one_place(open_kb: OpenKb, make_file: MakeFile, docs: Path, mode: str) -> None:
    for number in range(5):
        make_file(f"copy{number}.md", f"# Vault {number}\n\n{TABLE}\n")
    make_file("other.md", "# Keys\n\nDays of the keys of the vault are counted from the first of May.\n")
    make_file("sub/copy.md", f"# Vault 9\n\n{TABLE}\n")
    kb = open_kb()
    kb.add([docs])
    found = kb.search("vault key days", mode=mode, top_k=2)  # type: ignore[arg-type]
    assert len(found.results) == 2 and "other.md" in names(found)
    [table] = [scored for scored in found.results if scored.copies]
    shown = [Path(one.document_id).name for one in (table.chunk, *table.copies)]
    assert sorted(shown) == ["copy.md", *(f"copy{number}.md" for number in range(5))]

    [table] = kb.search("vault key days", where="path ~ sub/").results
    assert Path(table.chunk.document_id).parent.name == "sub" and table.copies == ()


def test_bare_heading_is_found_after_the_texts(open_kb: OpenKb, make_file: MakeFile, docs: Path) -> None:
    make_file("heading.txt", "Rotation\n")
    make_file("text.md", "# Vault\n\nThe rotation of keys happens every thirty days.\n")
    make_file("other.md", "# Cats\n\nCats sleep most of the day, and hunt at night.\n")
    kb = open_kb()
    kb.add([docs])
    found = [Path(one.chunk.document_id).name for one in kb.search("rotation").results]
    assert found[0] == "text.md" and found[-1] == "heading.txt"
    assert names(kb.search("rotation", where="type = txt")) == {"heading.txt"}
