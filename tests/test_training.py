"""From stored results to a training sample, and what a user sees of a training."""

from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest
import redis

from pipeline.drain.masking import MaskSet
from pipeline.records import RESULT_SCHEMA, pattern_ids
from pipeline.settings import Settings
from pipeline.training import SAMPLE_SCHEMA, State, Status, sample

MASKS = MaskSet.load()
NOW = datetime(2026, 11, 20, tzinfo=UTC)


def stored(*rows: tuple[str, int, str | None], pattern: Any = None) -> pl.LazyFrame:
    """(message, times, level) -> stored results."""
    out = []
    for message, times, level in rows:
        masked = MASKS.mask(pl.Series([message]))["masked"][0]
        row = dict.fromkeys(RESULT_SCHEMA) | {
            "message": message,
            "level": level,
            "timestamp": NOW,
            "lines": 1,
            "pattern_id": pattern or pattern_ids([masked])[0],
            "template_id": 1,
        }
        out += [row] * times
    return pl.DataFrame(out, schema=RESULT_SCHEMA).lazy()


def test_a_sample_has_each_pattern_once_with_its_count_most_frequent_first() -> None:
    lines = stored(("user 1 in", 2, "info"), ("user 2 in", 3, None), ("warm", 1, "info"))
    got = sample(lines, MASKS, limit=10)
    assert dict(got.schema) == SAMPLE_SCHEMA
    assert got.select("masked", "count", "severe").rows() == [("user <NUM> in", 5, False), ("warm", 1, False)]
    assert got["pattern_id"].to_list() == pattern_ids(["user <NUM> in", "warm"])


def test_a_pattern_is_severe_when_any_of_its_lines_was() -> None:
    lines = stored(
        ("user 1 in", 9, "info"), ("user 2 in", 1, "fatal"), ("warm", 1, "warning"), ("cold", 1, None)
    )
    got = dict(sample(lines, MASKS, limit=10).select("masked", "severe").rows())
    assert got == {"user <NUM> in": True, "warm": False, "cold": False}


def test_the_limit_keeps_the_most_frequent_patterns() -> None:
    lines = stored(*((f"word{'x' * n} here", n, None) for n in range(1, 9)))
    assert sample(lines, MASKS, limit=3)["count"].to_list() == [8, 7, 6]


def test_nothing_stored_gives_an_empty_sample() -> None:
    got = sample(stored(), MASKS, limit=10)
    assert got.is_empty()
    assert dict(got.schema) == SAMPLE_SCHEMA


def test_lines_stored_under_older_masks_that_are_one_pattern_now_are_counted_together() -> None:
    lines = pl.concat(
        [
            stored(("user 1 in", 4, "info"), pattern=11),
            stored(("user 2 in", 3, "error"), pattern=12),
            stored(("warm", 5, None)),
        ]
    )
    got = sample(lines, MASKS, limit=10)
    assert got.select("masked", "count", "severe").rows() == [("user <NUM> in", 7, True), ("warm", 5, False)]


STATUS = Status(
    state=State.TRAINING, request_id="r ü", reason="why", percent=12.5, elapsed_s=1.25, remaining_s=3.5, epoch=2, loss=0.75,
    lines=10, patterns=4, version="m000001-0a1b2c3d",
)  # fmt: skip


@pytest.mark.parametrize(
    "status", [Status(), STATUS, Status(state=State.FAILED, reason="a\nb")], ids=lambda s: s.state
)
def test_a_status_comes_back_from_redis_as_it_was(
    client: "redis.Redis", settings: Settings, status: Status
) -> None:
    key = settings.key_prefix + ":status"
    client.hset(key, mapping=status.to_redis())
    assert Status.from_redis(client.hgetall(key)) == status
    client.delete(key)


def test_no_training_yet_is_a_status_too() -> None:
    assert Status.from_redis({}) == Status()
    assert not Status().ended
    assert all(Status(state=state).ended == (state in ("completed", "failed")) for state in State)
