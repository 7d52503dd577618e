"""Writes settings as environment variables, from which `load_config` of a child process reads them."""

from collections.abc import Collection

from stillroom.config.load import settings
from stillroom.config.settings import StillroomConfig


def as_environment(config: StillroomConfig, leave_out: Collection[str] = ()) -> dict[str, str]:
    """Return every setting by the name of its variable, also those that have their default value.

    Secrets are left out: they come from the environment, which a child process inherits.

    Args:
        leave_out: sections and settings, such as `engine` and `server.port`.
    """
    found = {}
    for setting in settings().values():
        if setting.is_secret or setting.section in leave_out or setting.path in leave_out:
            continue
        value = getattr(getattr(config, setting.section), setting.name)
        found[setting.env_name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found
