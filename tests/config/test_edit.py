"""`config.edit` changes settings of a TOML file and keeps everything else in it."""

import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.edit import SettingChange, edit_file
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


def test_edit_keeps_comments_order_and_other_settings(tmp_path: Path) -> None:
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
    expected = expected.replace("# old\n", "# old\ndisk_bytes = 6\n") + "kv_bytes = 7\n"
    assert file.read_text() == expected + "\n[server]\nport = 80\n"
    loaded = load_config(file, env={})
    assert (loaded.search.top_k, loaded.reuse.host_bytes, loaded.runtime.kv_bytes) == (7, 5, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["stillroom.toml"], "no temporary file is left"


def test_setting_the_same_value_again_does_not_write_the_file(tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    edit_file(file, {"reuse.host_bytes": 5})
    before = file.stat().st_mtime_ns

    assert edit_file(file, {"reuse.host_bytes": 5}) == []
    assert file.stat().st_mtime_ns == before


def test_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    real.write_text(WRITTEN)
    link.symlink_to(real)
    edit_file(link, {"reuse.host_bytes": 5})
    assert link.is_symlink() and "host_bytes = 5" in real.read_text()


@pytest.mark.parametrize(
    "written",
    [
        "reuse = { host_bytes = 1 }\n",
        "reuse.host_bytes = 1\n",
        '[reuse]\n"host_bytes" = 1\n',
        "[reuse]\r\nhost_bytes=1",
    ],
)
def test_every_way_to_write_a_setting_can_be_edited(tmp_path: Path, written: str) -> None:
    file = tmp_path / "stillroom.toml"
    file.write_text(written, newline="")
    assert edit_file(file, {"reuse.host_bytes": 5}) == [SettingChange("reuse.host_bytes", 1, 5)]
    assert file.read_text() == written.replace("1", "5").replace("\r", "")


def test_value_in_place_of_a_section_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "stillroom.toml"
    file.write_text("reuse = 5\n")
    with pytest.raises(ConfigError, match=r"write \[reuse\]"):
        edit_file(file, {"reuse.host_bytes": 5})
    assert file.read_text() == "reuse = 5\n"


def test_impossible_value_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "stillroom.toml"
    file.write_text(WRITTEN)
    with pytest.raises(ConfigError, match="server.port"):
        edit_file(file, {"server.port": 99999})
    assert file.read_text() == WRITTEN and len(list(tmp_path.iterdir())) == 1


def test_file_that_is_not_toml_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "stillroom.toml"
    file.write_text("[reuse\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        edit_file(file, {"reuse.host_bytes": 5})


NAMES = st.sampled_from(["search.top_k", "search.num_candidates", "runtime.max_num_seqs", "index.m"])
SETTINGS = st.dictionaries(NAMES, st.integers(2, 9), max_size=4)


@given(SETTINGS, SETTINGS)
def test_edited_file_holds_the_old_and_the_new_settings(before: dict[str, int], wanted: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "stillroom.toml")
        edit_file(file, before)
        edit_file(file, wanted)
        found = tomllib.loads(file.read_text()) if file.exists() else {}
    flat = {f"{section}.{name}": value for section, table in found.items() for name, value in table.items()}
    assert flat == before | wanted
