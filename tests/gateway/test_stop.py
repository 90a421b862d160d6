"""Stop strings cut where a search in the whole text would, wherever the pieces are cut, and are never sent."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.gateway.text.stop_strings import StopStringMatcher

LETTERS = st.text(alphabet="abc🙂 ", max_size=30)
STOPS = st.lists(st.text(alphabet="abc🙂 ", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> str:
    found = [text.find(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in itertools.pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)])]


@settings(max_examples=200)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=30))
def test_cut_as_a_search_in_the_whole_text_would(text, stops, cuts):
    matcher = StopStringMatcher(stops)
    assert ("".join(matcher.feed(piece) for piece in pieces_of(text, cuts)) + matcher.flush()) == reference(text, stops)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


@settings(max_examples=100)
@given(text=LETTERS, stops=STOPS)
def test_only_what_may_still_match_is_held_back(text, stops):
    matcher = StopStringMatcher(stops)
    sent = ""
    for position, character in enumerate(text):
        sent += matcher.feed(character)
        if matcher.matched is not None:
            return
        held = text[len(sent) : position + 1]
        assert held == "" or any(stop.startswith(held[: len(stop)]) for stop in stops)
