"""What goes wrong between the sink and OpenSearch: nothing is lost, and one sentence says what to do."""

import random
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from opensearch_node import Node, Secure, forget
from opensearch_proxy import Proxy, proxy_to
from opensearchpy import OpenSearch
from polling import wait_until
from sink_contract import rows

from pipeline.drain.templates import Template
from pipeline.errors import BadSetting, Rejected, SinkUnavailable, SourceUnavailable
from pipeline.opensearch import bulk
from pipeline.opensearch.client import opensearch_client, translate_errors
from pipeline.opensearch.documents import RESULT_PROPERTIES, Document, ensure_template, index_template
from pipeline.records.batch import utc_now
from pipeline.settings import Settings
from pipeline.sinks.opensearch import OpenSearchSink
from pipeline.sinks.template_index import templates_index, write_templates

BUSY = (429, "rejected_execution_exception", "the queue is full")


@pytest.fixture
def proxy(opensearch: str) -> Iterator[Proxy]:
    with proxy_to(opensearch) as proxy:
        yield proxy


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def sink(proxy: Proxy, search_settings: Settings, waits: list[float]) -> OpenSearchSink:
    """A sink behind the proxy, whose waits are noted instead of waited."""
    through = search_settings.replace(opensearch_url=proxy.url)
    return OpenSearchSink(through, sleep=waits.append, jitter=random.Random(7).random)


def stored(settings: Settings) -> dict[str, dict[str, Any]]:
    """Every document of the sink by id, past the sink."""
    client = opensearch_client(settings)
    index = f"{settings.opensearch.prefix}-results-*"
    client.indices.refresh(index=index)
    hits = client.search(index=index, body={"size": 10_000})["hits"]["hits"]
    client.close()
    found = {hit["_id"]: hit["_source"] for hit in hits}
    assert len(found) == len(hits), "an id is in two indices"
    return found


def ids(frame: pl.DataFrame) -> set[str]:
    return set(frame["record_id"].to_list())


# Busy


@pytest.mark.parametrize("status", [429, 503])
def test_only_the_documents_the_server_was_too_busy_for_are_sent_again(
    sink: OpenSearchSink, proxy: Proxy, search_settings: Settings, waits: list[float], status: int
) -> None:
    unlucky = {"k-1", "k-4"}
    proxy.refuse = lambda n, name: (status, *BUSY[1:]) if n < 2 and name in unlucky else None
    sink.write("b", rows(6))
    assert [len(b) for b in proxy.bulks] == [6, 2, 2]
    assert set(proxy.bulks[1]) == unlucky
    assert set(stored(search_settings)) == ids(rows(6))
    assert len(waits) == 2
    assert 0.1 <= waits[0] <= 0.2 <= waits[1] <= 0.4


def test_a_whole_bulk_that_was_refused_as_too_busy_is_sent_again(
    sink: OpenSearchSink, proxy: Proxy, search_settings: Settings
) -> None:
    proxy.busy = [429, 503]
    sink.write("b", rows(3))
    assert [len(b) for b in proxy.bulks] == [3, 3, 3]
    assert set(stored(search_settings)) == ids(rows(3))


def test_a_server_that_stays_busy_is_given_up_after_bounded_waits(
    sink: OpenSearchSink, proxy: Proxy, waits: list[float]
) -> None:
    proxy.refuse = lambda n, name: BUSY if name == "k-2" else None
    with pytest.raises(SinkUnavailable, match=r"1 documents are left over.*too busy.*queue is full"):
        sink.write("b", rows(3))
    assert len(proxy.bulks) == bulk.TRIES
    assert sum(waits) < 7


# Refused


def test_a_record_the_mapping_refuses_is_named_and_the_others_are_stored(
    sink: OpenSearchSink, search_settings: Settings
) -> None:
    client = opensearch_client(search_settings)
    day = f"{search_settings.opensearch.prefix}-results-2026.11.20"
    # Somebody made the index by hand, with another idea of what a level is.
    client.indices.create(
        index=day,
        body={"mappings": {"properties": {"level": {"type": "integer"}, "batch_id": {"type": "keyword"}}}},
    )
    client.close()
    frame = rows(2).vstack(rows(1, key="bad", level="sesame")).vstack(rows(1, key="good"))
    named = r"bad-0 is refused \(mapper_parsing_exception.*field \[level\] of type \[integer\]"
    with pytest.raises(Rejected, match=named) as caught:
        sink.write("b", frame)
    assert "sesame" not in str(caught.value), "log text has no place in a message"
    assert set(stored(search_settings)) == {"k-0", "k-1", "good-0"}


