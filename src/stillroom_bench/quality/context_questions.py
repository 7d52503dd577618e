"""Questions over whole documents, for `stillroom bench contexts`; a JSON-lines file of one of two forms.

- `documents` (each a list of chunks), `retrieved` and `needed` (pairs of document and chunk: the search result in the
  order of the documents, and the chunks that the answer needs, the one that names its subject first), `question`,
  `answer`, and optionally `kind` and `distance` (chunks between the fact and the chunk that names its subject).
- `chunks`, `question`, `answer`, `kind` and `needed_chunks`, as of microworld: one document, all of it retrieved.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import UsageError

Place = tuple[int, int]
"""Document and chunk."""


@dataclass(frozen=True, slots=True)
class ContextQuestion:
    documents: tuple[tuple[Chunk, ...], ...]
    retrieved: tuple[Place, ...]
    needed: tuple[Place, ...]
    question: str
    answer: str
    kind: str
    distance: int

    def chunk(self, place: Place) -> Chunk:
        return self.documents[place[0]][place[1]]

    def orders(self, seed: int) -> dict[str, list[Place]]:
        """Return the search results to ask with: in the order of the documents, shuffled, and, where the answer needs
        more than one chunk, shuffled without the one that names its subject."""
        shuffled = list(self.retrieved)
        random.Random(f"{seed} {self.question}").shuffle(shuffled)
        found = {"in order": list(self.retrieved), "shuffled": shuffled}
        if len(self.needed) > 1:
            found["subject not retrieved"] = [place for place in shuffled if place != self.needed[0]]
        return found


Before = Callable[[ContextQuestion, Place], list[Place]]
"""Returns the chunks in view when a chunk is prepared, in order."""


def alone(question: ContextQuestion, place: Place) -> list[Place]:
    """See `Before`: nothing."""
    return []


def whole_document(question: ContextQuestion, place: Place) -> list[Place]:
    """See `Before`: all chunks of the document up to this one."""
    return preceding(place, 0)


def preceding(place: Place, first: int) -> list[Place]:
    """Return the chunks of the document from `first` up to this one."""
    return [(place[0], chunk) for chunk in range(max(first, 0), place[1])]


def read_questions(path: Path, limit: int | None = None) -> list[ContextQuestion]:
    """Read questions from a file, at most `limit`.

    Raises:
        UsageError: the file has none, or a line has another form; the message names the line.
    """
    found = list(_lines(path, limit))
    if not found:
        raise UsageError(f"{path} has no questions")
    return found


def _lines(path: Path, limit: int | None) -> Iterator[ContextQuestion]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and number > limit:
                return
            if not line.strip():
                continue
            try:
                yield _question(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise UsageError(
                    f"{path}, line {number}: not a question with `documents`, `retrieved`, `needed` and `answer`, or "
                    f"with `chunks`, `needed_chunks` and `answer` ({error!r})"
                ) from error


def _question(row: dict[str, Any]) -> ContextQuestion:
    if "documents" in row:
        texts, retrieved, needed = row["documents"], row["retrieved"], row["needed"]
    else:
        texts = [row["chunks"]]
        retrieved = [(0, place) for place in range(len(row["chunks"]))]
        needed = [(0, place) for place in row["needed_chunks"]]
    documents = tuple(_document(number, chunks) for number, chunks in enumerate(texts))
    found = ContextQuestion(
        documents,
        tuple((int(document), int(chunk)) for document, chunk in retrieved),
        tuple((int(document), int(chunk)) for document, chunk in needed),
        row["question"].removeprefix("<q> ").removesuffix(" <a>"),
        row["answer"],
        row.get("kind", "all"),
        int(row.get("distance", len(needed) - 1)),
    )
    for place in (*found.retrieved, *found.needed):
        if min(place) < 0:
            raise ValueError(f"{place} is no document and chunk")
        found.chunk(place)  # raises IndexError
    texts_of = [found.question, found.answer, *(chunk.text for document in documents for chunk in document)]
    if not found.retrieved or not all(isinstance(text, str) and text.strip() for text in texts_of):
        raise ValueError("nothing is retrieved, or a text is empty")
    return found


def renumbered(document: Sequence[Chunk], number: int) -> tuple[Chunk, ...]:
    """Return the document as the `number`-th of a question."""
    return _document(number, [chunk.text for chunk in document])


def _document(number: int, texts: Sequence[str]) -> tuple[Chunk, ...]:
    plain = [text.removeprefix("<chunk> ").removesuffix(" </chunk>") for text in texts]
    name = DocumentId(f"document {number}")
    return tuple(Chunk(ChunkId(10_000 * (number + 1) + place), name, place, text) for place, text in enumerate(plain))
