"""The report of an admission is pure: the tree, its statistics and the lease do not change."""

from dataclasses import astuple

from stillroom.core.kv import Tier
from stillroom.core.reuse import Reason
from stillroom.kvcache.reuse_report import AdmissionReuse, report_admission
from tests.kvcache.tree_fixture import SIZE, TreeFixture


def test_report_admission_changes_nothing() -> None:
    fixture = TreeFixture(16, host_bytes=100)
    fixture.serve(1, 2)
    lease = fixture.lease(1, 3)
    assert fixture.admit(lease) == 2 * SIZE
    first, stats = lease.reuse, astuple(fixture.tree.stats)
    recency = [node.recency for node in fixture.tree]

    found = AdmissionReuse(lease.nodes, [Tier.DEVICE, Tier.DEVICE], 2, lease.prompt.num_tokens, {})
    report = report_admission(fixture.tree, lease, found)

    assert report.reuse == first and lease.reuse is first
    assert report.sources == [(Tier.DEVICE, Reason.HIT)] * 2 + [(None, Reason.NEVER_SEEN)]
    assert astuple(fixture.tree.stats) == stats
    assert [node.recency for node in fixture.tree] == recency
    fixture.check(lease)