def test_a_refused_record_does_not_keep_busy_ones_from_being_sent_again(
    sink: OpenSearchSink, proxy: Proxy, search_settings: Settings
) -> None:
    bad = (400, "document_parsing_exception", "failed to parse")
    proxy.refuse = lambda n, name: bad if name == "k-0" else BUSY if n == 0 else None
    with pytest.raises(Rejected, match=r"k-0 is refused \(document_parsing_exception: failed to parse\)"):
        sink.write("b", rows(4))
    assert set(stored(search_settings)) == {"k-1", "k-2", "k-3"}


def test_a_record_without_a_time_is_named(sink: OpenSearchSink) -> None:
    frame = rows(2).with_columns(timestamp=pl.lit(None, dtype=pl.Datetime("us", "UTC")))
    with pytest.raises(Rejected, match="k-0 has no timestamp"):
        sink.write("b", frame)


def test_a_cluster_that_takes_no_more_shards_can_heal(sink: OpenSearchSink, proxy: Proxy) -> None:
    full = (400, "validation_exception", "this cluster currently has [1000]/[1000] maximum shards open")
    proxy.refuse = lambda n, name: full
    with pytest.raises(SinkUnavailable, match="maximum shards open"):
        sink.write("b", rows(1))


def test_an_index_that_is_blocked_can_heal_and_says_what_to_do(
    search_settings: Settings, waits: list[float]
) -> None:
    sink = OpenSearchSink(search_settings, sleep=waits.append)
    sink.write("b", rows(3))
    client = opensearch_client(search_settings)
    index = f"{search_settings.opensearch.prefix}-results-*"
    for block in ("read_only_allow_delete", "write", "read_only"):
        client.indices.put_settings(index=index, body={f"index.blocks.{block}": True})
        with pytest.raises(SinkUnavailable, match=r"results-2026.*is blocked.*free disk space or remove"):
            sink.write("b", rows(3))
        client.indices.put_settings(index=index, body={f"index.blocks.{block}": None})
    client.close()
    sink.write("b", rows(3))
    assert waits == []


def test_a_closed_index_can_heal(search_settings: Settings) -> None:
    sink = OpenSearchSink(search_settings)
    sink.write("b", rows(1))
    client = opensearch_client(search_settings)
    day = f"{search_settings.opensearch.prefix}-results-2026.11.20"
    client.indices.close(index=day)
    with pytest.raises(SinkUnavailable, match="the index is closed; open it"):
        sink.write("b", rows(1))
    client.indices.open(index=day)
    client.close()
    sink.write("b", rows(1))


# Away


def test_an_answer_that_was_lost_leads_to_no_second_copy(
    sink: OpenSearchSink, proxy: Proxy, search_settings: Settings
) -> None:
    proxy.lose_answers = 1
    with pytest.raises(SinkUnavailable, match=r"127\.0\.0\.1:\d+ is not reachable"):
        sink.write("b", rows(4))
    assert set(stored(search_settings)) == ids(rows(4)), "it was carried out, only nobody knew"
    sink.write("b", rows(4))
    assert set(stored(search_settings)) == ids(rows(4))


def test_a_server_that_is_down_is_named_without_the_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sink = OpenSearchSink(Settings(opensearch_url=f"http://me:sesame@127.0.0.1:{port}"))
    calls = (
        lambda: sink.write("b", rows(1)),
        lambda: sink.read("b", "shop"),
        lambda: sink.remove("b", "shop"),
    )
    for call in calls:
        with pytest.raises(
            SinkUnavailable, match=rf"127\.0\.0\.1:{port} is not reachable.*start it"
        ) as caught:
            call()
        assert "sesame" not in str(caught.value)


