"""`POST /v1/rerank` and `/v2/rerank`: order texts by their relevance to a query, as Cohere's and Jina's clients ask.

The texts are the request's own. Nothing is searched or stored.
"""

import uuid
from typing import TYPE_CHECKING

from stillroom.errors import UsageError
from stillroom.retrieval.reranker import by_score
from stillroom.server.privacy import served_name
from stillroom.server.schemas.replies import (
    RerankApiVersion,
    RerankedText,
    RerankMeta,
    RerankReply,
    RerankResult,
    RerankUsage,
)
from stillroom.server.schemas.requests import RerankRequest

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

PATHS = ("/v1/rerank", "/v2/rerank")


def reranked(stillroom: "Stillroom", body: RerankRequest, path: str) -> RerankReply:
    """Score every document; blocks.

    Args:
        path: of the request, one of `PATHS`.

    Raises:
        UsageError: the query is blank, or no reranker is configured.
        ModelError: the reranker cannot be loaded.
    """
    if not body.query.strip():
        raise UsageError("the query is empty; send words or a question", param="query")
    texts = body.texts
    scores = stillroom.rerank(body.query, texts)
    results = [
        RerankResult(
            index=at,
            relevance_score=scores[at],
            document=RerankedText(text=texts[at]) if body.return_documents else None,
        )
        for at in by_score(scores)[: body.top_n]
    ]
    version = RerankApiVersion(version=path.removeprefix("/v").partition("/")[0])
    return RerankReply(
        id=str(uuid.uuid4()),
        model=served_name(stillroom.config.search.reranker),
        results=results,
        meta=RerankMeta(api_version=version),
        usage=RerankUsage(),
    )
