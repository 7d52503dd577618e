"""Changes settings in a TOML file and leaves everything else in it as it is, comments and order too."""

import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.config.load import load_config
from stillroom.errors import ConfigError

Value = int | float | bool | str


@dataclass(frozen=True, slots=True)
class SettingChange:
    """Of one setting in the file."""

    path: str
    """`section.field`."""
    before: object
    """None where the file did not say."""
    after: Value


def edit_file(file: Path, values: Mapping[str, Value]) -> list[SettingChange]:
    """Write settings, by `section.field`, into a file that need not exist, all of them or none; returns what changed.

    Raises:
        ConfigError: the file cannot be read, written or changed, or would not be valid; it is as it was.
    """
    file = Path(os.path.realpath(file))  # a link stays a link
    try:
        text = file.read_text(encoding="utf-8-sig") if file.exists() else ""
        before = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    known = {path: _get(before, path) for path in values}
    changes = [SettingChange(path, known[path], value) for path, value in values.items() if known[path] != value]
    if not changes:
        return []
    edited = with_settings(text, {change.path: change.after for change in changes})
    wanted = _merged(before, changes)
    try:
        is_right = tomllib.loads(edited) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        lines = ", ".join(f"{change.path} = {_toml(change.after)}" for change in changes)
        raise ConfigError(f"{file} is written in a way that cannot be changed by itself; set by hand: {lines}")
    _write(file, edited)
    return changes


def with_settings(text: str, values: Mapping[str, Value]) -> str:
    """TOML text in which these settings have these values. Understands `[section]` and `name = value` on one line."""
    lines = text.splitlines()
    for path, value in values.items():
        section, _, name = path.partition(".")
        setting = f"{name} = {_toml(value)}"
        start = next((at for at, line in enumerate(lines) if _header(line) == section), None)
        if start is None:
            lines += ["", f"[{section}]", setting] if lines else [f"[{section}]", setting]
            continue
        end = next((at for at in range(start + 1, len(lines)) if _header(lines[at]) is not None), len(lines))
        found = next((at for at in range(start + 1, end) if re.match(rf"\s*{re.escape(name)}\s*=", lines[at])), None)
        if found is None:
            lines.insert(start + 1, setting)
        else:
            comment = re.search(r"\s+#[^\"']*$", lines[found])
            lines[found] = setting + (comment[0] if comment else "")
    return "\n".join(lines) + "\n"


def _header(line: str) -> str | None:
    """The section that begins here."""
    match = re.match(r"\s*\[\s*([A-Za-z0-9_.\"-]+)\s*\]\s*(#.*)?$", line)
    return match[1] if match else None


def _get(content: Mapping[str, Any], path: str) -> object:
    section, _, name = path.partition(".")
    table = content.get(section)
    return table.get(name) if isinstance(table, dict) else None


def _merged(content: Mapping[str, Any], changes: list[SettingChange]) -> dict[str, Any]:
    merged = {name: dict(table) if isinstance(table, dict) else table for name, table in content.items()}
    for change in changes:
        section, _, name = change.path.partition(".")
        merged.setdefault(section, {})[name] = change.after
    return merged


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def _write(file: Path, text: str) -> None:
    """At once, and only if it can be loaded."""
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
