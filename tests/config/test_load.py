"""Loading of settings: the four sources, and the errors of impossible values."""

import logging
from pathlib import Path
from typing import Any

import pytest

from stillroom.config.load import load_config, settings
from stillroom.config.settings import (
    ClusterConfig,
    EngineConfig,
    IndexConfig,
    PrepareConfig,
    QdrantConfig,
    QueryCacheConfig,
    StillroomConfig,
)
from stillroom.errors import ConfigError


@pytest.fixture(autouse=True)
def in_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "stillroom.toml") -> Path:
    file = Path(name)
    file.write_text(text, encoding="utf-8")
    return file


def test_without_any_source_settings_are_the_defaults() -> None:
    assert load_config(env={}) == StillroomConfig()


def test_later_sources_override_earlier_ones() -> None:
    write("[search]\ntop_k = 2\nmode = 'dense'\nnum_candidates = 9\n")
    env = {"STILLROOM_SEARCH__TOP_K": "3", "STILLROOM_SEARCH__MODE": "sparse", "PATH": "/bin"}

    config = load_config(env=env, overrides={"search.top_k": 4, "search.mode": None})

    assert (config.search.top_k, config.search.mode, config.search.num_candidates) == (4, "sparse", 9)
    assert config.runtime == StillroomConfig().runtime


def test_named_file_replaces_the_one_of_the_folder() -> None:
    write("[search]\ntop_k = 2\n")
    other = write("[server]\nport = 0\n", "other.toml")

    config = load_config(other, env={})

    assert (config.search.top_k, config.server.port) == (StillroomConfig().search.top_k, 0)


def test_file_may_begin_with_a_byte_order_mark() -> None:
    write("\ufeff[search]\ntop_k = 2\n")

    assert load_config(env={}).search.top_k == 2


def test_folder_in_place_of_the_file_is_an_error() -> None:
    Path("stillroom.toml").mkdir()

    with pytest.raises(ConfigError, match=r"stillroom\.toml cannot be read"):
        load_config(env={})


def test_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLROOM_RUNTIME__MAX_NUM_SEQS", "8")

    assert load_config().runtime.max_num_seqs == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 512 * 2**20), ("2 GiB", 2 * 2**30), ("1.5KiB", 1536), ("3MB", 3_000_000), ("7", 7), ("9B", 9)],
)
def test_sizes_take_units_in_every_source(text: str, expected: int) -> None:
    file = write(f'[runtime]\nkv_bytes = "{text}"\n')

    assert load_config(file, env={}).runtime.kv_bytes == expected
    assert load_config(env={"STILLROOM_RUNTIME__KV_BYTES": text}).runtime.kv_bytes == expected
    assert load_config(env={}, overrides={"runtime.kv_bytes": text}).runtime.kv_bytes == expected


def test_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    file = write("[server]\nkeys_file = '~/keys.json'\n")

    server = load_config(file, env={"STILLROOM_SERVER__TENANTS_FOLDER": "~/tenants"}).server

    assert (server.keys_file, server.tenants_folder) == ("/home/anna/keys.json", "/home/anna/tenants")
    assert load_config(env={}, overrides={"server.keys_file": "~/k"}).server.keys_file == "/home/anna/k"


@pytest.mark.parametrize("text", ["512M", "lots", "1.5B", "-1MiB", "0", "infMiB", "MiB", "1e400", "101%", "-1%", "%"])
def test_impossible_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a size such as 512MiB, or a share of memory such as 25%, at least 1"):
        load_config(env={"STILLROOM_RUNTIME__KV_BYTES": text})


def test_a_size_can_be_a_share_of_memory() -> None:
    whole, half = (load_config(env={"STILLROOM_REUSE__HOST_BYTES": text}).reuse.host_bytes for text in ("100%", "50%"))

    assert whole > 2**28 and abs(half - whole / 2) <= 1


