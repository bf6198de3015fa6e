"""`logweir incidents`: the state of the watcher as somebody reads it at three in the morning."""

import functools
import io
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from answers_contract import frame, row
from command_line import Verb, command_line

from pipeline.redis.keys import Keys
from pipeline.service.incidents import read_incidents
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.watching.incidents.live import IncidentEvent, Incidents


@functools.cache
def now() -> datetime:
    """The beginning of the test."""
    return datetime.now(UTC).replace(microsecond=0)


@pytest.fixture(autouse=True)
def begun() -> None:
    now.cache_clear()


@pytest.fixture
def verb(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Verb]:
    with command_line(settings, monkeypatch, capsys, "incidents", columns=100) as run:
        yield run


def event(number: int, ago: timedelta, lasts: timedelta = timedelta(0), **changes: Any) -> IncidentEvent:
    base: dict[str, Any] = {
        "event_id": f"{number} {ago}",
        "workload": "shop",
        "cause": f"template:{number}",
        "kind": "template",
        "first": now() - ago,
        "last": now() - ago + lasts,
        "count": 5,
        "score": 0.9,
        "severity": 3,
        "text": f"ERROR payment {number} failed\nTraceback (most recent call last):\n  boom",
        "source": "logs/shop.log",
        "line": 10 * number,
    }
    return IncidentEvent(**(base | changes))


def put(client: "redis.Redis", settings: Settings, *portions: Sequence[IncidentEvent]) -> list[str]:
    """A state that was told the portions one after the other, an hour between; its ids, the newest first."""
    state = Incidents()
    for number, events in enumerate(portions, start=1):
        for minutes in (50, 57):
            state.add(events)
            state.close(now() - timedelta(hours=len(portions) - number, minutes=60 - minutes))
    client.set(Keys(settings.redis.key_prefix).watching("incidents"), state.pack())
    return [i.id for i in state.all()]


HOUR = timedelta(hours=1)


def saga() -> tuple[list[IncidentEvent], list[IncidentEvent]]:
    half = HOUR / 2
    lasting = [event(n, half, timedelta(minutes=28), workload=w) for n, w in ((1, "shop"), (3, "bank"))]
    return [event(n, 5 * HOUR - timedelta(seconds=n)) for n in (1, 2)], [*lasting, event(2, half)]


