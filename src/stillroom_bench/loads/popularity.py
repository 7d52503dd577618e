"""Names of the documents' popularity curves. Imports nothing heavy, because option classes use them."""

from typing import Literal

Companions = Literal["drawn", "fixed"]
"""Source of the documents after the first. `drawn`: each is drawn from the curve independently. `fixed`: one list per
first document, because a search that finds the same document often finds the same others."""

CURVES = {"mmlu": 0.60, "nq": 0.30}
"""Share of requests for the most popular 3 % of documents. RAGCache 3.2 gives the share of MMLU and says that that of
Natural Questions is lower; its value here is Stillroom's choice."""