def test_integer_is_accepted_for_a_float() -> None:
    temperature = load_config(write("[generation]\ntemperature = 1\n"), env={}).generation.temperature

    assert (temperature, type(temperature)) == (1.0, float)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("search.top_k", 0),
        ("search.top_k", True),
        ("search.top_k", 2.0),
        ("search.top_k", "three"),
        ("search.mode", "magic"),
        ("search.mode", 1),
        ("generation.temperature", -0.1),
        ("generation.temperature", float("nan")),
        ("generation.temperature", float("inf")),
        ("generation.top_p", 0),
        ("generation.top_p", 1.01),
        ("generation.sample_top_k", -1),
        ("generation.min_p", 1.5),
        ("generation.repetition_penalty", 0),
        ("generation.seed", -1),
        ("generation.seed", 2**63),
        ("runtime.kv_bytes", -1),
        ("runtime.model", ""),
        ("runtime.num_threads", 1025),
        ("server.port", 65536),
        ("server.port", -1),
        ("server.host", 1),
        ("index.m", 1),
    ],
)
def test_impossible_values_are_refused_with_the_allowed_ones(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={}, overrides={setting: value})

    assert str(caught.value).startswith(f"flags: {setting} = {value!r} is not possible; it must be ")
    assert settings()[setting].allowed in str(caught.value)


@pytest.mark.parametrize(("setting", "value"), [("server.port", 0), ("server.port", 65535), ("generation.top_p", 1)])
def test_ends_of_a_range_are_allowed(setting: str, value: Any) -> None:
    section, name = setting.split(".")
    assert getattr(getattr(load_config(env={}, overrides={setting: value}), section), name) == value


def test_error_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^stillroom\.toml: search\.top_k = 'x' is not possible"):
        load_config(write("[search]\ntop_k = 'x'\n"), env={})


