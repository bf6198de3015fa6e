"""Cursors name the last item of a page and the question that it belongs to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadInput
from pipeline.service.cursors import cursor_position, cursor_text, page_of


@given(st.lists(st.integers(), unique=True, max_size=30), st.integers(1, 7), st.data())
def test_pages_give_every_item_that_stays_once_whatever_comes_and_goes(
    items: list[int], limit: int, data: st.DataObject
) -> None:
    now, found, cursor = set(items), list[int](), None
    stays = set(items)
    while True:
        page, cursor = page_of([([n], n) for n in sorted(now)], limit, cursor, "numbers")
        found += page
        if cursor is None:
            break
        gone = data.draw(st.sets(st.sampled_from(sorted(stays)), max_size=2)) if stays else set()
        stays -= gone
        now = (now - gone) | data.draw(st.sets(st.integers(), max_size=2))
        if len(found) > 200:
            break
    assert len(found) == len(set(found)) and (cursor is not None or stays <= set(found))


@given(st.text(max_size=50))
def test_any_other_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(BadInput, match="cursor") as caught:
        cursor_position(text, tuple[int, str], "lines")
    assert "\n" not in str(caught.value)


def test_a_cursor_belongs_to_its_question() -> None:
    text = cursor_text([1, "a"], "lines", "shop/*")
    assert cursor_position(text, tuple[int, str], "lines", "shop/*") == (1, "a")
    with pytest.raises(BadInput, match="belongs to another question"):
        cursor_position(text, tuple[int, str], "lines", "shop/web")
    with pytest.raises(BadInput, match="none of ours"):
        cursor_position(text, int, "lines", "shop/*")
    with pytest.raises(BadInput, match="none of ours"):
        cursor_position("A" * 5_000, int, "lines")
