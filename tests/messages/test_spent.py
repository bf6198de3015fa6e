"""The message of a batch that went along with others asks for nothing, once and for a while."""

from typing import Any

from pipeline.messages import filter as guard
from pipeline.messages.spent import KEPT_S, MOST, SpentWakeUps, spent


def test_only_the_next_message_of_a_batch_in_its_queue_is_spent() -> None:
    wakes = SpentWakeUps(lambda: 0.0)
    wakes.add("ingest", "b")
    assert not wakes.take("ingest.backfill", "b") and not wakes.take("store", "b")
    assert wakes.take("ingest", "b")
    assert not wakes.take("ingest", "b"), "a later wake-up is one that the sweeper has sent"


def test_a_batch_is_not_remembered_for_long_nor_with_too_many_others() -> None:
    now = [0.0]
    wakes = SpentWakeUps(lambda: now[0])
    wakes.add("ingest", "b")
    now[0] = KEPT_S + 1
    assert not wakes.take("ingest", "b")
    for number in range(MOST + 1):
        wakes.add("ingest", str(number))
    assert not wakes.take("ingest", "0") and wakes.take("ingest", "1")


def test_a_message_that_names_no_batch_is_not_spent() -> None:
    spent.add("ingest", "b")
    names: tuple[Any, ...] = (None, 7, ["b"], {"b": 1}, "")
    assert not any(guard._is_spent({"headers": {"batch": name}}, "ingest") for name in names)
    assert not guard._is_spent({"headers": {}}, "ingest")
    assert guard._is_spent({"headers": {"batch": "b"}}, "ingest")
