"""Each document is prepared by exactly one engine of a cluster, and few move when engines change."""

from collections import Counter

import pytest

from stillroom.cluster.document_share import HOLD_SECONDS, DocumentShare
from stillroom.core.ids import DocumentId

ENGINES = [f"http://10.0.0.{number}:9100" for number in range(4)]
DOCUMENTS = [DocumentId(f"{'folder/' * 20}{number}.md") for number in range(400)]
"""Their paths differ behind the first 64 bytes only."""


def homes(engines: list[str]) -> dict[DocumentId, str]:
    """Return who prepares each document, told by a front that knows these engines."""
    shares = {one: DocumentShare(waits=True) for one in engines}
    for one, share in shares.items():
        assert share.tell(engines, one, 0.0)
    found = {document: [one for one, share in shares.items() if share.has(document)] for document in DOCUMENTS}
    assert all(len(one) == 1 for one in found.values()), "each document has one home"
    return {document: one for document, (one,) in found.items()}


def test_every_document_has_one_home_and_engines_have_equal_shares() -> None:
    counts = Counter(homes(ENGINES).values())
    assert set(counts) == set(ENGINES) and max(counts.values()) < 1.35 * len(DOCUMENTS) / len(ENGINES)


def test_only_documents_of_a_lost_engine_get_another_home() -> None:
    before, after = homes(ENGINES), homes(ENGINES[:3])
    assert {before[one] for one in DOCUMENTS if before[one] != after[one]} == {ENGINES[3]}


@pytest.mark.parametrize(("waits", "expected"), [(True, False), (False, True)])
def test_share_before_anything_is_known_is_empty_in_a_cluster_and_else_all(waits: bool, expected: bool) -> None:
    assert {DocumentShare(waits=waits).has(one) for one in DOCUMENTS} == {expected}


def test_fronts_that_do_not_agree_change_nothing_while_the_first_one_lives() -> None:
    share = DocumentShare(waits=True)
    assert share.tell(ENGINES, ENGINES[0], 0.0) and share.num_changes == 1
    for at in range(1, 60):
        assert not share.tell(ENGINES, ENGINES[0], 0.5 * at)
        assert not share.tell(["http://engine-0:9100"], "http://engine-0:9100", 0.5 * at)
    last = 0.5 * 59
    assert not share.tell(ENGINES[:2], ENGINES[0], last + HOLD_SECONDS - 0.1)
    assert share.tell(ENGINES[:2], ENGINES[0], last + HOLD_SECONDS) and share.num_changes == 2
