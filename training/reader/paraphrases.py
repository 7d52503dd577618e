"""Held-out questions in other words: they ask the same with few words of the passage.

`paraphrases.jsonl` holds a paraphrase of 174 held-out questions by people and technical ones, written for this project
without looking at the reader's answers. It is for measuring only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from training.reader.examples import read_rows
from training.reader.held_out import HeldOutQuestion

PARAPHRASES = Path(__file__).with_name("paraphrases.jsonl")


def key_of(passage: str) -> str:
    """Return the key of a passage in the file."""
    return blake2b(passage.encode(), digest_size=8).hexdigest()


def in_other_words(
    sets: Mapping[str, Sequence[HeldOutQuestion]], path: Path = PARAPHRASES
) -> dict[str, list[HeldOutQuestion]]:
    """Return the questions of each set that have a paraphrase: in their first words, and in other words.

    Sets without paraphrases are left out.

    Args:
        path: JSON lines with `passage` (its key), `question` and `paraphrase`.
    """
    paraphrases = {(row["passage"], row["question"]): row["paraphrase"] for row in read_rows(path)}
    found: dict[str, list[HeldOutQuestion]] = {}
    for name, questions in sets.items():
        texts = [paraphrases.get((key_of(one.gold.text), one.text)) for one in questions]
        asked = [(one, text) for one, text in zip(questions, texts, strict=True) if text is not None]
        if asked:
            found[f"{name}: those with a paraphrase"] = [one for one, _ in asked]
            found[f"{name}: paraphrased"] = [replace(one, text=text) for one, text in asked]
    return found
