"""How unequally documents are asked for, by name; imports nothing heavy."""

from typing import Literal

Companions = Literal["drawn", "fixed"]
"""Where the documents after the first come from. `drawn`: each from the curve, on its own. `fixed`: one list per first
document, as a search that finds the same document finds the same others."""

CURVES = {"mmlu": 0.60, "nq": 0.30}
"""Share of requests that the most popular 3 % of documents take. RAGCache 3.2 gives the share of MMLU and says that
the one of Natural Questions is less; how much less is our choice."""
