"""Opens the KV tier that several processes share, as configured."""

from stillroom.config.settings import ReuseConfig
from stillroom.config.tier_address import parse_tier_address
from stillroom.core.clock import Clock
from stillroom.errors import ConfigError
from stillroom.kvstore.shared.folder_records import FolderRecords
from stillroom.kvstore.shared.records import SharedRecords
from stillroom.kvstore.shared.redis_records import RedisRecords
from stillroom.kvstore.shared.shared_tier import SharedTier, TierOptions
from stillroom.kvstore.shared.signing import SIGNATURE_SIZE, Signer


def open_tier(config: ReuseConfig, fingerprint: bytes, clock: Clock, *, is_pinned: bool) -> SharedTier | None:
    """Open the tier of `reuse.kv_tier` and measure it; None if none is configured.

    A tier that cannot be reached is logged and tried again later.

    Args:
        fingerprint: of the model and the type of its KV.
        is_pinned: read into page-locked memory.

    Raises:
        ConfigError: the address names a file where a folder is needed.
    """
    if not config.kv_tier:
        return None
    address = parse_tier_address("reuse.kv_tier", config.kv_tier)
    signer = Signer(config.kv_tier_key, fingerprint) if config.kv_tier_key else None
    group = "" if signer is None else signer.group
    records: SharedRecords
    if address.folder is not None:
        if address.folder.is_file():
            raise ConfigError(f"reuse.kv_tier={address.public} is a file; name a folder that exists")
        records = FolderRecords(
            address.folder,
            fingerprint,
            group=group,
            trailer_size=0 if signer is None else SIGNATURE_SIZE,
            max_bytes=config.kv_tier_bytes,
            ttl=config.kv_tier_ttl_s,
            now=clock.unix,
        )
    else:
        records = RedisRecords(
            address,
            fingerprint,
            group=group,
            timeout_seconds=config.kv_tier_timeout_s,
            ttl=config.kv_tier_ttl_s,
            now=clock.unix,
        )
    options = TierOptions(config.kv_tier_timeout_s, config.prefetch_bytes)
    name = f"the KV tier {address.public}"
    tier = SharedTier(records, fingerprint, clock, options, signer=signer, is_pinned=is_pinned, name=name)
    tier.wait_for_probe()
    return tier
