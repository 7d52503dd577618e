"""Changes settings in a TOML file and keeps the rest of the file, comments and order included."""

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from stillroom.config.load import load_config
from stillroom.errors import ConfigError

SettingValue = int | float | bool | str


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting, before and after a change."""

    path: str
    """`section.field`."""
    before: object
    """None if `edit_file` did not find it in the file."""
    after: SettingValue


def edit_file(file: Path, values: Mapping[str, SettingValue]) -> list[SettingChange]:
    """Write settings, by `section.field`, into a file: all of them or none. A missing file is created.

    Raises:
        ConfigError: the file cannot be read or written, or the result is not a valid configuration. The file stays
            as it was.
    """
    file = Path(os.path.realpath(file))  # a link stays a link
    changes = []
    try:
        document = tomlkit.parse(file.read_text(encoding="utf-8-sig") if file.exists() else "")
        for path, value in values.items():
            section, _, name = path.partition(".")
            table = document.setdefault(section, tomlkit.table())
            if not isinstance(table, MutableMapping):
                raise ConfigError(f"{file}: {section} is a section; write [{section}] and its settings below it")
            before = table.get(name)
            if before != value:
                changes.append(SettingChange(path, before, value))
                table[name] = value
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if changes:
        _replace(file, tomlkit.dumps(document))
    return changes


def _replace(file: Path, text: str) -> None:
    """Replace the file in one step, after checking that `load_config` accepts the text."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        try:
            load_config(Path(new.name), env={})
            os.chmod(new.name, file.stat().st_mode & 0o777 if file.exists() else 0o644)
            os.replace(new.name, file)
        except BaseException:
            os.unlink(new.name)
            raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
