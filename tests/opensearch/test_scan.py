"""Scans of a real server: order, ties, bounded pages, and a point in time that goes away."""

import json
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from opensearch_node import Secure
from opensearchpy import NotFoundError, OpenSearch, helpers
from polling import wait_until

from pipeline.errors import SourceUnavailable
from pipeline.opensearch import scan
from pipeline.opensearch.client import opensearch_client
from pipeline.settings import Settings

ALL: dict[str, Any] = {"match_all": {}}
BY_TIME = [{"@timestamp": {"order": "asc", "numeric_type": "date", "unmapped_type": "date"}}]


@pytest.fixture
def server(opensearch: str) -> Iterator[OpenSearch]:
    client = opensearch_client(Settings(opensearch_url=opensearch))
    yield client
    client.close()


@pytest.fixture
def index(server: OpenSearch) -> Iterator[str]:
    """Three shards: their numbers of writes are equal all the time."""
    name = f"applogs-{uuid.uuid4().hex[:12]}"
    server.indices.create(index=name, body={"settings": {"number_of_shards": 3, "number_of_replicas": 0}})
    yield name
    server.indices.delete(index=name, params={"ignore_unavailable": "true"})


def fill(server: OpenSearch, index: str, documents: int, *, first: int = 0) -> set[str]:
    """Documents of which 50 at a time have one timestamp."""
    names = [str(n) for n in range(first, first + documents)]
    helpers.bulk(
        server,
        (
            {
                "_index": index,
                "_id": n,
                "message": f"line {n}",
                "@timestamp": 1_700_000_000_000 + int(n) // 50,
            }
            for n in names
        ),
        refresh=True,
    )
    return set(names)


def ids(pages: Iterator[pl.DataFrame]) -> list[str]:
    return [doc_id for page in pages for doc_id in page["_id"]]


class Points:
    """The points in time that the scans of one test open; other tests have theirs on the same server."""

    def __init__(self, server: OpenSearch, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.made: list[str] = []
        create = server.create_pit

        def noted(**given: Any) -> dict[str, Any]:
            made: dict[str, Any] = create(**given)
            self.made.append(made["pit_id"])
            return made

        monkeypatch.setattr(server, "create_pit", noted)

    def open(self) -> set[str]:
        try:
            found = self.server.get_all_pits().get("pits", [])
        except NotFoundError:  # the server has none
            return set()
        return {pit.get("pit_id") for pit in found} & set(self.made)

    def expire(self) -> bool:
        """Takes every one of them away; False when there was none."""
        if ids := sorted(self.open()):
            self.server.delete_pit(body={"pit_id": ids})
        return bool(ids)


@pytest.fixture
def points(server: OpenSearch, monkeypatch: pytest.MonkeyPatch) -> Points:
    return Points(server, monkeypatch)


@pytest.mark.parametrize("known", [0, 1, 40, 41])
def test_only_the_ends_of_a_page_are_compared_with_known_documents(known: int) -> None:
    """40 documents begin the page, 50 end it; one known document may have been removed since."""
    sorts = [[1, 7]] * 40 + [[2, n] for n in range(10)] + [[2, 90]] * 50
    page = pl.DataFrame(
        {"_index": ["logs"] * 100, "_id": [str(n) for n in range(100)], "sort": sorts},
        schema={"_index": pl.String, "_id": pl.String, "sort": pl.List(pl.Int64)},
    )
    there = (
        {("logs", str(n)) for n in range(39, 39 - min(known, 40), -1)} | {("logs", "removed")}
        if known
        else set()
    )
    kept = scan.without_head(page, there)
    assert kept["_id"].to_list() == [one for one in page["_id"].to_list() if ("logs", one) not in there]
    assert scan.at_end(kept, [2, 90]) == {("logs", str(n)) for n in range(50, 100)}
    assert scan.at_end(kept.clear(), [2, 90]) == scan.at_end(kept, [2, 89]) == set()


class Counted:
    """20 documents in seven pages of 2,000 characters, in place of a point in time."""

    asked = 0

    def fetch(self, after: list[int] | None, size: int) -> str:
        self.asked += 1
        first = 0 if after is None else after[0] + 1
        hits = [{"_index": "i", "_id": str(n), "sort": [n]} for n in range(first, min(20, first + size))]
        return json.dumps({"hits": {"hits": hits}, "pad": "x" * 2_000}, separators=(",", ":"))

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("ahead", "bytes_", "most"), [(1, 10**6, 1), (4, 10**6, 4), (4, 4_500, 2), (4, 1, 1)]
)
def test_pages_that_wait_are_bounded_by_their_number_and_their_bytes(
    monkeypatch: pytest.MonkeyPatch, ahead: int, bytes_: int, most: int
) -> None:
    monkeypatch.setattr(scan, "AHEAD_BYTES", bytes_)
    monkeypatch.setattr(scan, "_Scan", lambda *_, **__: server)
    server = Counted()
    pages_read = scan.pages(None, "i", query=ALL, fields=[], size=4, ahead=ahead)  # type: ignore[arg-type]
    for taken, _ in enumerate(pages_read, 1):
        wanted = min(taken + most, 7)
        assert wait_until(lambda wanted=wanted: server.asked >= wanted, timeout_s=10)
        assert server.asked <= taken + most
    assert server.asked == 7, "a page that is not full is the last one, and none is asked for behind it"


