"""The list of engines that a service under Ray gives to fronts."""

from stillroom.supervision.registrations import CHECK_SECONDS, MAX_SILENT_SECONDS, Registrations

START = 100.0
LATER = START + 2 * CHECK_SECONDS


def test_engines_are_listed_while_they_register() -> None:
    engines = Registrations(START)
    engines.register("http://b:1", LATER)
    engines.register("http://a:1", LATER + 1)
    assert engines.reply(LATER + 2) == ("http://a:1\nhttp://b:1\n", 200)
    assert engines.reply(LATER + MAX_SILENT_SECONDS) == ("http://a:1\n", 200)
    engines.register("http://b:1", LATER + MAX_SILENT_SECONDS)
    engines.leave("http://a:1")
    engines.leave("http://unknown:1")
    assert engines.reply(LATER + MAX_SILENT_SECONDS) == ("http://b:1\n", 200)


def test_list_is_not_valid_until_engines_had_time_to_register() -> None:
    engines = Registrations(START)
    assert engines.reply(START) == ("", 503)
    engines.register("http://a:1", START)
    assert engines.reply(LATER - 0.01) == ("http://a:1\n", 503)
    assert engines.reply(LATER) == ("http://a:1\n", 200)
