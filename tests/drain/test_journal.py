"""The journal of templates in the store: it never forgets, stays small and takes one writer at a time."""

from pathlib import Path

import pytest

from pipeline.drain.journal import MERGED_AFTER, Journal, Kept
from pipeline.errors import LeaseRefused, StoreUnavailable
from pipeline.store.folder import Folder


@pytest.fixture
def objects(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def kept(text: str) -> Kept:
    return Kept(text.encode(), "shop")


def test_a_journal_gives_back_each_template_as_it_was_written_last(objects: Folder) -> None:
    journal = Journal(objects)
    journal.append({1: kept("a b"), 2: kept("c")})
    journal.append({1: kept("a <*>")})
    assert Journal(objects).read() == {1: kept("a <*>"), 2: kept("c")}


def test_a_journal_is_merged_so_that_few_objects_are_read(objects: Folder) -> None:
    journal = Journal(objects)
    most = 0
    for number in range(1, 4 * MERGED_AFTER):
        journal.append({number: kept(f"t{number}")})
        most = max(most, len(list(objects.found("templates/"))))
    assert most <= MERGED_AFTER + 1
    assert set(Journal(objects).read()) == set(range(1, 4 * MERGED_AFTER))


def test_a_learner_that_was_overtaken_cannot_write(objects: Folder) -> None:
    first, second = Journal(objects), Journal(objects)
    first.append({1: kept("a")})
    second.read()
    second.append({2: kept("b")})
    with pytest.raises(LeaseRefused):
        first.append({2: kept("c")})
    assert first.read() == {1: kept("a"), 2: kept("b")}
    first.append({3: kept("c")})


def test_an_entry_of_a_stalled_learner_from_before_a_merge_counts_for_nothing(objects: Folder) -> None:
    stalled, journal = Journal(objects), Journal(objects)
    for number in range(1, MERGED_AFTER + 1):
        journal.append({number: kept("a")})
    stalled.append({1: kept("wrong")})
    assert Journal(objects).read()[1] == kept("a")


def test_an_entry_that_is_removed_while_it_is_read_is_looked_for_again(
    objects: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(objects).append({1: kept("a")})
    get, calls = objects.get, iter([None, None])
    monkeypatch.setattr(objects, "get", lambda key: next(calls, get(key)))
    assert Journal(objects).read() == {1: kept("a")}


def test_a_damaged_entry_is_a_fault_of_the_store(objects: Folder, tmp_path: Path) -> None:
    Journal(objects).append({1: kept("a")})
    (tmp_path / "templates/000000000001").write_bytes(b"damaged")
    with pytest.raises(StoreUnavailable, match="000000000001"):
        Journal(objects).read()
