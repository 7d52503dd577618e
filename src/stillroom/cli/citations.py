"""Prints the sources and the citations of an answer."""

from pathlib import Path
from typing import TYPE_CHECKING

from stillroom.cli.console import line, place, write, write_link

if TYPE_CHECKING:
    from stillroom.rag.answer import Answer, Citation, CopyOfChunk, Source

_MARKS = {"partly": "partly supported", "unsupported": "not supported by the sources"}


def show_sources(answer: "Answer") -> None:
    """Print the documents of the prompt."""
    line()
    line("Sources:")
    for source in answer.sources:
        write(f"  {source.position}. {source.score:.4f}  ")
        _write_place(source)
        if source.also_in:
            line(f"     also in {', '.join(map(_place, source.also_in))}")


def show_citations(answer: "Answer") -> None:
    """Print the number, place and quote of each citation; no quote that is the whole answer, which stands above.

    The sentence itself is printed with its number where the quote does not hold it: if there are several sentences, or
    if its source supports it only partly or not at all.
    """
    if not answer.citations:
        return
    line()
    line("Citations:")
    has_several = len({citation.start for citation in answer.citations}) > 1
    shown = set()
    for citation in answer.citations:
        sentence = _on_one_line(answer.text[citation.start : citation.end])
        is_copy = sentence.rstrip(".").lower() in _on_one_line(citation.quote).lower()
        key = (citation.source, citation.quote_start, citation.quote_end, "" if is_copy else sentence)
        if key not in shown:
            is_whole = not has_several and _on_one_line(citation.quote) == sentence
            is_told = is_copy or not (has_several or _MARKS.get(citation.support))
            _show(citation, "" if is_told else sentence, "" if is_whole else _on_one_line(citation.quote))
        shown.add(key)


def _show(citation: "Citation", sentence: str, quote: str) -> None:
    mark = _MARKS.get(citation.support, "")
    if citation.source:
        write(f"  [{citation.source}] ")
        _write_place(citation, mark)
    else:
        line(f"  [-] {mark}")
    if sentence:
        line(f"      sentence: {sentence}" + (f" [{citation.source}]" if citation.source else ""))
    if quote:
        line(f"      {f'source: {quote}' if sentence else quote}")


def _write_place(cited: "Source | Citation", mark: str = "") -> None:
    write_link(_place(cited), _file_of(cited.document))
    line("".join(f"  {part}" for part in (cited.heading, mark and f"({mark})") if part))


def _place(cited: "Source | Citation | CopyOfChunk") -> str:
    return place(cited.document, (cited.start_line, cited.end_line), (cited.start_page, cited.end_page))


def _file_of(document: str) -> Path:
    """The file of a document, or of one record of it."""
    path = Path(document)
    return path if path.is_file() else Path(document.rpartition("#")[0] or document)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
