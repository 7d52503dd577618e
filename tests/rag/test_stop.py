"""Stop strings are found across pieces, and text is held back no longer than needed."""

from hypothesis import given
from hypothesis import strategies as st

from stillroom.rag.stop_matcher import StopMatcher

TEXT = st.text("ab\u00e4", max_size=12)


def reference(text: str, stops: list[str]) -> str:
    """The text up to the first complete stop string; of several that end there, the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(st.lists(TEXT, max_size=8), st.lists(TEXT.filter(bool), max_size=3))
def test_pieces_give_the_same_text_as_the_whole_and_as_early_as_possible(pieces: list[str], stops: list[str]) -> None:
    matcher, out, text = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        out += matcher.push(piece)
        assert matcher.is_matched == any(stop in text for stop in stops)
        if not matcher.is_matched:
            held = text[len(out) :]
            assert text.startswith(out)
            assert not held or any(stop.startswith(held) for stop in stops), (
                "only a possible beginning of a stop string is held back"
            )
    out += matcher.flush()
    assert out == reference(text, stops)


def test_stop_string_across_pieces() -> None:
    matcher = StopMatcher(["\n\nQ:"])
    pieces = ["Yes.", "\n", "No", "\n\n", "Q", ":", " more"]
    assert [matcher.push(piece) for piece in pieces] == ["Yes.", "", "\nNo", "", "", "", ""]
    assert matcher.is_matched and matcher.flush() == ""


def test_beginning_of_a_stop_string_is_returned_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert (matcher.push("the EN"), matcher.flush()) == ("the ", "EN")
