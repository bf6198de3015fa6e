"""Imports without the garbage collector, and an end without it."""

import gc
import subprocess
import sys

import pytest

from pipeline.imports import uncollected


def test_the_collector_rests_during_imports_and_works_afterwards_as_before() -> None:
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one started it again"
        raise ImportError
    assert gc.isenabled()


def test_frozen_objects_are_counted_only_after_new_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million of them the count takes 0.1 s."""
    counted: list[bool] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(True) or 0)
    with uncollected():
        pass
    assert not counted
    with uncollected():
        monkeypatch.setitem(sys.modules, "a module that came", sys)
    assert counted


def test_a_process_ends_without_a_last_collection_and_runs_what_it_has_to_run_at_its_end() -> None:
    code = (
        "import atexit, gc, weakref; from pipeline.imports import end_uncollected\n"
        "class Ring:\n  def __del__(self): print('collected', flush=True)\n"
        "end_uncollected(); atexit.register(print, 'ended', flush=True)\n"
        "ring = Ring(); ring.own = ring; del ring"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ended"]