@pytest.mark.parametrize("sort", [[], BY_TIME], ids=["by number", "by time"])
def test_every_document_comes_once_however_pages_cut_through_equal_keys(
    server: OpenSearch, index: str, sort: list[Any]
) -> None:
    wanted = fill(server, index, 300)
    for size, ahead in ((7, 4), (100, 1), (299, 2), (300, 1), (5000, 3)):
        scanned = scan.pages(server, index, query=ALL, fields=["message"], sort=sort, size=size, ahead=ahead)
        found = ids(scanned)
        assert len(found) == 300, size
        assert set(found) == wanted, size


def test_a_page_smaller_than_the_number_of_equal_keys_is_widened(server: OpenSearch, index: str) -> None:
    wanted = fill(server, index, 60)
    for ahead in (1, 5):
        found = ids(scan.pages(server, index, query=ALL, fields=[], size=2, ahead=ahead))
        assert sorted(found) == sorted(wanted)


def test_a_scan_by_time_is_in_the_order_of_time(server: OpenSearch, index: str) -> None:
    fill(server, index, 300)
    pages = scan.pages(server, index, query=ALL, fields=["@timestamp"], sort=BY_TIME, size=70)
    times = [source["@timestamp"] for page in pages for source in page["_source"]]
    assert times == sorted(times)


def test_only_the_fields_asked_for_are_sent(server: OpenSearch, index: str) -> None:
    fill(server, index, 3)
    (page,) = scan.pages(server, index, query=ALL, fields=["message"])
    assert {key for source in page["_source"] for key in source} == {"message"}


def test_a_point_in_time_that_expires_on_the_way_is_opened_again_and_nothing_is_lost_or_doubled(
    server: OpenSearch, index: str, points: Points
) -> None:
    wanted = fill(server, index, 600)
    with closing(scan.pages(server, index, query=ALL, fields=[], sort=BY_TIME, size=50)) as pages:
        found = next(pages)["_id"].to_list()
        for _ in range(4):
            # The page that is fetched meanwhile may just be opening a new one.
            assert wait_until(points.expire, timeout_s=10)
            found += next(pages)["_id"].to_list()
        found += ids(pages)
    assert len(found) == 600
    assert set(found) == wanted


def test_documents_written_during_a_scan_do_not_disturb_it(server: OpenSearch, index: str) -> None:
    wanted = fill(server, index, 200)
    pages = scan.pages(server, index, query=ALL, fields=[], size=30)
    found = next(pages)["_id"].to_list()
    fill(server, index, 200, first=1000)
    assert {*found, *ids(pages)} == wanted


def test_a_scan_that_is_dropped_half_way_gives_its_point_in_time_back(
    server: OpenSearch, index: str, points: Points
) -> None:
    fill(server, index, 200)
    pages = scan.pages(server, index, query=ALL, fields=[], size=20)
    next(pages)
    assert len(points.open()) == 1
    pages.close()  # type: ignore[attr-defined] # a generator
    assert not points.open()


def test_a_scan_goes_on_at_a_place_it_was_given(server: OpenSearch, index: str) -> None:
    fill(server, index, 300)
    whole = pl.concat([p.drop("_source") for p in scan.pages(server, index, query=ALL, fields=[])])
    place = whole["sort"][150].to_list()
    found = ids(scan.pages(server, index, query=ALL, fields=[], after=scan.at(place)))
    assert set(found) == set(whole.filter(pl.col("sort").list.first() >= place[0])["_id"])


