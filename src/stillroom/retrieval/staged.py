"""How a search is cut into stages.

A staged search gives a list after each stage: the first ones are provisional, and the last is what the plain search
gives. So a model may begin to read the likely documents while the search goes on (RAGCache 5.3). Every index has a
`search_staged`, and so have `HybridSearch`, `KnowledgeBase` and `Stillroom`; whoever calls it may stop at any stage.
"""

NUM_STAGES = 4
"""Lists of a search where nothing else is asked for, as in RAGCache's figure 11."""


def stages(count: int, num_stages: int) -> list[range]:
    """At most `num_stages` runs of nearly equal length that cover `count` things; none is empty unless all are."""
    num = max(1, min(count, num_stages))
    return [range(count * stage // num, count * (stage + 1) // num) for stage in range(num)]
