"""The sweep of a worker finds the formats of senders in the samples of the intake."""

import json
from collections.abc import Iterator

import pytest

from pipeline.messages.app import make_app
from pipeline.observe import counters as metrics
from pipeline.records.pushed import PushedRecords
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.service import senders as senders_module
from pipeline.service.senders import SenderCounts, SentBy, read_senders
from pipeline.settings import Settings
from pipeline.tasks import recognise
from pipeline.tasks.context import Context
from pipeline.tasks.recognise import recognise_samples

NGINX = '192.0.2.7 - - [20/Nov/2026:10:00:00 +0000] "GET /a HTTP/1.1" 200 12 "-" "curl/8"'
JSON = '{"time":"2026-11-20T10:00:00Z","level":"info","msg":"a"}'
PLAIN = "no format has this line"


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    made = Context(make_app(settings), settings)
    yield made
    made.app.close()


def heard(settings: Settings, *raws: str | None, peer: str = "a", lines: int = 1) -> None:
    """One request of a sender. None: a record with the fields of its protocol."""
    counts = SenderCounts()
    records = PushedRecords(
        [None if raw is not None else "parsed" for raw in raws], raws=[raw or "{}" for raw in raws]
    )
    counts.heard(SentBy(protocol="bulk", key="", peer=peer), lines=lines, records=records)
    counts.push(connect(settings), settings)


def formats_of(settings: Settings) -> dict[str, float]:
    (found,) = read_senders(connect(settings), settings)
    return dict(found.formats)


def test_a_sender_has_the_formats_of_its_sample(settings: Settings, context: Context) -> None:
    heard(settings, *[NGINX] * 12, *[JSON] * 4, PLAIN, None, None, None, lines=20)
    assert formats_of(settings) == {}
    assert recognise_samples(context) == 1
    assert formats_of(settings) == {"access": 0.6, "json": 0.2, "fields": 0.15, "none": 0.05}
    (found,) = read_senders(connect(settings), settings)
    assert (found.lines, found.requests) == (20, 1)
    heard(settings, lines=2)  # counts go on beside them
    (found,) = read_senders(connect(settings), settings)
    assert (found.lines, found.formats["access"]) == (22, 0.6)
    assert recognise_samples(context) == 0  # of a request without a record
    assert connect(settings).exists(Keys(settings.redis.key_prefix).samples) == 0


def test_shares_are_of_the_last_lines_and_of_few_formats(
    settings: Settings, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recognise, "WINDOW", 40)
    monkeypatch.setattr(recognise, "MOST_FORMATS", 2)
    heard(settings, *[NGINX] * 14, *[JSON] * 4, PLAIN, PLAIN)
    recognise_samples(context)
    assert set(formats_of(settings)) == {"access", "json"}
    for _ in range(6):
        heard(settings, *[JSON] * 20)
        recognise_samples(context)
    assert formats_of(settings)["json"] > 0.9


def test_a_sender_shows_a_sample_once_a_minute(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    key, client = Keys(settings.redis.key_prefix).samples, connect(settings)
    counts = SenderCounts()
    for minute, waiting in ((0, 1), (0.5, 1), (1.1, 2)):
        monkeypatch.setattr(senders_module.time, "monotonic", lambda minute=minute: 1_000 + 60 * minute)
        for peer in "ab":
            counts.heard(
                SentBy(protocol="bulk", key="", peer=peer), records=PushedRecords([None], raws=[JSON])
            )
        counts.push(client, settings)
        assert client.llen(key) == 2 * waiting
    assert 0 < client.ttl(key) <= 300
    assert json.loads(client.lrange(key, 0, 0)[0]) == ["bulk\x1f\x1fa", [JSON], 0]  # type: ignore[index]


def test_a_sample_is_bounded(settings: Settings) -> None:
    heard(settings, *["x" * 5_000] * 1_000)
    (packed,) = connect(settings).lrange(Keys(settings.redis.key_prefix).samples, 0, -1)  # type: ignore[misc]
    assert len(packed) < 21_000


def test_a_damaged_sample_stops_nothing_and_a_forgotten_sender_stays_forgotten(
    settings: Settings, context: Context
) -> None:
    client, keys = connect(settings), Keys(settings.redis.key_prefix)
    client.rpush(keys.samples, "nonsense", json.dumps(["bulk\x1f\x1fgone", [JSON], 0]))
    heard(settings, JSON)
    assert recognise_samples(context) == 3
    assert formats_of(settings) == {"json": 1.0}


def test_lines_that_were_looked_at_are_counted(
    settings: Settings, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, int]] = []
    monkeypatch.setattr(metrics, "lines_recognised", lambda *count: seen.append(count))
    heard(settings, NGINX, JSON, PLAIN, None)
    recognise_samples(context)
    assert seen == [("bulk", "fields", 1), ("bulk", "none", 1), ("bulk", "format", 2)]