@pytest.mark.long
def test_a_bulk_that_kill_9_interrupts_is_complete_and_single_after_the_return() -> None:
    node = Node.on_free_port()
    url = node.start()
    here = Settings(opensearch_url=url, opensearch_prefix=f"logweir-t{uuid.uuid4().hex[:12]}")
    sink = OpenSearchSink(here)
    frames = [rows(2_000, key=f"b{i}") for i in range(400)]
    accepted: list[int] = []
    failed: list[Exception] = []

    def fill() -> None:
        try:
            for i, frame in enumerate(frames):
                sink.write(f"b{i}", frame)
                accepted.append(i)
        except SinkUnavailable as exc:
            failed.append(exc)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        assert wait_until(lambda: len(accepted) >= 2, timeout_s=60)
        node.kill()
        thread.join(60)
        assert len(failed) == 1
        assert re.search("is not reachable", str(failed[0]))
        node.start()
        # As the ledger does: the batch that failed is written again; the accepted ones are not.
        again = len(accepted)
        sink.write(f"b{again}", frames[again])
        for i in [*accepted, again]:
            got = sink.read(f"b{i}", "shop")
            assert got is not None
            assert got.equals(frames[i])
        client = opensearch_client(here)
        count = client.count(index=f"{here.opensearch.prefix}-results-*")["count"]
        client.close()
        assert count == 2_000 * (again + 1)
    finally:
        thread.join(60)
        node.close()


# Rights and certificates


@pytest.fixture
def secure(secure_opensearch: Secure) -> Iterator[Settings]:
    """The writer's settings on the secure server."""
    own = Settings(
        opensearch_url=secure_opensearch.url,
        opensearch_ca=secure_opensearch.ca,
        opensearch_user="writer",
        opensearch_password="writer-pass",
        opensearch_read_user="reader",
        opensearch_read_password="reader-pass",
        opensearch_prefix=f"logweir-t{uuid.uuid4().hex[:12]}",
    )
    yield own
    forget(own.replace(opensearch_user="admin", opensearch_password="admin-pass"))


def test_a_user_with_rights_on_our_indices_alone_can_do_everything_a_sink_does(secure: Settings) -> None:
    for kind in ("results", "baseline"):
        sink = OpenSearchSink(secure, kind=kind)
        sink.write("b", rows(3))
        got = sink.read("b", "shop")
        assert got is not None
        assert got.equals(rows(3))
        sink.remove("b", "shop")
        assert sink.read("b", "shop") is None
    client = opensearch_client(secure)
    assert write_templates(client, secure, TEMPLATES) == 2
    client.close()


def test_removing_leaves_no_search_open_though_the_role_may_not_close_scrolls(secure: Settings) -> None:
    # A server opens 500 scrolls at most; one left behind by every removal stopped it for minutes.
    admin = opensearch_client(secure.replace(opensearch_user="admin", opensearch_password="admin-pass"))

    def still_open() -> int:
        nodes = admin.nodes.stats(metric="indices", index_metric="search")["nodes"].values()
        return sum(int(node["indices"]["search"]["scroll_current"]) for node in nodes)

    sink = OpenSearchSink(secure)
    before = still_open()
    sink.write("b", rows(3))
    sink.remove("b", "shop")
    sink.remove("b", "shop")
    assert sink.read("b", "shop") is None
    assert still_open() == before
    admin.close()


def test_a_probe_tells_before_the_first_result_who_may_write_where(secure: Settings) -> None:
    assert "will be made with the first result" in OpenSearchSink(secure).probe()
    client = opensearch_client(secure)
    assert not client.indices.exists(
        index=f"{secure.opensearch.prefix}-*", params={"allow_no_indices": "false"}
    )
    client.indices.create(index=f"{secure.opensearch.prefix}-results-{utc_now():%Y.%m.%d}")
    client.close()
    assert "can be read and written" in OpenSearchSink(secure).probe()
    elsewhere = secure.replace(opensearch_prefix="other")
    logs = secure.replace(
        opensearch_user="reader", opensearch_password="reader-pass", opensearch_prefix="applogs"
    )
    for wrong in (elsewhere, logs):
        with pytest.raises(SinkUnavailable, match="has not the right"):
            OpenSearchSink(wrong).probe()


def test_a_wrong_password_names_the_user_and_never_the_password(secure: Settings) -> None:
    wrong = OpenSearchSink(secure.replace(opensearch_password="sesame"))
    with pytest.raises(SinkUnavailable, match=r"does not accept the user 'writer' \(401\)") as caught:
        wrong.write("b", rows(1))
    assert "sesame" not in str(caught.value)


def test_a_user_in_the_url_is_used_where_the_settings_name_none(secure: Settings) -> None:
    url = secure.opensearch.url or ""
    inside = secure.replace(
        opensearch_url=url.replace("https://", "https://writer:writer%2Dpass@"),
        opensearch_user=None,
        opensearch_password=None,
    )
    OpenSearchSink(inside).write("b", rows(1))


