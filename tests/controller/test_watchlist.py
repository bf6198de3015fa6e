"""Which workloads are watched: patterns, their version in Redis, and what the setting `unwatched` makes of
the rest."""

import fnmatch
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from pipeline.controller import watchlist as module
from pipeline.controller.watchlist import (
    SHARED,
    Watched,
    WatchEntry,
    Watchlist,
    check_pattern,
    covers,
    model_of,
    unmatched,
    unwatched,
)
from pipeline.errors import BadInput, RedisUnavailable
from pipeline.messages.app import make_app
from pipeline.producer import Producer
from pipeline.records.batch import MAX_NAME, Batch, Purpose
from pipeline.records.delivery import KEEP_DONE_S, Accepted
from pipeline.records.schema import raw_frame
from pipeline.settings import Settings
from pipeline.tasks.context import Context


@pytest.fixture
def watchlist(client: "redis.Redis", settings: Settings) -> Watchlist:
    return Watchlist(client, settings)


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("prod/shop/cart", ["prod/shop/cart", "prod/shop/cart/pod-1"], ["prod/shop/cart2", "prod/shop", "x/prod/shop/cart"]),
        ("prod", ["prod", "prod/a", "prod/a/b"], ["prod2", "production/a"]),
        ("prod/*", ["prod/a", "prod/a/b"], ["prod", "prod2/a"]),
        ("*/shop", ["prod/shop/cart", "dev/shop"], ["shop", "a/b/shop"]),
        ("prod/*/cart-?", ["prod/a/cart-1", "prod//cart-1"], ["prod/a/cart-", "prod/a/cart-12", "prod/a/b/cart-1"]),
        ("*", ["prod", "a/b/c", "with space", "line\nbreak"], []),
        ("pr*d/a**", ["prd/a", "prod/abc"], ["pro/a"]),
        ("a.b", ["a.b"], ["axb"]),
        ("[ab]", ["[ab]"], ["a"]),
        ("a+(b)$", ["a+(b)$"], ["aab"]),
        ("Prod", ["Prod"], ["prod"]),
    ],
)  # fmt: skip
def test_a_pattern_matches_part_by_part(pattern: str, matches: list[str], others: list[str]) -> None:
    assert [w for w in [*matches, *others] if covers([pattern], w)] == matches


names = st.text(
    st.characters(categories=("L", "N", "P", "S"), exclude_characters="*?/"), min_size=1, max_size=8
)
workloads = st.lists(names, min_size=1, max_size=4).map("/".join)


@given(name=workloads, other=workloads)
def test_a_name_watches_itself_and_what_lies_below_it_and_nothing_else(name: str, other: str) -> None:
    assert covers([name], name) and covers([name], f"{name}/{other}")
    assert covers([name], other) == (other == name or other.startswith(name + "/"))


def test_a_pattern_full_of_wildcards_is_decided_at_once() -> None:
    assert not covers(["*a" * 60 + "b"], "a" * 190)


@pytest.mark.parametrize("pattern", ["", "a\nb", "a\x1b[2J", "x" * (MAX_NAME + 1)])
def test_what_can_be_no_pattern_is_refused_with_its_value_and_an_example(pattern: str) -> None:
    with pytest.raises(BadInput, match=r"is no workload pattern; write .*such as prod/shop/\*") as caught:
        check_pattern(pattern)
    assert repr(pattern)[:20] in str(caught.value)
    assert len(str(caught.value)) < 250


def test_adding_and_removing_tell_what_changed_and_count_the_version(watchlist: Watchlist) -> None:
    assert watchlist.look() == Watched()
    before = datetime.now(UTC)
    assert watchlist.add("prod/*", "dev") == ["prod/*", "dev"]
    seen = watchlist.look()
    assert (seen.version, seen.patterns) == (1, ("dev", "prod/*"))
    assert all(abs((e.added - before).total_seconds()) < 60 for e in seen.entries)
    assert watchlist.add("dev", "new", "new") == ["new"]
    assert watchlist.add("dev") == []
    assert watchlist.look().version == 2, "nothing changed, so the version stayed"
    assert [e for e in watchlist.look().entries if e.pattern == "dev"] == [seen.entries[0]], (
        "still watched since then"
    )
    assert watchlist.remove("dev", "nobody", "") == ["dev"]
    assert watchlist.remove("dev") == []
    assert (watchlist.look().version, watchlist.look().patterns) == (3, ("new", "prod/*"))
    watchlist.remove("new", "prod/*")
    assert watchlist.look() == Watched(version=4)


def test_one_bad_pattern_of_several_changes_nothing(watchlist: Watchlist) -> None:
    with pytest.raises(BadInput):
        watchlist.add("good", "a\nb")
    assert watchlist.look() == Watched()


