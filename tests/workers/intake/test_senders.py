"""Who sends: counted by each process, added up in Redis, bounded there."""

import json

import pytest
from command_line import Verb
from intake_process import running_intake

from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.service import senders as senders_module
from pipeline.service.senders import SenderCounts, SentBy, read_senders, senders_page
from pipeline.settings import Settings


def sender(peer: str) -> SentBy:
    return SentBy(protocol="otlp", key="web", peer=peer)


def test_counts_of_several_processes_add_up(settings: Settings) -> None:
    client = connect(settings)
    for lines in (3, 4):
        counts = SenderCounts()
        counts.heard(sender("10.0.0.1"), lines=lines)
        counts.heard(sender("10.0.0.1"), refused=True)
        counts.push(client, settings)
        counts.push(client, settings)  # nothing is left to add
    (found,) = read_senders(client, settings)
    assert (found.lines, found.requests, found.refused, found.duplicates) == (7, 4, 2, 0)
    assert found.first <= found.last and (found.protocol, found.key, found.peer) == (
        "otlp",
        "web",
        "10.0.0.1",
    )


def test_the_sender_that_was_silent_for_longest_makes_room(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders_module, "MAX_SENDERS", 2)
    client = connect(settings)
    for peer in ("a", "b", "a", "c"):
        counts = SenderCounts()
        counts.heard(sender(peer))
        before = client.time()
        while client.time()[1] // 2_000 == before[1] // 2_000:  # type: ignore[index]
            pass  # the clock of Redis has to go on by a millisecond
        counts.push(client, settings)
    assert {found.peer for found in read_senders(client, settings)} == {"a", "c"}


def test_strangers_that_were_only_refused_make_no_entry_and_take_no_place(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders_module, "MAX_SENDERS", 2)
    client = connect(settings)
    counts = SenderCounts()
    for peer in ("x", "y", "z", "a"):
        counts.heard(sender(peer), refused=True)
    counts.heard(sender("a"), lines=1)
    counts.heard(sender("b"), lines=2)
    counts.push(client, settings)
    counts.heard(sender("b"), refused=True)  # known by now
    counts.push(client, settings)
    found = {one.peer: (one.lines, one.requests, one.refused) for one in read_senders(client, settings)}
    assert found == {"a": (1, 1, 0), "b": (2, 2, 1)}


def test_many_new_senders_cost_redis_no_more_than_known_ones(settings: Settings) -> None:
    client = connect(settings)

    def push(numbers: range) -> float:
        """Seconds of the processor of Redis."""
        counts = SenderCounts()
        for number in numbers:
            counts.heard(sender(str(number)), lines=1)
        before = client.info("cpu")
        counts.push(client, settings)
        after = client.info("cpu")
        return sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys"))

    push(range(1_000))
    known = push(range(500))
    assert push(range(1_000, 1_500)) < 10 * max(known, 0.01)
    peers = {int(one.peer) for one in read_senders(client, settings)}
    assert peers == {*range(500), *range(1_000, 1_500)}
    keys = Keys(settings.redis.key_prefix)
    assert client.hlen(keys.senders) == client.zcard(keys.senders_heard) == 1_000


def test_a_sender_that_is_heard_between_two_pages_is_on_one_of_them(settings: Settings) -> None:
    client = connect(settings)

    def hear(*peers: str) -> None:
        counts = SenderCounts()
        for peer in peers:
            counts.heard(sender(peer), lines=1)
        counts.push(client, settings)

    hear(*"abcd")
    first = senders_page(client, settings, 2, None)
    hear("c")
    second = senders_page(client, settings, 2, first.next)
    assert [one.peer for one in (*first.senders, *second.senders)] == [*"abcd"]
    assert second.next is None


def test_counts_survive_a_redis_that_is_away(settings: Settings) -> None:
    counts = SenderCounts()
    counts.heard(sender("a"), lines=2)
    counts.push(connect(settings.replace(redis_url="redis://127.0.0.1:1/0")), settings)
    counts.heard(sender("a"), lines=3)
    counts.push(connect(settings), settings)
    assert [found.lines for found in read_senders(connect(settings), settings)] == [5]


@pytest.mark.long
def test_the_verb_shows_senders_of_a_process_with_what_became_of_their_requests(
    settings: Settings, logweir: Verb
) -> None:
    assert "nobody has sent" in logweir("senders").out
    with running_intake(settings) as intake:
        for _ in range(2):
            intake.ask("/lines?workload=a", b"x\ny", Idempotency_Key="k")
        intake.ask("/v1/logs", b"", Content_Type="application/x-protobuf")
        intake.ask("/v1/logs", b"\xff", Content_Type="application/x-protobuf")
    facts = {f["protocol"]: f for f in json.loads(logweir("senders", "--json").out)}
    assert [facts["lines"][name] for name in ("peer", "lines", "requests", "duplicates")] == [
        "127.0.0.1",
        2,
        2,
        1,
    ]
    assert (facts["otlp"]["refused"], facts["otlp"]["lines"]) == (1, 0)
    assert "127.0.0.1" in logweir("senders").out
    keys = {
        name.decode() for name in connect(settings).hgetall(f"{{{settings.redis.key_prefix}}}:metrics:intake")
    }
    assert "logweir_intake_requests_total|protocol=lines|outcome=duplicate" in keys
    assert "logweir_intake_requests_total|protocol=otlp|outcome=refused" in keys


@pytest.mark.parametrize(
    ("first_min", "last_min", "silent"),
    [(0, 60, 1), (0, 59, 0), (0, 80, 0), (0, 74.9, 1), (0, -1350, 0)],
    ids=["steady, then silent", "never steady", "heard lately", "just silent", "gone for a day"],
)
def test_a_sender_is_silent_after_an_hour_of_lines_and_a_quarter_of_none(
    first_min: float, last_min: float, silent: int
) -> None:
    now = 90 * 60_000
    last = int(last_min * 60_000)
    text = f'{{"first_ms": {min(int(first_min * 60_000), last - 7_200_000 * (last < 0))}, "last_ms": {last}}}'
    assert senders_module.silent_senders([text.encode(), b"nonsense"], now) == silent
