"""The text of an answer in which `[n]` names only sources that exist, as a grammar for llguidance."""

_OPEN, _CLOSE = r"[\[\x{3010}]\s*", r"\s*[\]\x{3011}]"
_SEPARATOR = r"\s*[,;]\s*"


def source_number_grammar(num_sources: int) -> str:
    """Return a Lark grammar of every text without a number of a source that does not exist.

    `[1]`, `[1][2]`, `[1, 2]` and `[note]` are allowed for two sources; `[0]`, `[3]` and `[1, 3]` are not, in code
    neither.
    """
    number = rf"0*({_above(num_sources)}|0)"
    marker = rf"{_OPEN}([0-9]+{_SEPARATOR})*{number}({_SEPARATOR}[0-9]+)*{_CLOSE}"
    return f"start: TEXT\nTEXT: /(?s:.)*/ & ~/(?s:.)*{marker}(?s:.)*/\n"


def _above(limit: int) -> str:
    """Return a pattern of the numbers above a limit, without zeros in front."""
    digits = str(limit)
    patterns = [rf"[1-9][0-9]{{{len(digits)},}}"]  # more digits
    for place, digit in enumerate(digits):
        if digit != "9":
            patterns.append(rf"{digits[:place]}[{int(digit) + 1}-9][0-9]{{{len(digits) - place - 1}}}")
    return "|".join(patterns)
