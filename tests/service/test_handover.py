"""An incident that leaves as Markdown, and the notes of people on it."""

import re

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadInput, NotFound
from pipeline.service.handover import notes
from pipeline.service.handover.markdown import code_span, fence
from pipeline.settings import Settings


@given(st.text(alphabet="`a\n <#*\x1b", max_size=40))
def test_a_text_ends_no_fence_and_no_code_span_of_its_own(text: str) -> None:
    first, *inside, last = fence([text]).split("\n")
    assert set(last) == {"`"} and first == f"{last}text"
    assert not [one for one in inside if one.strip().startswith(last)]
    span = code_span(text)
    ticks = re.match(r"`+", span)
    assert ticks and "\n" not in span
    inner = span[len(ticks[0]) : -len(ticks[0])]
    assert span.endswith(ticks[0]) and len(ticks[0]) not in map(len, re.findall(r"`+", inner))


def test_notes_are_bounded(client: "redis.Redis", settings: Settings) -> None:
    for text, words in (("", "without a text"), ("n" * 2_001, "2,001 characters")):
        with pytest.raises(BadInput, match=words):
            notes.add_note(client, settings, "a", text, by="ada")
    with pytest.raises(NotFound, match="there is no incident"):
        notes.add_note(client, settings, "a", "seen", by="ada")
    assert notes.read_notes(client, settings, "a") == []