def test_error_names_the_environment_variable() -> None:
    with pytest.raises(ConfigError, match=r"^environment variable STILLROOM_SEARCH__TOP_K: search\.top_k = 'x'"):
        load_config(env={"STILLROOM_SEARCH__TOP_K": "x"})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[serach]\ntop_k = 3\n", "unknown section 'serach'; did you mean 'search'?"),
        ("[zzz]\n", "unknown section 'zzz'; the sections are documents, chunker"),
        ("[search]\ntopk = 3\n", "unknown setting 'topk' in section 'search'; did you mean 'top_k'?"),
        ("[search]\nport = 3\n", "unknown setting 'port' in section 'search'; 'port' is a setting of 'server'"),
        ("[server]\nzzz = 3\n", "unknown setting 'zzz' in section 'server'; its settings are host, port"),
        ("search = 3\n", "search is a section; write [search]"),
        ("[search\n", "is not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_explained(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), env={})

    assert hint in str(caught.value)


def test_unknown_environment_variables_are_explained() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        load_config(env={"STILLROOM_RUNTIME__MAX_SEQS": "8"})


def test_environment_variable_with_one_underscore_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    # not an error: Kubernetes sets this variable
    config = load_config(env={"STILLROOM_SERVER_PORT": "tcp://10.0.0.1:80", "STILLROOM_KB": "kb"})

    assert config == StillroomConfig()
    [(_, level, message)] = caplog.record_tuples
    assert level == logging.WARNING
    assert "STILLROOM_SERVER__PORT" in message


def test_removed_settings_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "old.toml"
    file.write_text("[query_cache]\nhot_after = 3\nmax_tokens = 7\n", encoding="utf-8")
    config = load_config(file, env={"STILLROOM_QUERY_CACHE__MAX_HOT": "8"})

    assert config == StillroomConfig(query_cache=QueryCacheConfig(max_tokens=7))
    assert [(level, "no longer exists" in message) for _, level, message in caplog.record_tuples] == [
        (logging.WARNING, True)
    ] * 2


def test_a_removed_value_is_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert load_config(env={"STILLROOM_SEARCH__FUSION": "smoothed"}) == StillroomConfig()
    [(_, level, message)] = caplog.record_tuples
    assert level == logging.WARNING and "using 'convex'" in message


def test_missing_file_and_folder_as_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(Path("nowhere.toml"), env={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, env={})


def test_file_that_is_not_text_is_refused() -> None:
    Path("bad.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Path("bad.toml"), env={})


def test_every_default_is_allowed() -> None:
    defaults = {path: setting.default for path, setting in settings().items()}
    assert load_config(env={}, overrides=defaults) == StillroomConfig()


def test_every_setting_can_come_from_the_environment() -> None:
    env = {setting.env_name: str(setting.default) for setting in settings().values()}

    assert load_config(env=env) == StillroomConfig()


def test_secret_comes_from_the_environment_and_is_never_shown() -> None:
    config = load_config(env={"STILLROOM_ENGINE__API_KEY": "sk-do-not-show"})
    assert config.engine.api_key == "sk-do-not-show"
    assert "sk-do-not-show" not in repr(config)

    write("[engine]\napi_key = 'sk-do-not-show'\n")
    with pytest.raises(ConfigError, match="give it in the environment: STILLROOM_ENGINE__API_KEY") as caught:
        load_config(env={})
    assert "sk-do-not-show" not in str(caught.value)


@pytest.mark.parametrize("secret", ["two words", "line\n", "tab\t", "\u00e4"])
def test_a_secret_that_no_header_can_carry_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as caught:
        ClusterConfig(secret=secret)
    assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("base_url", "hint"),
    [
        ("", "needs an address"),
        ("localhost:8000", "is not an address"),
        ("ftp://host/v1", "is not an address"),
        ("http://", "is not an address"),
        ("http://host/v1?key=1", "is not an address"),
        ("http://host:99999", "is not an address"),
        ("http://me:sk-do-not-show@host/v1", "holds a name or password"),
        ("http://host,http://me:sk-do-not-show@host/v1", "holds a name or password"),
        ("http://a,", "is not an address"),
        ("http://a, http://b,http://a/v1/", "http://a/v1 twice"),
    ],
)
def test_impossible_addresses_are_refused_without_showing_passwords(base_url: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        EngineConfig(kind="openai", base_url=base_url)
    assert "sk-do-not-show" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://localhost:8000", ["http://localhost:8000/v1"]),
        ("http://localhost:8000/", ["http://localhost:8000/v1"]),
        ("http://localhost:8000/v1/", ["http://localhost:8000/v1"]),
        ("https://host/llm/api", ["https://host/llm/api"]),
        ("http://a, http://b/v1", ["http://a/v1", "http://b/v1"]),
    ],
)
def test_addresses_of_servers_end_in_a_path(given: str, used: list[str]) -> None:
    assert list(EngineConfig(kind="openai", base_url=given).base_urls) == used


def test_several_addresses_are_a_list_or_text_with_commas() -> None:
    write('[engine]\nkind = "openai"\nbase_url = ["http://a", "http://b"]\n')
    assert load_config(env={}).engine.base_urls == ("http://a/v1", "http://b/v1")
    env = {"STILLROOM_ENGINE__BASE_URL": "http://c,http://d"}
    assert load_config(env=env).engine.base_urls == ("http://c/v1", "http://d/v1")
    for wrong in ('["http://a", 1]', "1"):
        write(f"[engine]\nbase_url = {wrong}\n")
        with pytest.raises(ConfigError, match="must be text, or a list of texts"):
            load_config(env={})


def test_key_with_a_line_break_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="holds a space, a line break") as caught:
        EngineConfig(kind="openai", base_url="http://host", api_key="sk-do-not\nshow")
    assert "sk-do" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"url": "localhost:6333"}, "qdrant.url='localhost:6333' is not an address"),
        ({"url": "http://me:sk-do-not-show@host"}, "qdrant.url holds a name or password"),
        ({"api_key": "sk-do-not\nshow"}, "STILLROOM_QDRANT__API_KEY holds a space, a line break"),
        ({"prefix": "a/b"}, "must consist of letters, digits"),
    ],
)
def test_impossible_qdrant_settings_are_refused_without_showing_keys(values: dict[str, str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        QdrantConfig(**values)  # type: ignore[arg-type]
    assert "sk-do" not in str(caught.value)


def test_qdrant_index_needs_an_address_and_takes_no_search_goals() -> None:
    with pytest.raises(ConfigError, match="needs qdrant.url"):
        StillroomConfig(index=IndexConfig(kind="qdrant"))
    with pytest.raises(ConfigError, match="searched with index.ef_search"):
        IndexConfig(kind="qdrant", ann_recall=0.9)
    write("[qdrant]\napi_key = 'sk-do-not-show'\n")
    with pytest.raises(ConfigError, match="give it in the environment: STILLROOM_QDRANT__API_KEY"):
        load_config(env={})


def test_bits_of_prepared_kv_are_4_8_or_16() -> None:
    assert [PrepareConfig(bits=bits).bits for bits in (16, 8, 4)] == [16, 8, 4]
    with pytest.raises(ConfigError, match="prepare.bits=5; it must be 4, 8 or 16"):
        PrepareConfig(bits=5)
    write("[prepare]\nbits = 3\n")
    with pytest.raises(ConfigError, match="prepare.bits = 3 is not possible; it must be 4, 8 or 16"):
        load_config(env={})
    assert settings()["prepare.bits"].allowed == "4, 8 or 16"
