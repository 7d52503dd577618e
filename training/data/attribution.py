"""Writes the attribution file that ships with the model: sources and licences of its training text."""

from training.data.sources import SOURCES

LINKS = {
    "CC BY-SA 4.0": "https://creativecommons.org/licenses/by-sa/4.0/",
    "CC BY-SA 3.0": "https://creativecommons.org/licenses/by-sa/3.0/",
    "CC BY 4.0": "https://creativecommons.org/licenses/by/4.0/",
    "Apache-2.0": "https://www.apache.org/licenses/LICENSE-2.0",
    "MIT": "https://opensource.org/license/mit",
    "public domain": "",
}


def attribution() -> str:
    """Return the attribution as Markdown."""
    lines = [
        "# Attribution",
        "",
        "The model and its tokenizer were trained on parts of these works. The text was cut into passages, cleaned and",
        "turned into questions and answers; in some of them numbers, dates and names were replaced by others.",
        "",
        "| work | licence |",
        "|---|---|",
    ]
    for source in SOURCES:
        link = LINKS[source.licence]
        lines.append(f"| {source.credit} | {f'[{source.licence}]({link})' if link else source.licence} |")
    lines += [
        "",
        "Worlds of fictional people, companies, ships and towns were generated for this project.",
    ]
    return "\n".join(lines) + "\n"