def test_incidents_are_listed_newest_first_with_what_one_must_know(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    new, old = put(client, settings, *saga())
    said = verb()
    assert said.code == 0, said.err
    assert said.out.index(new) < said.out.index(old)
    flat = " ".join(said.out.split())
    for fact in (
        "open",
        "ended",
        "28 min",
        "bank, shop",
        "payment 1 failed …",
        "3 causes · 15 times",
        f"({old})",
    ):
        assert fact in flat, fact
    assert "Traceback" not in said.out
    assert max(map(len, said.out.splitlines())) <= 100


def test_incidents_of_a_broken_clock_are_listed_last_and_marked(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    *_, old = put(client, settings, [event(1, 5 * HOUR)], [event(2, -72 * HOUR)])
    told = json.loads(verb("--json").out)
    assert [(one["ahead"], one["id"] == old) for one in told] == [(False, True), (True, False)]
    assert [one.ahead for one in read_incidents(client, settings, now(), limit=2).incidents] == [False, True]
    listed = verb().out
    assert listed.index(old) < listed.index(told[1]["id"]) < listed.index("ahead of the clock")
    assert "ahead of the clock" in verb(told[1]["id"]).out
    assert "ahead of the clock" not in verb(old).out


def test_an_incident_of_lines_without_a_time_shows_no_clock_time(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    (name,) = put(client, settings, [event(1, HOUR / 2, timed=False)])
    shown = f"{now() - HOUR / 2:%H:%M}"
    for asked in ((), (name,)):
        said = verb(*asked).out
        assert "no time" in said and shown not in said
    assert json.loads(verb(name, "--json").out)["timed"] is False


def test_what_was_never_said_before_stands_in_a_line_below(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    (name,) = put(client, settings, [event(1, HOUR / 2)])
    assert "never said" not in verb().out
    said = {
        "reasons": ["never-said:900 healthy"],
        "timestamp": now() - 3 * HOUR,
        "message": "array is degraded",
        "anomalous": True,
    }
    rows = [row(n, template_id=n, pattern_id=n, score=n / 10, **said) for n in (1, 2)]
    parquet_of(settings).write("b", frame(rows))
    flat = " ".join(verb().out.split())
    assert flat.index(name) < flat.index("never said before: array is degraded (never seen in 900 lines;")
    assert flat.endswith("usually “healthy”), and 1 more; `logweir results --news` lists them")
    for other in (("--since", "1h"), ("--open",), ("--json",), (name,)):
        assert "never said" not in verb(*other).out, other
    for file in settings.data.results.rglob("*.parquet"):
        file.write_bytes(b"damaged")
    said_then = verb()
    assert (said_then.code, name in said_then.out) == (0, True)
    assert "what was never said before is not known now" in " ".join(said_then.err.split())


def test_where_an_incident_likely_began_is_said_with_reasons(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    half = HOUR / 2
    late = event(2, half - timedelta(seconds=40), workload="bank")
    (name,) = put(client, settings, [event(1, half, new=True), late])
    assert "likely began in shop" in " ".join(verb().out.split())
    shown = verb(name).out
    assert (
        "likely began in shop\n  shop: its first cause came first; 1 cause that no training has seen\n"
        in shown
    )
    fact = json.loads(verb(name, "--json").out)
    assert fact["origin_clear"] and fact["origins"][0]["workload"] == "shop"
    (even,) = put(client, settings, [event(1, half), event(2, half, workload="bank")])
    assert "it is not clear whether it began in bank or shop" in verb(even).out


def test_json_holds_every_fact(verb: Verb, client: "redis.Redis", settings: Settings) -> None:
    new, old = put(client, settings, *saga())
    first, second = json.loads(verb("--json").out)
    assert (first["id"], first["open"], first["seen_before"], first["seen"]) == (new, True, old, 1)
    assert (second["id"], second["open"], second["seen_before"], second["count"]) == (old, False, None, 10)
    assert {c["cause"] for c in first["causes"]} == {"template:1", "template:2", "template:3"}
    assert json.loads(verb(new, "--json").out) == first | {"notes": []}


def test_only_open_ones_or_those_of_the_last_hour_are_shown_when_asked(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    new, old = put(client, settings, *saga())
    for flags in (["--open"], ["--since", "1h"]):
        said = verb(*flags)
        assert new in said.out and f"\n{old}" not in said.out
    assert len(json.loads(verb("--since", "1d", "--json").out)) == 2
    put(client, settings, saga()[0])
    assert verb("--open", "--since", "1h").out == "no open incidents in the last 1h; 1 other kept\n"


def test_one_incident_is_shown_with_its_causes_and_samples_by_the_beginning_of_its_id(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    new, old = put(client, settings, *saga())
    said = verb(new[:5])
    assert said.code == 0, said.err
    for fact in (
        new,
        "open",
        f"seen 1 time before; most like {old} of",
        "  T3  ",
        "ERROR payment 3 failed …",
        "logs/shop.log:30",
    ):
        assert fact in said.out, fact
    assert "template:3" not in said.out and said.out.count("T3 ") == 1
    assert "not seen before" in verb(old).out


def test_what_is_still_looked_at_stands_above_the_list(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    put(client, settings, *saga())
    assert "still looking" not in verb().out
    keys = Keys(settings.redis.key_prefix)
    client.hset(keys.totals("shop"), mapping={"accepted": 100, "stored": 60, "skipped": 7})
    client.sadd(keys.workloads, "shop")
    client.rpush(keys.watching("observations"), b"a", b"b")
    assert verb().out.startswith("still looking at 33 lines and 2 stored batches\n")
    client.hset(keys.totals("shop"), "warming", 60)
    assert (
        verb().out.splitlines()[1]
        == "60 stored lines not judged yet; `logweir train` learns a model for them"
    )
    assert json.loads(verb("--json").out)


def test_what_is_not_there_is_one_sentence(verb: Verb, client: "redis.Redis", settings: Settings) -> None:
    assert verb().out == "no incidents\n"
    assert json.loads(verb("--json").out) == []
    new, _ = put(client, settings, *saga())
    for words, says in [
        (["nothing"], "there is no incident 'nothing'; `logweir incidents` lists them"),
        (["--since", "soon"], "--since 'soon' is neither a span nor a time; write 90s"),
        ([new, "--open"], "one incident is shown whole"),
    ]:
        said = verb(*words)
        assert (said.code, said.out) == (2, "")
        assert says in said.err and said.err.count("\n") == 1


def test_a_state_that_cannot_be_read_is_said_and_not_shown(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    client.set(Keys(settings.redis.key_prefix).watching("incidents"), b"no state")
    said = verb()
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "not readable" in said.err


def test_nothing_in_a_log_line_steers_the_terminal(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    evil = "[/red]x \x1b[2J :boom:"
    (name,) = put(client, settings, [event(1, HOUR, workload=evil, text=evil, cause=evil)])
    for words in ([], [name]):
        said = verb(*words)
        assert said.code == 0, said.err
        assert "\x1b" not in said.out and "[/red]x" in said.out and ":boom:" in said.out


def test_what_a_terminal_cannot_write_is_escaped_and_ends_nothing(
    verb: Verb, client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = put(client, settings, [event(1, HOUR, workload="größe", text="über\nzwei")])
    for words in ([], [name]):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
        assert verb(*words).code == 0
        assert rb"gr\xf6\xdfe" in written.getvalue()


def test_many_incidents_are_cut_for_a_person_and_whole_for_a_program(
    verb: Verb, client: "redis.Redis", settings: Settings
) -> None:
    put(client, settings, [event(n, n * HOUR) for n in range(1, 60)])
    assert "and 9 older incidents; --json shows all" in " ".join(verb().out.split())
    assert len(json.loads(verb("--json").out)) == 59


def test_without_a_stack_the_remedy_is_named(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL")
    said = verb()
    assert (said.code, said.out) == (2, "")
    assert "logweir up" in said.err