def test_a_message_that_looks_like_the_end_of_an_answer_does_not_mislead_a_scan(
    server: OpenSearch, index: str
) -> None:
    for n in range(9):
        server.index(
            index=index, id=str(n), body={"message": '"sort":[99]}]', "sort": [77], "n": {"sort": [1]}}
        )
    server.indices.refresh(index=index)
    assert len(ids(scan.pages(server, index, query=ALL, fields=["message", "sort", "n"], size=2))) == 9


def test_typed_decoding_answers_as_decoding_document_by_document_does(server: OpenSearch, index: str) -> None:
    fill(server, index, 50)
    decode = scan.typed({"message": pl.String, "@timestamp": pl.Int64, "nowhere": pl.String})
    fields = ["message", "@timestamp"]
    fast = pl.concat(scan.pages(server, index, query=ALL, fields=fields, decode=decode, size=20))
    slow = [s for p in scan.pages(server, index, query=ALL, fields=fields, size=20) for s in p["_source"]]
    assert fast["_source"].to_list() == [source | {"nowhere": None} for source in slow]


def test_an_index_that_is_missing_is_named(server: OpenSearch) -> None:
    with pytest.raises(SourceUnavailable, match="applogs-nowhere cannot be read: there is no such index"):
        list(scan.pages(server, "applogs-nowhere", query=ALL, fields=[]))


def test_a_pattern_without_indices_has_no_pages(server: OpenSearch) -> None:
    assert list(scan.pages(server, "applogs-nowhere-*", query=ALL, fields=[])) == []


def test_an_answer_without_all_shards_is_not_taken_for_a_whole_one(server: OpenSearch) -> None:
    name = f"applogs-{uuid.uuid4().hex[:12]}"
    # A shard that no node may hold: what a lost node leaves.
    server.indices.create(
        index=name,
        body={
            "settings": {"number_of_replicas": 0, "index.routing.allocation.require._name": "nobody"},
        },
        params={"wait_for_active_shards": "0"},
    )
    try:
        with pytest.raises(SourceUnavailable, match="health of the cluster"):
            list(scan.pages(server, name, query=ALL, fields=[]))
    finally:
        server.indices.delete(index=name)


def test_a_server_that_is_not_there_is_named() -> None:
    client = opensearch_client(Settings(opensearch_url="http://127.0.0.1:9"))
    with pytest.raises(SourceUnavailable, match=r"127\.0\.0\.1:9 is not reachable"):
        list(scan.pages(client, "applogs-*", query=ALL, fields=[]))


def secure(where: Secure, user: str, password: str, *, ca: Path | None = None) -> Settings:
    return Settings(
        opensearch_url=where.url,
        opensearch_ca=ca or where.ca,
        opensearch_user="writer",
        opensearch_password="writer-pass",
        opensearch_read_user=user,
        opensearch_read_password=password,
    )


def test_a_user_with_only_the_right_to_read_can_scan_and_is_told_where_it_may_not(
    secure_opensearch: Secure,
) -> None:
    name = f"applogs-{uuid.uuid4().hex[:12]}"
    admin = opensearch_client(secure(secure_opensearch, "admin", "admin-pass"), reading=True)
    fill(admin, name, 20)
    try:
        reader = opensearch_client(secure(secure_opensearch, "reader", "reader-pass"), reading=True)
        assert len(ids(scan.pages(reader, name, query=ALL, fields=["message"], size=6))) == 20
        with pytest.raises(SourceUnavailable, match="the user 'reader' has not the right"):
            list(scan.pages(reader, "logweir-results-2026.11.20", query=ALL, fields=[]))
    finally:
        admin.indices.delete(index=name)


def test_a_wrong_password_and_an_unknown_authority_are_told_apart(
    secure_opensearch: Secure, tmp_path: Path
) -> None:
    wrong = opensearch_client(secure(secure_opensearch, "reader", "guess"), reading=True)
    with pytest.raises(SourceUnavailable, match=r"does not accept the user 'reader' \(401\)"):
        list(scan.pages(wrong, "applogs-*", query=ALL, fields=[]))
    strange = opensearch_client(
        secure(secure_opensearch, "reader", "reader-pass").replace(opensearch_ca=None), reading=True
    )
    with pytest.raises(SourceUnavailable, match=r"certificate .* cannot be verified"):
        list(scan.pages(strange, "applogs-*", query=ALL, fields=[]))


def test_a_value_that_is_no_text_is_shown_as_json() -> None:
    assert scan.as_text({"a": [1, "ü"]}) == '{"a":[1,"ü"]}'
    assert [scan.as_text(v) for v in (None, "x", 5, True)] == [None, "x", "5", "true"]
    assert json.loads(scan.as_text([1.5]) or "") == [1.5]