def test_reading_logs_is_done_as_the_reading_user(secure: Settings) -> None:
    client = opensearch_client(secure, reading=True)
    what = "logs cannot be read from logweir-x"
    with (
        pytest.raises(
            SourceUnavailable, match=r"the user 'reader' has not the right.*indices:data/read/search"
        ),
        translate_errors(what, SourceUnavailable),
    ):
        client.search(index="logweir-x")
    client.close()


def test_a_role_without_the_right_is_told_the_action_that_is_missing(secure: Settings) -> None:
    elsewhere = secure.replace(opensearch_prefix=f"other-{uuid.uuid4().hex[:12]}")
    try:
        with pytest.raises(SinkUnavailable) as caught:
            OpenSearchSink(elsewhere).write("b", rows(1))
        said = str(caught.value)
        assert re.search(r"the index other-\w+-results-2026\.11\.20, the user has not the right", said)
        assert "no permissions for [indices:" in said
        assert "name=writer" in said
        reader = secure.replace(opensearch_user="reader", opensearch_password="reader-pass")
        with pytest.raises(SinkUnavailable, match="the user 'reader' has not the right"):
            OpenSearchSink(reader).write("b", rows(1))
    finally:
        forget(elsewhere.replace(opensearch_user="admin", opensearch_password="admin-pass"))


def test_single_documents_without_the_right_can_heal_and_are_not_rejected(
    sink: OpenSearchSink, proxy: Proxy
) -> None:
    denied = (403, "security_exception", "no permissions for [indices:data/write/bulk[s]]")
    proxy.refuse = lambda n, name: denied if name == "k-1" else None
    with pytest.raises(SinkUnavailable, match=r"has not the right \(no permissions for"):
        sink.write("b", rows(3))


def test_a_certificate_nobody_trusts_names_the_setting(secure: Settings, tmp_path: Path) -> None:
    alone = secure.replace(opensearch_ca=None)
    missing = secure.replace(opensearch_ca=tmp_path / "no.pem")
    for wrong in (alone, missing):
        with pytest.raises(SinkUnavailable, match=r"certificate of \S+:\d+ .*set opensearch_ca"):
            OpenSearchSink(wrong).write("b", rows(1))


def test_a_server_without_tls_is_not_blamed_on_its_certificate(opensearch: str) -> None:
    client = opensearch_client(Settings(opensearch_url=opensearch.replace("http://", "https://")))
    with (
        pytest.raises(SinkUnavailable, match="does not speak TLS"),
        translate_errors("nothing can be written", SinkUnavailable),
    ):
        client.info()
    client.close()


# The client


def test_without_a_url_the_client_says_which_setting_is_missing() -> None:
    with pytest.raises(BadSetting, match="OPENSEARCH_URL"):
        opensearch_client(Settings())


def test_bugs_are_not_explained_away() -> None:
    with pytest.raises(KeyError), translate_errors("it cannot be written", SinkUnavailable):
        raise KeyError("a bug")


# Templates of indices, and of lines

TEMPLATES = [
    Template(template_id=1, text="user <*> logged in", severe=False, workload="shop"),
    Template(template_id=2, text="größe <*> failed", severe=True, workload="shop"),
]


@pytest.fixture
def search(search_settings: Settings) -> Iterator[OpenSearch]:
    client = opensearch_client(search_settings)
    yield client
    client.close()


def test_an_index_template_that_somebody_removed_is_installed_again(
    search_settings: Settings, search: OpenSearch
) -> None:
    sink = OpenSearchSink(search_settings)
    sink.write("b", rows(1))
    search.indices.delete(index=sink.indices)
    search.indices.delete_index_template(name=sink.prefix)
    sink.write("b", rows(1))
    mapping = search.indices.get_mapping(index=sink.indices)
    for index in mapping.values():
        assert set(index["mappings"]["properties"]) == set(RESULT_PROPERTIES)
        assert index["mappings"]["properties"]["pattern_id"] == {"type": "keyword"}


