"""The address of the shared tier: what is understood, and messages that name the remedy and no password."""

from pathlib import Path

import pytest

from stillroom.config.settings import ReuseConfig
from stillroom.config.tier_address import TierAddress, parse_tier_address
from stillroom.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///shared/kv%20tier", TierAddress(folder=Path("/shared/kv tier"))),
        ("valkey://cache", TierAddress(host="cache", scheme="valkey")),
        ("redis://cache:7000/2", TierAddress(host="cache", port=7000, database=2)),
        ("redis://[::1]:7000", TierAddress(host="::1", port=7000)),
        (
            "rediss://anna:p%40ss@cache/0?ca=/etc/ca.pem&prefix=team-a",
            TierAddress(
                host="cache", user="anna", password="p@ss", scheme="rediss", ca_file="/etc/ca.pem", prefix="team-a"
            ),
        ),
        ("valkeys://:secret@cache", TierAddress(host="cache", password="secret", scheme="valkeys")),
    ],
)
def test_addresses(text: str, expected: TierAddress) -> None:
    assert parse_tier_address("reuse.kv_tier", text) == expected
    assert expected.folder or text.startswith(expected.public.partition("://")[0] + "://")
    assert "secret" not in repr(expected) and "p@ss" not in repr(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://cache", "begins with no scheme of a tier; write valkey://"),
        ("cache:6379", "begins with no scheme"),
        ("valkey://", "names no host"),
        ("valkey://:hidden@/0", "names no host"),
        ("valkey://:hidden@cache/main", "in the place of the database; leave it out"),
        ("valkey://cache:99999", "is not an address"),
        ("valkey://cache?prefx=a", "prefix=NAME and ca=FILE exist"),
        ("file://shared/folder", "three slashes"),
        ("redis://127.0.0.1:18123?password=hidden", "unknown option"),
        ("redis://u:1?hidden@cache", "unknown option"),
        ("redis://u:1#hidden@cache", "has a # in it; percent-encode"),
        ("redis://u:se@cret/hidden@127.0.0.1:99999", "percent-encode"),
        ("redis://u:hidden/1@cache", "percent-encode"),
        ("hidden:u@cache", "no scheme"),
        ("file://u:hidden@cache/0", "three slashes"),
    ],
)
def test_bad_addresses_are_refused_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="reuse.kv_tier") as refused:
        ReuseConfig(kv_tier=text)
    assert message in str(refused.value) and "hidden" not in str(refused.value)
