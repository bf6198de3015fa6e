"""Python's garbage collector in a process that is ready for work."""

import gc
import importlib
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.imports import uncollected
from pipeline.workers.loops import GARBAGE_AFTER, collect_seldom


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    if frozen:  # a whole run leaves its million objects alone (conftest.py)
        gc.freeze()


def test_modules_that_come_later_are_searched_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "comes_late.py").write_text("objects = [[number] for number in range(1_000)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with uncollected():
        pass
    assert gc.get_freeze_count() == 0, "a command that ends soon freezes nothing"
    collect_seldom()
    frozen = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() <= frozen, "objects of its work are garbage later"
    with uncollected():
        importlib.import_module("comes_late")
    assert gc.get_freeze_count() >= frozen + 1_000
    assert gc.isenabled()


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
