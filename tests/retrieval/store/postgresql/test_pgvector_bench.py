"""The arms of `stillroom bench index` that measure pgvector, in a real server."""

import numpy as np
import pytest

from stillroom.config.settings import IndexConfig
from stillroom.errors import UsageError
from stillroom.retrieval.index.flat import FlatIndex
from stillroom_bench.quality.index_pgvector import PgvectorRun, check_url, pgvector_arms
from stillroom_bench.quality.search_arms import K
from tests.retrieval.index.test_qdrant_index import D, unit
from tests.retrieval.store.postgresql.shared_machines import execute

pytestmark = pytest.mark.postgres


def test_password_would_be_in_the_report() -> None:
    check_url("postgresql://anna@host/docs")
    with pytest.raises(UsageError, match="PGPASSWORD"):
        check_url("postgresql://anna:secret@host/docs")


def test_recall_is_that_of_the_product_and_nothing_is_left(database: str) -> None:
    execute(database, "CREATE EXTENSION vector")
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 1200), unit(rng, 10)
    flat = FlatIndex(D)
    flat.add(np.arange(1200, dtype=np.int64), vectors)
    truth = flat.exact(queries, K)
    config = IndexConfig(kind="pgvector", m=4, ef_construction=10)
    found: dict[str, float] = {}
    with pgvector_arms(PgvectorRun(database, config, (1, 400)), vectors, queries, truth) as (arms, costs):
        for arm in arms:
            found[arm.name] = arm.run(0)["ann_recall_at_10"]
    assert list(found) == ["1,200 pgvector m=4 ef=1", "1,200 pgvector m=4 ef=400", "1,200 pgvector exact"]
    few, many, exact = found.values()
    assert few < many <= exact == 1.0, "the effort is used"
    assert costs["vectors"] == 1200 and costs["indexes MiB"] > 0
    assert execute(database, "SELECT count(*) FROM stillroom.knowledge_bases") == [(0,)]
    assert execute(database, "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'embeddings%'") == [(0,)]