def test_the_list_is_bounded_and_a_refusal_changes_nothing(
    watchlist: Watchlist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PATTERNS", 3)
    with pytest.raises(BadInput, match=r"holds 3 patterns, its limit; use wildcards"):
        watchlist.add("a", "b", "c", "d")
    assert watchlist.look() == Watched()
    watchlist.add("a", "b", "c")
    with pytest.raises(BadInput):
        watchlist.add("d")
    assert watchlist.add("a", "b") == []
    watchlist.remove("a")
    assert watchlist.add("d") == ["d"]
    assert watchlist.look().version == 3


def test_what_was_looked_at_lately_is_not_asked_for_again(
    watchlist: Watchlist, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watchlist.lately() == Watched()
    Watchlist(watchlist.client, Settings(key_prefix=watchlist.keys.prefix)).add("a")
    assert watchlist.lately() == Watched()
    monkeypatch.setattr(module, "FRESH_S", -1.0)
    assert watchlist.lately().patterns == ("a",)


def test_a_workload_has_the_shared_model_unless_a_pattern_says_otherwise() -> None:
    own = ("prod/shop", "shared")
    assert model_of("prod/shop/cart", own) == "prod/shop/cart"
    assert model_of("prod/other", own) == SHARED
    assert model_of("shared", own) == SHARED
    assert model_of("prod/shop", ()) == SHARED


def test_unwatched_workloads_are_listed_by_how_much_they_send() -> None:
    now = datetime(2026, 11, 20, tzinfo=UTC)
    watched = Watched(
        version=1, entries=(WatchEntry(pattern="prod", added=now), WatchEntry(pattern="quiet/*", added=now))
    )
    seen = {
        "prod/a": {"accepted": 9},
        "b": {"accepted": 5},
        "a": {"accepted": 5},
        "c": {"accepted": 7},
        "d": {},
    }
    assert unwatched(watched, seen) == ["c", "a", "b", "d"]
    assert unmatched(watched.patterns, seen) == ["quiet/*"]


def test_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    away = Watchlist(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    for call in (away.look, away.lately, lambda: away.add("a"), lambda: away.remove("a")):
        with pytest.raises(RedisUnavailable, match="does not answer"):
            call()


# What the setting `unwatched` makes of the rest


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    own = settings.replace(unwatched="skip")
    app = make_app(own)
    yield Context(app, own)
    app.close()


def producer(context: Context) -> Producer:
    return Producer(context.ledger, context.submit, context.settings)


def waiting(context: Context) -> int:
    return int(context.client.llen(f"{context.settings.redis.key_prefix}:ingest"))


def test_lines_of_unwatched_workloads_are_counted_once_and_nothing_else(context: Context) -> None:
    context.watchlist.add("prod")
    sender = producer(context)
    assert sender.send(["a", "b"], workload="dev/x", batch_id="1") == Accepted(batch_id="1", skipped=True)
    assert sender.send(["a", "b"], workload="dev/x", batch_id="1").duplicate  # type: ignore[union-attr]
    assert sender.send(["c"], workload="dev/x", batch_id="2") == Accepted(batch_id="2", skipped=True)
    totals = context.ledger.backlog.totals()["dev/x"]
    assert totals.pop("last_ms") > 0
    assert totals == {"accepted": 3, "skipped": 3}
    assert context.ledger.backlog.counts() == {}
    assert (waiting(context), context.ledger.backlog.pending(), context.ledger.backlog.overdue()) == (
        0,
        (0, 0),
        [],
    )
    assert not context.client.exists(context.ledger.keys.payload("1"))
    assert 0 < int(context.client.ttl(context.ledger.keys.batch("1"))) <= KEEP_DONE_S
    with pytest.raises(BadInput, match="other content"):
        sender.send(["z"], workload="dev/x", batch_id="1")
    assert unwatched(context.watchlist.look(), context.ledger.backlog.totals()) == ["dev/x"]


def test_watched_workloads_and_baselines_are_never_skipped(context: Context) -> None:
    context.watchlist.add("prod")
    sender = producer(context)
    assert sender.send(["a"], workload="prod/x", batch_id="1") == Accepted(batch_id="1")
    batch = Batch(
        batch_id="2", workload="dev/x", source="f", source_key="k", purpose=Purpose.BASELINE,
        arrived=datetime(2026, 11, 20, tzinfo=UTC), formats=(), zone="UTC", records=raw_frame(["a"]),
    )  # fmt: skip
    assert sender.accept(batch) == Accepted(batch_id="2")
    assert waiting(context) == 2


def test_a_source_goes_on_reading_past_what_is_skipped(context: Context) -> None:
    batch = Batch(
        batch_id="1", workload="dev/x", source="f", source_key="k", purpose=Purpose.SCORE,
        arrived=datetime(2026, 11, 20, tzinfo=UTC), formats=(), zone="UTC", records=raw_frame(["a"]),
    )  # fmt: skip
    assert producer(context).accept(batch, cursor_key="f", cursor="here") == Accepted(
        batch_id="1", skipped=True
    )
    assert context.ledger.intake.cursor("f") == "here"


def test_skipping_goes_on_while_the_ledger_is_full(context: Context) -> None:
    context.watchlist.add("prod")
    full = context.settings.replace(max_pending_batches=1)
    sender = Producer(Context(context.app, full).ledger, context.submit, full)
    sender.send(["a"], workload="prod/x", batch_id="1")
    assert sender.send(["b"], workload="dev/x", batch_id="2") == Accepted(batch_id="2", skipped=True)


def test_without_the_setting_everything_is_scored(context: Context) -> None:
    scoring = context.settings.replace(unwatched="score")
    assert Producer(context.ledger, context.submit, scoring).send(
        ["a"], workload="dev/x", batch_id="1"
    ) == Accepted(batch_id="1")


glob_parts = st.text("ab*?.", min_size=1, max_size=6)


@given(
    parts=st.lists(glob_parts, min_size=1, max_size=3),
    texts=st.lists(st.text("ab.", max_size=6), min_size=1, max_size=3),
)
def test_wildcards_mean_what_they_mean_to_a_shell(parts: list[str], texts: list[str]) -> None:
    expected = len(texts) >= len(parts) and all(
        fnmatch.fnmatchcase(t, p) for p, t in zip(parts, texts, strict=False)
    )
    assert covers(["/".join(parts)], "/".join(texts)) == expected
