"""What a training learns from: which workloads a request means, which store, and what is said when there is
nothing."""

import json
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from pipeline.controller.trainings import TrainingRequest, query_of, store_of
from pipeline.records.query import Query
from pipeline.redis.keys import SHARED
from pipeline.settings import Settings
from pipeline.training.training import _no_lines, chosen_workloads, none_chosen

NOW = datetime(2026, 11, 20, tzinfo=UTC)
SEEN = ("dev/a", "prod/a", "prod/own/x")


@pytest.mark.parametrize(
    ("request_", "watched", "own", "expected"),
    [
        (TrainingRequest(), (), (), SEEN),
        (TrainingRequest(), ("prod",), (), ("prod/a", "prod/own/x")),
        (TrainingRequest(), ("prod",), ("prod/own",), ("prod/a",)),
        (TrainingRequest(), (), ("prod/own",), ("dev/a", "prod/a")),
        (TrainingRequest(), ("quiet",), (), ()),
        (TrainingRequest(workloads=("gone",)), ("prod",), (), ("gone",)),
        (TrainingRequest(patterns=("*/a",)), ("prod",), (), ("dev/a", "prod/a")),
        (TrainingRequest(patterns=("quiet",)), (), (), ()),
        (TrainingRequest(workloads=("prod/a",), patterns=("dev",)), (), (), ("dev/a", "prod/a")),
        (TrainingRequest(model="prod/own/x"), ("prod",), ("prod/own",), ("prod/own/x",)),
    ],
)
def test_a_request_means_what_it_names_or_else_what_is_watched_and_shares_its_model(
    request_: TrainingRequest, watched: tuple[str, ...], own: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert chosen_workloads(request_, SEEN, watched, own) == expected


def test_a_request_that_means_nothing_names_its_patterns_and_the_remedy() -> None:
    text = none_chosen(TrainingRequest(patterns=tuple(f"p{n}" for n in range(8))), ("prod",))
    assert "matches p0, p1, p2, p3, p4 and 3 more; send logs first" in text
    assert "matches prod; send logs first" in none_chosen(TrainingRequest(), ("prod",))
    assert "own_models" in none_chosen(TrainingRequest(), ())


def test_the_usual_query_follows_the_settings() -> None:
    settings = Settings(
        train_span_s=3_600.0, train_exclude_words=("x", "y"), train_exclude_anomalous=True,
        opensearch_url="http://localhost:9200", sinks=("opensearch", "parquet"),
    )  # fmt: skip
    query = query_of(settings, NOW)
    assert query == Query(
        store="opensearch", since=NOW - timedelta(hours=1), exclude_words=("x", "y"), exclude_anomalous=True
    )
    assert msgspec.convert(json.loads(json.dumps(query.to_json())), Query) == query
    assert store_of(settings.replace(train_source="parquet")) == "parquet"
    assert store_of(Settings()) == "parquet"


def test_nothing_to_learn_from_says_where_was_looked_and_what_helps() -> None:
    names = Query(workloads=tuple(f"w{n}" for n in range(7)))
    assert _no_lines(names, NOW).startswith(
        "no line of w0, w1, w2, w3, w4 and 2 more is stored; send logs first"
    )
    span = Query(since=NOW - timedelta(hours=1), until=NOW)
    assert (
        "no line of any workload is stored since 2026-11-19T23:00:00+00:00 before 2026-11-20T00"
        in _no_lines(span, NOW)
    )
    future = _no_lines(Query(since=NOW + timedelta(days=1)), NOW)
    assert "2026-11-21T00:00:00+00:00" in future and "in the future" in future


def test_the_name_of_the_shared_model_is_no_workloads_model() -> None:
    assert chosen_workloads(TrainingRequest(), (SHARED, "a"), (), (SHARED, "a")) == (SHARED,)
