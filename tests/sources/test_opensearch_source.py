"""Polling the log indices of a real server into a real ledger: every document once, whatever it looks
like."""

import select
import socket
import socketserver
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from opensearch_node import Secure
from opensearchpy import OpenSearch, helpers
from polling import wait_until
from power_cut import power

from pipeline.errors import BadPayload, BadSetting, RedisUnavailable, SourceUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.observe.presence import Presence
from pipeline.opensearch import dedup_window as seen_module
from pipeline.opensearch.client import opensearch_client
from pipeline.opensearch.dedup_window import AcceptedDocument, DedupWindow
from pipeline.producer import Producer
from pipeline.records.batch import Batch
from pipeline.records.delivery import Accepted, Full
from pipeline.settings import Settings
from pipeline.sources import opensearch as source
from pipeline.sources.documents import document_number, text_of, value_at
from pipeline.sources.opensearch import Polled, Poller, deliver, poll_once
from pipeline.sources.pushed import framed
from pipeline.workers.source import SourceWorker

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.fixture
def logs(opensearch: str, settings: Settings) -> Iterator[Settings]:
    """Settings whose source is a pattern of this test alone."""
    prefix = f"applogs-{uuid.uuid4().hex[:12]}"
    own = settings.replace(
        opensearch_url=opensearch,
        opensearch_source=f"{prefix}-*",
        opensearch_workload_fields=("cluster", "kubernetes.namespace"),
    )
    yield own
    client = opensearch_client(own)
    client.indices.delete(index=f"{prefix}-*")
    client.close()


@pytest.fixture
def server(logs: Settings) -> OpenSearch:
    return opensearch_client(logs)


@pytest.fixture
def ledger(logs: Settings, client: "redis.Redis") -> Ledger:
    return Ledger(client, logs)


def named(logs: Settings, name: str = "a") -> str:
    return str(logs.opensearch.source).replace("*", name)


def write(server: OpenSearch, index: str, *documents: dict[str, Any], prefix: str = "") -> None:
    """Documents with the ids 0, 1, ... and, where they say nothing else, a time and a workload."""
    helpers.bulk(
        server,
        [
            {
                "_index": index,
                "_id": f"{prefix}{n}",
                "_source": {"@timestamp": "2026-11-20T11:00:00Z", "cluster": "c1"} | document,
            }
            for n, document in enumerate(documents)
        ],
        refresh=True,
    )


def lines(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"message": f"line {n}"} | more for n in range(count)]


def drain(logs: Settings, ledger: Ledger, *, clock: Callable[[], datetime] = lambda: NOW) -> Polled:
    """One poll by a poller that was just started."""
    poller = Poller(opensearch_client(logs, reading=True), logs, clock=clock)
    return deliver(poller, ledger.intake.cursor(poller.cursor_key), ledger.intake.accept)


def stored(ledger: Ledger) -> list[dict[str, Any]]:
    """Every record that was accepted, with the workload of its batch."""
    rows = []
    for key in ledger.client.scan_iter(ledger.keys.batch("*")):
        batch_id = key.decode().rpartition(":")[2]
        workload = (ledger.client.hget(key, "workload") or b"").decode()
        rows += [row | {"workload": workload} for row in framed(ledger.payload(batch_id))[0].to_dicts()]
    return rows


def messages(ledger: Ledger) -> list[str]:
    return sorted(row["message"] for row in stored(ledger))


