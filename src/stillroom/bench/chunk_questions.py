"""Questions with the chunks they are asked over, from a JSON-lines file, one object a line.

`chunks` (texts, in order) and `question` are needed; `answer` is compared with what the model says, `kind` groups the
results. Markers of a prompt format around the texts (`<chunk> ... </chunk>`, `<q> ... <a>`) are left out: the model has
its own.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import UsageError


@dataclass(frozen=True, slots=True)
class ChunkQuestion:
    chunks: tuple[Chunk, ...]
    question: str
    answer: str | None
    kind: str


def load_questions(path: Path, limit: int | None = None) -> list[ChunkQuestion]:
    """Raises UsageError: a line is not such an object; the message says which."""
    found: list[ChunkQuestion] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(found) == limit:
                break
            if line.strip():
                found.append(_parse(line, f"{path}, line {number}"))
    if not found:
        raise UsageError(f"{path} has no questions")
    return found


def new_chunk(text: str, place: int = 0) -> Chunk:
    """Named by its text."""
    name = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
    return Chunk(ChunkId(name), DocumentId("question"), place, text)


def _parse(line: str, where: str) -> ChunkQuestion:
    try:
        row = json.loads(line)
        texts, question = row["chunks"], row["question"]
        answer, kind = row.get("answer"), row.get("kind", "all")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: not an object with `chunks` and `question` ({error})") from error
    is_text = all(isinstance(text, str) and text.strip() for text in [question, kind, *texts])
    if not is_text or not texts or not (answer is None or isinstance(answer, str)):
        raise UsageError(f"{where}: `chunks` must be a list of texts, `question`, `answer` and `kind` texts")
    plain = [text.removeprefix("<chunk> ").removesuffix(" </chunk>") for text in texts]
    chunks = tuple(new_chunk(text, place) for place, text in enumerate(plain))
    return ChunkQuestion(chunks, question.removeprefix("<q> ").removesuffix(" <a>"), answer, kind)
