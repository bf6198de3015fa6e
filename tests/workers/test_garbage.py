"""Python's garbage collector in a process that is ready for work."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from pipeline.workers.loops import GARBAGE_AFTER, collect_seldom


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class _Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_a_process_has_when_it_is_ready_is_searched_no_more_and_new_cycles_are() -> None:
    collect_seldom()
    assert gc.get_freeze_count() > 10_000 and gc.get_threshold()[0] == GARBAGE_AFTER
    seen = weakref.ref(_Node())
    assert seen() is not None
    kept = []
    while seen() is not None and len(kept) < 100 * GARBAGE_AFTER:
        kept.append([kept])
    assert seen() is None, "a cycle is found although nobody asked for a search"
