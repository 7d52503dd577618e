"""Addresses of engines as users write them."""

from pathlib import Path

import pytest

from stillroom.config.engine_address import EngineAddress, engine_url, parse_engine_address, parse_engine_addresses
from stillroom.errors import ConfigError

GOOD = {
    "http://a:9100": EngineAddress("engine", url="http://a:9100"),
    "HTTP://A.:9100/": EngineAddress("engine", url="http://a:9100"),
    "https://a": EngineAddress("engine", url="https://a"),
    "http://[::1]:9100": EngineAddress("engine", url="http://[::1]:9100"),
    "dns://engines": EngineAddress("dns", host="engines", port=9100),
    "dns://engines:9200/": EngineAddress("dns", host="engines", port=9200),
    "file:///run/my%20engines": EngineAddress("file", file=Path("/run/my engines")),
    "list+http://ray:8000/engines?all=1": EngineAddress("list", url="http://ray:8000/engines?all=1"),
}


@pytest.mark.parametrize("text", GOOD)
def test_every_kind_of_address_is_read(text: str) -> None:
    assert parse_engine_address("engine.urls", text) == GOOD[text]


@pytest.mark.parametrize("text", GOOD)
def test_address_in_a_message_is_read_as_the_same_address(text: str) -> None:
    if " " not in str(GOOD[text]):
        assert parse_engine_address("engine.urls", str(GOOD[text])) == GOOD[text]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:9100",
        "http://",
        "http://a:0",
        "http://a:x",
        "http://a:9100/v1",
        "http://a:9100?x=1",
        "ftp://a",
        "dns://engines/x",
        "file://folder/x",
        "list+dns://a",
        "list+http:///x",
        "http://[::1",
    ],
)
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.urls.*(?:http://host:9100|three slashes)"):
        parse_engine_address("engine.urls", text)


def test_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="STILLROOM_CLUSTER__SECRET") as caught:
        parse_engine_address("engine.urls", "http://me:hidden@a:9100")
    assert "hidden" not in str(caught.value)


def test_several_addresses_are_separated_by_commas_and_count_once() -> None:
    found = parse_engine_addresses("engine.urls", " http://b:1, http://a:1,http://B:1/ ,")
    assert [one.url for one in found] == ["http://b:1", "http://a:1"]
    with pytest.raises(ConfigError, match="names no engine"):
        parse_engine_addresses("engine.urls", " , ")


def test_url_of_an_ip_address() -> None:
    assert engine_url("10.0.0.7", 9100) == "http://10.0.0.7:9100"
    assert engine_url("fd00::7", 9100) == "http://[fd00::7]:9100"
