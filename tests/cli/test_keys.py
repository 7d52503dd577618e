"""`stillroom keys`, and the checks of addresses and keys before `serve` loads anything."""

import dataclasses
from pathlib import Path

import pytest

from stillroom.config.settings import EngineConfig, ServerConfig
from stillroom.server.auth.guard import check_access
from stillroom.server.auth.key_ring import KeyRing
from tests.cli.harness import Run

OPERATORS = (("anna",), ("ops", "--operator"))


def test_key_is_shown_once_and_is_valid_until_removed(run: Run) -> None:
    made = run("keys", "add", "anna", "--tenant", "legal", "--keys", "keys.json")
    key = made.out.strip()
    found = KeyRing(Path("keys.json")).find(key)
    assert found is not None and (found.name, found.tenant) == ("anna", "legal")
    assert "shown only once" in made.err

    listed = run("keys", "list", "--keys", "keys.json")
    assert "anna  tenant legal" in listed.out and key not in listed.out
    [row] = run("keys", "list", "--keys", "keys.json", "--json").json
    assert row["name"] == "anna" and "sha256" not in row

    assert run("keys", "add", "anna", "--keys", "keys.json").code == 2
    assert run("keys", "remove", "ben", "--keys", "keys.json").code == 2
    assert run("keys", "remove", "anna", "--keys", "keys.json").out == "removed anna\n"
    assert run("keys", "list", "--keys", "keys.json", "--json").json == []


def test_keys_file_can_be_a_setting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--keys FILE" in run("keys", "list").err
    monkeypatch.setenv("STILLROOM_SERVER__KEYS_FILE", "keys.json")
    assert run("keys", "add", "anna", "--json").json["tenant"] == "default"
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert "anna" in run("keys", "list", "--keys=~/keys.json").out


@pytest.mark.parametrize("name", ["", "Anna", "../x", "a b", "x" * 64, "-x", ".."])
def test_invalid_names_are_refused(run: Run, name: str) -> None:
    for arguments in (("--", name), (f"--tenant={name}", "anna")):
        assert run("keys", "add", "--keys", "keys.json", *arguments).code == 2
    assert not Path("keys.json").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid"])
def test_a_public_address_without_keys_is_refused(run: Run, host: str) -> None:
    result = run("serve", "--kb", "kb", "--host", host)
    assert result.code == 2 and "--keys keys.json" in result.err and "--insecure" in result.err


def test_serve_refuses_keys_that_all_belong_to_tenants_without_a_folder(run: Run) -> None:
    made = run("keys", "add", "anna", "--tenant", "legal", "--keys", "keys.json", "--json")
    assert made.json["tenant"] == "legal" and "serve --tenants DIR" in made.err
    result = run("serve", "--kb", "kb", "--keys", "keys.json")
    assert result.code == 2 and "--tenants DIR" in result.err

    assert "--tenants" not in run("keys", "add", "ben", "--keys", "keys.json").err
    config = ServerConfig(keys_file="keys.json")
    assert ["legal are refused" in warning for warning in check_access(config).warnings] == [True]
    assert check_access(dataclasses.replace(config, tenants_folder="tenants")).warnings == ()


def test_serve_refuses_tenants_of_a_server_elsewhere_that_shares_its_cache(run: Run, tmp_path: Path) -> None:
    result = run("serve", "--kb", "kb", "--tenants", "tenants", "--base-url", "http://127.0.0.1:9", "--port", "0")
    assert result.code == 2 and "one tenant only" in result.err and "engine.cache_salt" in result.err
    salted = EngineConfig(kind="openai", base_url="http://host", cache_salt=True)
    assert check_access(ServerConfig(tenants_folder=str(tmp_path)), salted).tenants_folder == tmp_path


def test_json_shows_operators(run: Run) -> None:
    made = [run("keys", "add", name, "--keys", "keys.json", "--json", *flags).json for name, *flags in OPERATORS]
    assert [one["is_operator"] for one in made] == [False, True]


def test_missing_keys_file_is_refused(run: Run) -> None:
    result = run("serve", "--kb", "kb", "--keys", "keys.json")
    assert result.code == 2 and "stillroom keys add" in result.err