def test_every_document_is_accepted_once_however_often_it_is_polled(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    write(server, named(logs), *lines(30))
    assert drain(logs, ledger).documents == 30
    assert drain(logs, ledger).documents == 0
    write(server, named(logs), *lines(5), prefix="more-")
    write(server, named(logs, "b"), *lines(4), prefix="other-index-")
    assert drain(logs, ledger).documents == 9
    assert len(messages(ledger)) == 39


def test_a_poll_that_brings_nothing_is_seen_to_be_at_work(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    write(server, named(logs), *lines(3))
    pulses: list[int] = []
    poller = Poller(
        opensearch_client(logs, reading=True), logs, clock=lambda: NOW, pulse=lambda: pulses.append(1)
    )
    for _ in range(2):
        before = len(pulses)
        deliver(poller, ledger.intake.cursor(poller.cursor_key), ledger.intake.accept)
        assert len(pulses) > before


def test_documents_go_to_the_workload_that_their_fields_name(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    write(
        server,
        named(logs),
        {"message": "nested", "kubernetes": {"namespace": "shop"}},
        {"message": "dotted", "kubernetes.namespace": "shop"},
        {"message": "half"},
        {"message": "none", "cluster": None},
        {"message": "number", "cluster": 7},
        {"message": "long", "cluster": "x" * 500},
    )
    assert drain(logs, ledger).batches == 5
    found = {row["message"]: row["workload"] for row in stored(ledger)}
    assert found.pop("long").startswith("xxx")
    assert found == {
        "nested": "c1/shop",
        "dotted": "c1/shop",
        "half": "c1",
        "none": named(logs),
        "number": "7",
    }


def test_late_documents_of_any_time_or_none_are_found(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    write(server, named(logs), {"message": "first"})
    drain(logs, ledger)
    write(
        server,
        named(logs),
        {"message": "last year", "@timestamp": "2025-01-01T00:00:00Z"},
        {"message": "tomorrow", "@timestamp": "2026-11-21T11:00:00Z"},
        {"message": "the same time"},
        {"message": "no time", "@timestamp": None},
        prefix="late-",
    )
    assert drain(logs, ledger) == Polled(documents=4, batches=1, without_time=1)
    times = {row["message"]: row["timestamp"] for row in stored(ledger)}
    assert times["last year"] == datetime(2025, 1, 1, tzinfo=UTC)
    assert times["no time"] is None  # the pipeline gives it the time of arrival


def test_equal_times_over_page_boundaries_and_shards_lose_nothing(
    logs: Settings, server: OpenSearch, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.indices.create(index=named(logs), body={"settings": {"number_of_shards": 3}})
    write(server, named(logs), *lines(200))
    pages = source.scan.pages
    monkeypatch.setattr(source.scan, "pages", lambda *a, **k: pages(*a, **k | {"size": 7}))
    assert drain(logs, ledger).documents == 200
    assert drain(logs, ledger).documents == 0
    assert len(set(messages(ledger))) == 200


def test_what_is_no_text_and_what_is_missing_is_kept_and_counted(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    # Not in the mapping, so that the server takes whatever comes.
    server.indices.create(index=named(logs), body={"mappings": {"dynamic": False}})
    write(
        server,
        named(logs),
        {"message": {"text": "an object", "n": 1}},
        {"message": 42},
        {"message": ["one"], "level": "WARN"},
        {"message": "epoch", "@timestamp": 1_700_000_000_123, "level": 3},
        {"body": "no message", "detail": {"a": [1, 2]}},
        {"message": "a \0 byte", "@timestamp": "yesterday", "level": "shout"},
        {"message": "two\nlines\n"},
    )
    polled = drain(logs, ledger)
    assert (polled.documents, polled.without_message, polled.without_time) == (7, 1, 1)
    rows = {row["message"]: row for row in stored(ledger)}
    assert {'{"text":"an object","n":1}', "42", "one", "epoch", "two\nlines"} < set(rows)
    whole = next(text for text in rows if "no message" in text)
    assert '"detail":{"a":[1,2]}' in whole
    assert rows["a \\x00 byte"]["level"] is None
    assert rows["one"]["level"] == "warning"
    assert rows["epoch"]["timestamp"] == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert rows["two\nlines"]["lines"] == 2


def test_a_message_longer_than_a_record_becomes_several_of_one_line(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    text = "ü" * 100_000
    write(server, named(logs), {"message": text})
    drain(logs, ledger)
    rows = stored(ledger)
    assert "".join(row["message"] for row in rows) == text
    assert [row["lines"] for row in rows] == [1, 0, 0, 0]
    assert len({row["line"] for row in rows}) == 1


class Crash(Exception):
    """A killed process, as far as the ledger can tell."""


def test_a_crash_between_the_batches_of_a_page_neither_loses_nor_doubles(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    write(server, named(logs), *[{"message": f"line {n}", "cluster": f"c{n % 5}"} for n in range(50)])
    accepted = 0

    def dies_after_two(batch: Batch, **cursor: str) -> Accepted | Full:
        nonlocal accepted
        if accepted == 2:
            raise Crash
        accepted += 1
        return ledger.intake.accept(batch, **cursor)

    poller = Poller(opensearch_client(logs), logs, clock=lambda: NOW)
    with pytest.raises(Crash):
        deliver(poller, None, dies_after_two)
    # Written meanwhile, so that the next poll has other pages and batches.
    write(
        server,
        named(logs),
        *[{"message": f"later {n}", "cluster": f"c{n % 5}"} for n in range(10)],
        prefix="l",
    )
    assert drain(logs, ledger).documents == 40
    assert len(messages(ledger)) == len(set(messages(ledger))) == 60


def test_a_poll_from_an_old_cursor_goes_on_where_the_ledger_stands(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    write(server, named(logs), *[{"message": f"line {n}", "cluster": f"c{n % 3}"} for n in range(30)])
    assert drain(logs, ledger).duplicates == 0
    poller = Poller(opensearch_client(logs), logs)  # another clock: arrival is no part of what a batch is
    assert deliver(poller, None, ledger.intake.accept) == Polled()
    assert len(messages(ledger)) == 30


@pytest.mark.parametrize("after", [1, 3], ids=["while it polls", "between polls"])
def test_a_poller_reads_again_what_redis_lost(logs: Settings, server: OpenSearch, after: int) -> None:
    with power(batch_records=10) as own:
        mine = own.settings.replace(
            opensearch_url=logs.opensearch.url, opensearch_source=logs.opensearch.source
        )
        ledger = Ledger(redis.Redis.from_url(str(mine.redis.url)), mine)
        poller = Poller(opensearch_client(mine), mine, clock=lambda: NOW)
        before, accepted = own.now(), 0

        def accept(batch: Batch, **cursor: str) -> Accepted | Full:
            nonlocal accepted
            answer = ledger.intake.accept(batch, **cursor)
            accepted += 1
            if accepted == after:
                own.cut(before)
                # what a caller does that was told that Redis is away
                ledger.client.connection_pool.disconnect()
            return answer

        write(server, named(logs), *lines(30))
        deliver(poller, ledger.intake.cursor(poller.cursor_key), accept)
        deliver(poller, ledger.intake.cursor(poller.cursor_key), accept)
        assert messages(ledger) == sorted(f"line {n}" for n in range(30))


def test_a_full_ledger_is_waited_for(logs: Settings, server: OpenSearch, ledger: Ledger) -> None:
    write(server, named(logs), *lines(10))
    answers: list[Accepted | Full] = [Full(pending_bytes=1, pending_batches=1, retry_after_s=0.25)] * 2
    waited: list[float] = []

    def accept(batch: Batch, **cursor: str) -> Accepted | Full:
        return answers.pop() if answers else ledger.intake.accept(batch, **cursor)

    poller = Poller(opensearch_client(logs), logs)
    assert deliver(poller, None, accept, wait=waited.append).documents == 10
    assert waited == [0.25, 0.25]


def test_batches_stay_within_their_limits(logs: Settings, server: OpenSearch, ledger: Ledger) -> None:
    write(server, named(logs), *[{"message": f"{n}" * 9_000} for n in range(10, 40)])
    small = logs.replace(batch_records=10, batch_kib=64)
    assert drain(small, ledger).batches == 10  # three of 18 KB each
    assert drain(logs.replace(batch_records=7), ledger).documents == 0


def test_an_index_made_anew_under_the_same_name_is_read(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    write(server, named(logs), *lines(5))
    drain(logs, ledger)
    server.indices.delete(index=named(logs))
    write(server, named(logs), *lines(3))  # even under the same ids
    assert drain(logs, ledger).documents == 3
    assert drain(logs, ledger).documents == 0


def test_a_write_repeated_under_its_id_is_left_alone(
    logs: Settings, server: OpenSearch, ledger: Ledger
) -> None:
    write(server, named(logs), *lines(5))
    drain(logs, ledger)
    write(server, named(logs), *lines(5))  # a shipper that did not hear the answer
    assert drain(logs, ledger).documents == 0
    assert drain(logs, ledger, clock=lambda: NOW + timedelta(hours=1)).documents == 0


def test_no_index_yet_and_a_missing_one_are_said_with_their_remedy(logs: Settings) -> None:
    with pytest.raises(SourceUnavailable, match=r"no index is called .* yet; .* correct opensearch_source"):
        list(Poller(opensearch_client(logs), logs).poll(None))
    exact = logs.replace(opensearch_source="applogs-nowhere")
    with pytest.raises(SourceUnavailable, match="applogs-nowhere cannot be read: there is no such index"):
        list(Poller(opensearch_client(exact), exact).poll(None))


def test_a_poller_without_an_index_says_which_setting_is_missing(settings: Settings) -> None:
    with pytest.raises(BadSetting, match="set opensearch_source"):
        Poller(opensearch_client(settings.replace(opensearch_url="http://127.0.0.1:9")), settings)


def test_a_cursor_of_something_else_is_refused(logs: Settings) -> None:
    for text in ("{}", "nonsense", '{"v":1,"places":{},"shards":[],"known":"!"}', '{"v":9}'):
        with pytest.raises(BadPayload):
            list(Poller(opensearch_client(logs), logs).poll(text))


def test_a_reader_polls_a_secure_server_and_needs_no_other_right(
    secure_opensearch: Secure, settings: Settings, client: "redis.Redis"
) -> None:
    index = f"applogs-{uuid.uuid4().hex[:12]}"
    own = settings.replace(
        opensearch_url=secure_opensearch.url,
        opensearch_ca=secure_opensearch.ca,
        opensearch_source=f"{index}*",
        opensearch_user="writer",
        opensearch_password="writer-pass",
        opensearch_read_user="reader",
        opensearch_read_password="reader-pass",
    )
    admin = opensearch_client(own.replace(opensearch_user="admin", opensearch_password="admin-pass"))
    ledger = Ledger(client, own)
    write(admin, index, *lines(12), {"body": "no message"})
    try:
        assert poll_once(own, ledger.intake.accept, ledger.intake.cursor).documents == 13
        with pytest.raises(SourceUnavailable, match=r"the user 'reader' \(401\)"):
            poll_once(
                own.replace(opensearch_read_password="guess"), ledger.intake.accept, ledger.intake.cursor
            )
        with pytest.raises(SourceUnavailable, match="the user 'writer' has not the right"):
            poll_once(own.replace(opensearch_read_user=None), ledger.intake.accept, ledger.intake.cursor)
    finally:
        admin.indices.delete(index=index)


# ---- what is remembered ---------------------------------------------------------------------------


def test_a_number_that_becomes_visible_late_is_still_read_and_then_forgotten() -> None:
    seen = DedupWindow()
    seen.add({1: AcceptedDocument("s", 0, 100), 2: AcceptedDocument("s", 2, 100)})
    seen.settle("s", 2, 100)
    assert seen.place("s") == -1  # number 1 may still come
    seen.add({3: AcceptedDocument("s", 1, 130)})
    seen.settle("s", 2, 130)
    assert seen.place("s") == -1
    seen.settle("s", 2, 100 + seen_module.OVERLAP_S)
    assert seen.place("s") == 2
    assert seen.recognises(3, AcceptedDocument("s", 1, 170))


def test_an_older_view_does_not_settle_what_it_has_not_read_again() -> None:
    seen = DedupWindow()
    seen.add({1: AcceptedDocument("s", 5, 100)})
    seen.settle("s", 4, 1000)
    assert seen.place("s") == -1
    seen.settle("other", 9, 1000)
    assert seen.place("s") == -1


@pytest.mark.long
def test_what_is_remembered_is_bounded_and_every_shard_keeps_its_latest() -> None:
    seen = DedupWindow()
    seen.add({n: AcceptedDocument("quiet", n, 0) for n in range(300)})
    seen.add({1000 + n: AcceptedDocument("busy", n, 0) for n in range(20_000)})
    seen.settle("busy", 19_999, 0)
    assert len(seen.entries) == seen_module.REMEMBERED
    assert seen.place("quiet") == 99
    assert seen.place("busy") == 20_000 - (seen_module.REMEMBERED - 200) - 1


def test_a_cursor_reads_back_as_it_was_packed() -> None:
    seen = DedupWindow(
        {"u/0": 17},
        {2**63 - 1: AcceptedDocument("u/0", 18, 1_800_000_000), 0: AcceptedDocument("v/1", 2**40, 5)},
    )
    assert DedupWindow.unpack(seen.pack()) == seen
    assert DedupWindow.unpack(DedupWindow().pack()) == DedupWindow()


def test_dotted_names_find_nested_and_literal_keys() -> None:
    document = {"a.b": {"c": 1}, "a": {"b.c": 2, "d": {"e": [3]}}}
    assert value_at(document, "a.b.c") == 2
    assert value_at(document, "a.d.e") == 3
    assert value_at(document, "a.b") == {"c": 1}
    assert value_at(document, "a.x.y") is None


def test_half_a_surrogate_pair_is_shown_as_an_escape() -> None:
    assert text_of("half \ud800") == "half \\ud800"
    assert text_of({"a": "\udfff"}) == '{"a":"\\udfff"}'


def test_a_document_has_its_own_number() -> None:
    assert document_number("a", "bc") != document_number("ab", "c")
    assert all(0 <= document_number("i", str(n)) < 2**63 for n in range(1000))


# ---- the process ----------------------------------------------------------------------------------


class Running:
    """Source workers as threads."""

    def __init__(self) -> None:
        self._threads: list[tuple[SourceWorker, threading.Thread]] = []

    def start(self, settings: Settings, holder: str) -> SourceWorker:
        worker = SourceWorker(settings, holder=holder, poll_s=0.1)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        self._threads.append((worker, thread))
        return worker

    def stop(self) -> None:
        for worker, _ in self._threads:
            worker.stop.set()
        for _, thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def running(ledger: Ledger, logs: Settings) -> Iterator[Running]:
    SourceWorker(logs, holder="nobody").leases.clear_quarantine()
    threads = Running()
    yield threads
    threads.stop()


def test_two_pollers_at_once_double_nothing_and_one_takes_over_from_the_other(
    logs: Settings, server: OpenSearch, ledger: Ledger, running: Running
) -> None:
    write(server, named(logs), *lines(50))
    first, _ = running.start(logs, "one"), running.start(logs, "two")
    assert wait_until(lambda: len(messages(ledger)) >= 50, timeout_s=10)
    first.stop.set()
    write(server, named(logs), *lines(50), prefix="more-")
    assert wait_until(lambda: len(messages(ledger)) >= 100, timeout_s=10)
    running.stop()
    assert len(messages(ledger)) == 100


def test_a_server_that_is_away_is_complained_of_until_it_is_back(
    logs: Settings, server: OpenSearch, ledger: Ledger, running: Running
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = logs.replace(opensearch_url=f"http://127.0.0.1:{port}")
    running.start(own, "one")
    presence = Presence(ledger.client, own)
    assert wait_until(lambda: presence.trouble() is not None, timeout_s=10)
    trouble = presence.trouble()
    assert trouble is not None
    assert trouble.stage == "source"
    assert "is not reachable" in trouble.reason
    write(server, named(logs), *lines(20))
    with door(port, str(logs.opensearch.url)):
        assert wait_until(lambda: len(messages(ledger)) == 20, timeout_s=20)
        running.stop()


@contextmanager
def door(port: int, url: str) -> Iterator[None]:
    """The server behind `url`, reachable at another port while the block lasts."""
    target = urlsplit(url)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((target.hostname or "", target.port or 80)) as far:
                pair = {self.request: far, far: self.request}
                while True:
                    for ready in select.select(list(pair), [], [])[0]:
                        data = ready.recv(65536)
                        if not data:
                            return
                        pair[ready].sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", port), Handler) as listening:
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield
        listening.shutdown()


def test_redis_that_is_away_is_waited_for(
    logs: Settings, server: OpenSearch, ledger: Ledger, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(server, named(logs), *lines(10))
    tries = []

    def away(*_: object, **__: object) -> Accepted:
        tries.append(1)
        if len(tries) < 3:
            raise RedisUnavailable("Redis does not answer; it is tried again")
        monkeypatch.undo()
        return Accepted(batch_id="never", duplicate=True)

    monkeypatch.setattr("pipeline.workers.source.RETRY_S", 0.05)
    monkeypatch.setattr(Producer, "accept", away)
    running.start(logs, "one")
    # The third answer was not the ledger's: nothing of it is in, so the poll after it reads the documents
    # again.
    assert wait_until(lambda: len(messages(ledger)) == 10, timeout_s=10)
    assert len(tries) == 3
