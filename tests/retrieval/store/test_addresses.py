"""URLs of knowledge bases in PostgreSQL, and the local folder of each."""

import json
import re
from pathlib import Path

import pytest

from stillroom.errors import CorruptKnowledgeBaseError, UsageError
from stillroom.retrieval.store.postgresql.address import (
    ADDRESS_FILE,
    address_of,
    local_folder,
    make_local_folder,
    parse_address,
)
from stillroom.retrieval.store.postgresql.statements import from_text, to_text
from tests.cli.harness import runner


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://anna@db:5432/docs?kb=handbook", "postgresql://anna@db:5432/docs?kb=handbook"),
        ("postgres://db/docs", "postgresql://db/docs?kb=kb"),
        (" PostgreSQL://anna:s%40cret@[::1]:5432/docs", "postgresql://anna@[::1]:5432/docs?kb=kb"),
        (
            "postgresql://anna:s%40cret@db,other:5433/docs?sslmode=require",
            "postgresql://anna@db,other:5433/docs?sslmode=require&kb=kb",
        ),
        (
            "postgresql:///docs?host=/run/postgresql&password=s%40cret",
            "postgresql:///docs?host=%2Frun%2Fpostgresql&kb=kb",
        ),
    ],
)
def test_url_is_shown_without_its_password(url: str, shown: str) -> None:
    address = parse_address(url)
    assert str(address) == shown
    assert address.password == ("s@cret" if "cret" in url else "")
    assert "cret" not in repr(address)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://db/docs?kb=Not%20a%20name", "no name of a knowledge base"),
        ("postgresql://db/docs?kb=", "no name of a knowledge base"),
        ("postgresql://u:secret@[db/x", "cannot be read"),
        ("postgresql://u:secret#x@db/docs?kb=kb", "# as %23"),
        ("postgresql://u:a@secret/y@db/docs?kb=kb", "@ as %40"),
        ("postgresql://u:secret/y@db/docs", "/ as %2F"),
        ("postgresql://u:secret?y@db/docs", "cannot be read"),
        ("postgresql://u:secret?y=1@db/docs?kb=kb", r"\? as %3F"),
        ("postgresql://u:secret", "the port .* is no number"),
        ("postgresql://u@db:secret/docs", "the port .* is no number"),
        ("postgresql://u@db/docs?port=70000", "the port .* is no number"),
        ("postgresql://u:secret@db/docs?kb=a&kb=b", "kb= stands more than once"),
        ("postgresql://u@db/docs?sslpassword=secret", "service file"),
    ],
)
def test_wrong_url_is_refused_without_its_password(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        parse_address(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "kb",
    [
        "postgresql:/u:secret@db/docs?kb=kb",
        "PostgreSQL:/u:secret@db/docs",
        "postgresql+psycopg://u:secret@db/docs",
        "mysql://u:secret@db/docs",
        "postgresql:u:secret@db/docs",
        Path("postgresql://u:secret@db/docs"),
    ],
)
def test_other_url_is_no_folder_and_is_not_repeated(
    kb: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(f"begins with {str(kb).partition(':')[0]}: ")) as refused:
        local_folder(kb)
    for command in (("list", "--kb", kb), ("migrate", "kb", kb), ("add", ".", "--kb", kb)):
        result = runner(capfd)(*command)
        assert result.code == 2
        assert "secret" not in result.out + result.err + str(refused.value)
    assert not list(tmp_path.iterdir())


def test_folders_with_a_colon_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes:" / "kb").mkdir(parents=True)
    for kb in ("notes:/kb", "./postgresql:/kb", "C:/kb", "C:\\kb"):
        assert local_folder(kb) == Path(kb)


def test_local_folder_stands_for_the_url(cache: Path) -> None:
    url = "postgresql://anna:s3cret@db/docs?kb=handbook"
    folder = local_folder(url)
    assert folder.is_relative_to(cache)
    assert not cache.exists(), "a failed attempt leaves nothing"
    make_local_folder(folder, parse_address(url))
    assert folder.stat().st_mode & 0o077 == 0
    assert local_folder("postgresql://anna@db/docs?kb=handbook") == folder == local_folder(folder)
    assert local_folder("postgresql://anna@db/docs?kb=other") != folder
    address = address_of(folder)
    assert address is not None
    assert (str(address), address.password) == ("postgresql://anna@db/docs?kb=handbook", "s3cret")
    content = (folder / ADDRESS_FILE).read_text()
    assert "s3cret" not in content
    assert json.loads(content) == {"url": "postgresql://anna@db/docs", "kb": "handbook"}


def test_folder_of_an_ordinary_knowledge_base_has_no_address(tmp_path: Path) -> None:
    assert local_folder(tmp_path) == tmp_path
    assert address_of(tmp_path) is None


def test_damaged_address_is_reported(tmp_path: Path) -> None:
    (tmp_path / ADDRESS_FILE).write_text("{")
    with pytest.raises(CorruptKnowledgeBaseError, match="made again"):
        address_of(tmp_path)


@pytest.mark.parametrize("text", ["", "a", "\0", "\ufdd0", "\ufdd00\0001", "\0\ufdd0\ufdd01"])
def test_texts_with_nul_are_stored_and_read(text: str) -> None:
    assert "\0" not in to_text(text)
    assert from_text(to_text(text)) == text
