"""What must be settled before a server listens: who is asked for keys, and whether the address may be had without."""

from dataclasses import dataclass
from pathlib import Path

from stillroom.config.settings import ServerConfig
from stillroom.errors import ConfigError
from stillroom.server.auth.guard import is_loopback
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import DEFAULT_TENANT, NO_PLACE


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Checked settings."""

    keys: KeyRing | None
    tenants_folder: Path | None
    warnings: tuple[str, ...] = ()


def open_doorway(config: ServerConfig) -> AccessConfig:
    """Fails closed, before a model loads.

    Raises:
        ConfigError: other machines would reach it without keys, the keys cannot be read, or all are of tenants that
            have no place.
    """
    keys = KeyRing(Path(config.keys_file)) if config.keys_file else None
    folder = Path(config.tenants_folder) if config.tenants_folder else None
    warnings: tuple[str, ...] = ()
    if keys is None and not is_loopback(config.host):
        if not config.insecure:
            raise ConfigError(
                f"other machines can reach {config.host}, and nobody would be asked for a key; make keys "
                "(stillroom keys add NAME --keys keys.json) and serve with --keys keys.json, or, in a network that is "
                "guarded otherwise, with --insecure"
            )
        warnings = (f"everybody who reaches {config.host} may ask, add and delete: no keys are asked for (--insecure)",)
    if folder is None and keys is not None:
        tenants = {row.tenant for row in keys.rows}
        homeless = ", ".join(sorted(tenants - {DEFAULT_TENANT}))
        if homeless and DEFAULT_TENANT not in tenants:
            raise ConfigError(f"all keys are of other tenants than {DEFAULT_TENANT!r} ({homeless}): {NO_PLACE}")
        if homeless:
            warnings += (f"keys of the tenants {homeless} are refused: {NO_PLACE}",)
    return AccessConfig(keys, folder, warnings)
