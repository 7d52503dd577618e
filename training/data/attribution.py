"""Whose text the model learned from, under which licences: a file that ships with it."""

from training.data.sources import SOURCES

_LINKS = {
    "CC BY-SA 4.0": "https://creativecommons.org/licenses/by-sa/4.0/",
    "CC BY-SA 3.0": "https://creativecommons.org/licenses/by-sa/3.0/",
    "CC BY 4.0": "https://creativecommons.org/licenses/by/4.0/",
    "MIT": "https://opensource.org/license/mit",
    "public domain": "",
}


def attribution() -> str:
    """Markdown."""
    lines = [
        "# Attribution",
        "",
        "The model and its tokenizer were trained on parts of these works. The text was cut into passages, cleaned and",
        "turned into questions and answers; in some of them numbers, dates and names were exchanged for others.",
        "",
        "| work | licence |",
        "|---|---|",
    ]
    for source in SOURCES:
        link = _LINKS[source.licence]
        lines.append(f"| {source.credit} | {f'[{source.licence}]({link})' if link else source.licence} |")
    lines += [
        "",
        "Made-up worlds (people, companies, ships and towns that do not exist) were generated for this project.",
    ]
    return "\n".join(lines) + "\n"
