"""A few documents in the vocabulary of the bundled model."""

from pathlib import Path

PEOPLE = """# People

## Dola Kenric

The mentor of Dola Kenric was Tivia Yevman. Dola Kenric was employed by Yunder Bank. Dola Kenric bought the ship Perint.

## Cirik Prurs

The birthplace of Cirik Prurs was Tunstead. As a student Cirik Prurs chose chemistry.

## Jatha Jurlow

The birth of Jatha Jurlow is dated 1740. As a student she chose logic. Jatha Jurlow later moved to Wunwick.
"""

QUESTION = "Which company employed Dola Kenric ?"
ANSWER = "Yunder Bank"


def write_knowledge(folder: Path) -> Path:
    """Write a folder of documents."""
    folder.mkdir()
    (folder / "people.md").write_text(PEOPLE, encoding="utf-8")
    (folder / "notes.txt").write_text("Yunder Bank was founded in the year 1720 .\n", encoding="utf-8")
    return folder