def test_an_index_template_of_this_version_is_left_as_an_operator_changed_it(
    search_settings: Settings, search: OpenSearch
) -> None:
    name = f"{search_settings.opensearch.prefix}-results"
    body = index_template(f"{name}-*", RESULT_PROPERTIES)

    def shards() -> str:
        found = search.indices.get_index_template(name=name)["index_templates"][0]["index_template"]
        return str(found["template"]["settings"]["index"]["number_of_shards"])

    body["template"]["settings"]["index"]["number_of_shards"] = 3
    search.indices.put_index_template(name=name, body=body)
    ours = index_template(f"{name}-*", RESULT_PROPERTIES)
    ensure_template(search, name, ours)
    assert shards() == "3"
    ensure_template(search, name, {**ours, "version": ours["version"] + 1})
    assert shards() == "1"


def test_fields_the_mapping_does_not_know_are_kept_and_change_nothing(
    search_settings: Settings, search: OpenSearch
) -> None:
    sink = OpenSearchSink(search_settings)
    sink.write("b", rows(1))
    day = f"{sink.prefix}-2026.11.20"
    newer = Document(index=day, id="n", body=b'{"batch_id":"n","new":{"a":1},"message":"m"}')
    bulk.write_documents(search, [newer], "it cannot be written")
    assert search.get(index=day, id="n")["_source"]["new"] == {"a": 1}
    properties = search.indices.get_mapping(index=day)[day]["mappings"]["properties"]
    assert set(properties) == set(RESULT_PROPERTIES)


def test_a_document_that_was_written_since_it_was_seen_is_not_deleted(
    search_settings: Settings, search: OpenSearch
) -> None:
    sink = OpenSearchSink(search_settings)
    sink.write("b", rows(3))
    search.indices.refresh(index=sink.indices)
    hits = search.search(index=sink.indices, body={"size": 10, "seq_no_primary_term": True})["hits"]["hits"]
    sink.write("later", rows(1))  # the first of them again, in another batch
    gone = {"index": f"{sink.prefix}-2000.01.01", "id": "k", "seq_no": 1, "primary_term": 1}
    seen = [
        bulk.Removal(
            index=hit["_index"], id=hit["_id"], seq_no=hit["_seq_no"], primary_term=hit["_primary_term"]
        )
        for hit in hits
    ]
    bulk.remove_documents(search, [*seen, bulk.Removal(**gone)], "they cannot be removed")
    assert {name: d["batch_id"] for name, d in stored(search_settings).items()} == {"k-0": "later"}


def test_records_lie_in_the_index_of_their_own_day(search_settings: Settings, search: OpenSearch) -> None:
    sink = OpenSearchSink(search_settings)
    sink.write("b", rows(3))
    names = sorted(search.indices.get(index=sink.indices))
    assert names == [f"{sink.prefix}-2026.11.20", f"{sink.prefix}-2026.11.21"]


def test_requests_are_bounded_by_count_and_by_size() -> None:
    small = [Document(index="i", id=str(i), body=b"{}") for i in range(bulk.MAX_DOCUMENTS + 1)]
    assert [len(c) for c in bulk.chunks(small)] == [bulk.MAX_DOCUMENTS, 1]
    big = [Document(index="i", id=str(i), body=b"x" * (bulk.MAX_BYTES // 2)) for i in range(3)]
    huge = Document(index="i", id="huge", body=b"x" * (bulk.MAX_BYTES + 1))
    assert [len(c) for c in bulk.chunks([*big, huge, *big])] == [2, 1, 1, 2, 1]
    assert list(bulk.chunks([])) == []


def test_templates_are_stored_under_their_ids_and_newer_texts_replace_older(
    search_settings: Settings, search: OpenSearch
) -> None:
    index = templates_index(search_settings)
    assert write_templates(search, search_settings, TEMPLATES) == 2
    wider = replace(TEMPLATES[0], text="user <*> logged <*>")
    assert write_templates(search, search_settings, [wider]) == 1
    assert write_templates(search, search_settings, []) == 0
    search.indices.refresh(index=index)
    hits = search.search(index=index, body={"sort": "template_id"})["hits"]["hits"]
    assert [(hit["_id"], hit["_source"]["text"]) for hit in hits] == [
        ("1", "user <*> logged <*>"),
        ("2", "größe <*> failed"),
    ]
    down = opensearch_client(search_settings.replace(opensearch_url="http://127.0.0.1:9"))
    with pytest.raises(SinkUnavailable, match="templates cannot be written"):
        write_templates(down, search_settings, TEMPLATES)
    down.close()
