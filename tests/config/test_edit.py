"""Settings written into a file that somebody else has written."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.edit import SettingChange, edit_file, with_settings
from stillroom.config.load import load_config
from stillroom.errors import ConfigError

WRITTEN = """\
# ours
[search]
top_k = 7  # not more

[reuse]
# how far
mode = "exact"
host_bytes = "1GiB" # old

[runtime]
model = "bundled"
"""


def test_a_file_keeps_everything_else(tmp_path: Path) -> None:
    file = tmp_path / "stillroom.toml"
    file.write_text(WRITTEN, encoding="utf-8-sig")

    changes = edit_file(file, {"reuse.host_bytes": 5, "reuse.disk_bytes": 6, "runtime.kv_bytes": 7, "server.port": 80})

    assert changes == [
        SettingChange("reuse.host_bytes", "1GiB", 5),
        SettingChange("reuse.disk_bytes", None, 6),
        SettingChange("runtime.kv_bytes", None, 7),
        SettingChange("server.port", None, 80),
    ]
    expected = WRITTEN.replace('host_bytes = "1GiB" # old', "host_bytes = 5 # old")
    expected = expected.replace("[reuse]\n", "[reuse]\ndisk_bytes = 6\n").replace(
        "[runtime]\n", "[runtime]\nkv_bytes = 7\n"
    )
    assert file.read_text() == expected + "\n[server]\nport = 80\n"
    loaded = load_config(file, env={})
    assert (loaded.search.top_k, loaded.reuse.host_bytes, loaded.runtime.kv_bytes) == (7, 5, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["stillroom.toml"], "nothing is left beside it"


def test_the_same_again_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    edit_file(file, {"reuse.host_bytes": 5})
    before = file.stat().st_mtime_ns

    assert edit_file(file, {"reuse.host_bytes": 5}) == []
    assert file.stat().st_mtime_ns == before


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    real.write_text(WRITTEN)
    link.symlink_to(real)
    edit_file(link, {"reuse.host_bytes": 5})
    assert link.is_symlink() and "host_bytes = 5" in real.read_text()


@pytest.mark.parametrize(
    "written",
    ["reuse = { host_bytes = 1 }\n", "reuse.host_bytes = 1\n", '[reuse]\n"host_bytes" = 1\n'],
)
def test_what_cannot_be_changed_by_itself_is_left_and_said(tmp_path: Path, written: str) -> None:
    file = tmp_path / "stillroom.toml"
    file.write_text(written)
    with pytest.raises(ConfigError, match=r"by hand: reuse\.host_bytes = 5"):
        edit_file(file, {"reuse.host_bytes": 5})
    assert file.read_text() == written


def test_a_value_that_is_not_possible_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "stillroom.toml"
    file.write_text(WRITTEN)
    with pytest.raises(ConfigError, match="server.port"):
        edit_file(file, {"server.port": 99999})
    assert file.read_text() == WRITTEN and len(list(tmp_path.iterdir())) == 1


def test_a_broken_file_is_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "stillroom.toml"
    file.write_text("[reuse\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        edit_file(file, {"reuse.host_bytes": 5})


NAMES = st.sampled_from(["a.x", "a.y", "b.x", "c.z"])
TABLES = st.dictionaries(NAMES, st.integers(0, 9), max_size=4)


@given(TABLES, TABLES)
def test_the_text_says_what_was_asked_for(before: dict[str, int], wanted: dict[str, int]) -> None:
    text = with_settings("", before) if before else ""
    found = tomllib.loads(with_settings(text, wanted)) if wanted else tomllib.loads(text)
    flat = {f"{section}.{name}": value for section, table in found.items() for name, value in table.items()}
    assert flat == before | wanted
