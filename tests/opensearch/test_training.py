"""What a training reads from a real OpenSearch: exactly what the same query selects from Parquet files."""

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from opensearch_node import Secure
from opensearchpy import OpenSearch

from pipeline.errors import SourceUnavailable
from pipeline.opensearch.client import opensearch_client
from pipeline.opensearch.training import count, learn_pages
from pipeline.records.query import Query
from pipeline.records.schema import LEARN_SCHEMA, RESULT_SCHEMA
from pipeline.settings import Settings
from pipeline.sinks.opensearch import OpenSearchSink
from pipeline.sinks.parquet import ParquetSink
from pipeline.training.sampling import read_parquet

BEGIN = datetime(2026, 11, 20, 23, 59, 59, 999_000, tzinfo=UTC)
WORDS = [
    "a timeout occurred",
    "TIMEOUT!",
    "time out",
    "x-y",
    "x y",
    "Ärger",
    "ÄRGER groß",
    "",
    "a*b",
    "plain",
]


@pytest.fixture(scope="module")
def stored(opensearch: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, Path]]:
    """The same results in both stores: three workloads, two days, times a microsecond apart."""
    settings = Settings(opensearch_url=opensearch, opensearch_prefix=f"logweir-t{uuid.uuid4().hex[:12]}")
    root = tmp_path_factory.mktemp("results")
    for n, workload in enumerate(("c/shop", "c/shop/cart", "C/Shop")):
        frame = results(workload, first=n * 1000)
        OpenSearchSink(settings).write(f"batch-{n}", frame)
        ParquetSink(root).write(f"batch-{n}", frame)
    client = opensearch_client(settings)
    client.indices.refresh(index=f"{settings.opensearch.prefix}-*")
    yield settings, root
    client.indices.delete(index=f"{settings.opensearch.prefix}-*")
    client.close()


def results(workload: str, *, first: int) -> pl.DataFrame:
    rows: list[dict[str, Any]] = [
        {
            "record_id": f"r-{first + n}",
            "source": "a.log",
            "line": first + n,
            "lines": 1,
            "timestamp": BEGIN + timedelta(microseconds=first + n * 7),
            "workload": workload,
            "level": "info",
            "message": WORDS[n % len(WORDS)],
            "pattern_id": 2**64 - 1 - n,
            "template_id": n % 5,
            "score": None if n % 4 == 0 else 0.5,
            "anomalous": None if n % 4 == 0 else n % 4 == 1,
            "reasons": [],
            "raw": "raw",
        }
        for n in range(100)
    ]
    return pl.DataFrame(rows, schema=RESULT_SCHEMA)


def learnt(settings: Settings, query: Query, **more: Any) -> pl.DataFrame:
    pages = list(learn_pages(opensearch_client(settings), settings, query, **more))
    assert all(page.schema == pl.Schema(LEARN_SCHEMA) for page in pages)
    return pl.concat([pl.DataFrame(schema=LEARN_SCHEMA), *pages]).sort("timestamp", "workload")


QUERIES = {
    "everything": Query(),
    "one workload, not those that begin or read like it": Query(workloads=("c/shop",)),
    "two workloads": Query(workloads=("c/shop", "C/Shop")),
    "a span whose ends cut through a millisecond": Query(
        since=BEGIN + timedelta(microseconds=70), until=BEGIN + timedelta(microseconds=1_350)
    ),
    "without what was judged anomalous": Query(exclude_anomalous=True),
    "without a word, in any case and inside of words": Query(exclude_words=("timeout",)),
    "without words that are no patterns": Query(exclude_words=("x-y", "a*b", "")),
    "without a word that is not ASCII": Query(exclude_words=("ärger",)),
    "all of it": Query(
        workloads=("c/shop", "nowhere"), since=BEGIN, exclude_words=("time", "PLAIN"), exclude_anomalous=True
    ),
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES.keys())
def test_a_query_selects_what_it_selects_from_parquet(stored: tuple[Settings, Path], query: Query) -> None:
    settings, root = stored
    wanted = pl.concat([pl.DataFrame(schema=LEARN_SCHEMA), *read_parquet(ParquetSink(root), query)])
    assert not wanted.is_empty()
    assert learnt(settings, query, size=70).equals(wanted.sort("timestamp", "workload"))
    if not query.exclude_words and query.since is None:
        assert count(opensearch_client(settings), settings, query) == wanted.height


