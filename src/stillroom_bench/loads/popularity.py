"""Names of the documents' popularity curves. Imports nothing heavy, because option classes use them."""

from typing import Literal, get_args

from stillroom.errors import UsageError

Companions = Literal["drawn", "fixed"]
"""Source of the documents after the first. `drawn`: each is drawn from the curve independently. `fixed`: one list per
first document, because a search that finds the same document often finds the same others."""

CURVES = {"mmlu": 0.60, "nq": 0.30}
"""Share of requests for the most popular 3 % of documents. RAGCache 3.2 gives the share of MMLU and says that that of
Natural Questions is lower; its value here is Stillroom's choice."""


def check_traffic(curves: tuple[str, ...], companions: str) -> None:
    """Raises UsageError: a name is unknown."""
    if unknown := set(curves) - set(CURVES):
        raise UsageError(f"unknown curves {', '.join(sorted(unknown))}; known are {', '.join(CURVES)}")
    if companions not in get_args(Companions):
        raise UsageError(f"unknown companions {companions!r}; known are {', '.join(get_args(Companions))}")