def test_a_count_is_never_too_small(stored: tuple[Settings, Path]) -> None:
    settings, _ = stored
    for query in QUERIES.values():
        assert count(opensearch_client(settings), settings, query) >= learnt(settings, query).height


def test_no_answer_gives_no_frames(stored: tuple[Settings, Path]) -> None:
    settings, _ = stored
    ahead = Query(since=datetime(2099, 1, 1, tzinfo=UTC))
    nobody = Query(workloads=("nobody",))
    fresh = settings.replace(opensearch_prefix=f"logweir-t{uuid.uuid4().hex[:12]}")
    for own, query in ((settings, ahead), (settings, nobody), (fresh, Query())):
        assert learnt(own, query).is_empty()
        assert count(opensearch_client(own), own, query) == 0


def test_a_missing_index_is_named(stored: tuple[Settings, Path]) -> None:
    settings, _ = stored
    for ask in (count, lambda *a, **k: list(learn_pages(*a, **k))):
        with pytest.raises(SourceUnavailable, match="logweir-nowhere cannot be read: there is no such index"):
            ask(opensearch_client(settings), settings, Query(), index="logweir-nowhere")


def test_documents_that_another_program_wrote_are_read_as_far_as_they_go(
    stored: tuple[Settings, Path],
) -> None:
    settings, _ = stored
    client: OpenSearch = opensearch_client(settings)
    index = f"{settings.opensearch.prefix}-others"
    client.indices.create(index=index, body={"mappings": {"dynamic": False}})
    documents: list[dict[str, Any]] = [
        {"message": {"a": 1}, "timestamp": 1_700_000_000_123, "pattern_id": 7, "anomalous": "yes"},
        {"message": ["x", 2], "timestamp": "2026-11-20T10:00:00+02:00", "pattern_id": -1},
        {"level": "info", "timestamp": "soon"},
    ]
    for n, document in enumerate(documents):
        client.index(index=index, id=str(n), body=document)
    client.indices.refresh(index=index)
    found = learnt(settings, Query(), index=index)
    assert found["message"].to_list() == [None, '{"a":1}', '["x",2]']
    assert found["timestamp"].to_list() == [
        None,
        datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC),
        datetime(2026, 11, 20, 8, tzinfo=UTC),
    ]
    assert found["pattern_id"].to_list() == [None, 7, None]


def test_the_user_who_writes_results_reads_them_back_and_no_other_does(secure_opensearch: Secure) -> None:
    settings = Settings(
        opensearch_url=secure_opensearch.url,
        opensearch_ca=secure_opensearch.ca,
        opensearch_prefix=f"logweir-t{uuid.uuid4().hex[:12]}",
        opensearch_user="writer",
        opensearch_password="writer-pass",
        opensearch_read_user="reader",
        opensearch_read_password="reader-pass",
    )
    writer = opensearch_client(settings)
    OpenSearchSink(settings).write("batch", results("c/shop", first=0))
    writer.indices.refresh(index=f"{settings.opensearch.prefix}-*")
    assert learnt(settings, Query()).height == 100
    reader = opensearch_client(settings, reading=True)
    for ask in (count, lambda *a: list(learn_pages(*a))):
        with pytest.raises(SourceUnavailable, match="the user 'reader' has not the right"):
            ask(reader, settings, Query())
    writer.indices.delete(index=f"{settings.opensearch.prefix}-*")
