"""Log documents of a real OpenSearch as a training reads them, and a reader that follows a dead one."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from opensearchpy import OpenSearch, helpers

from pipeline.controller.trainings import documents_of, query_of
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadInput, BadSetting, TrainingFailed
from pipeline.opensearch import scan
from pipeline.opensearch.client import opensearch_client
from pipeline.records.query import Documents, Query
from pipeline.records.schema import LEARN_SCHEMA
from pipeline.settings import Settings
from pipeline.settings.train_source import TrainSource, query_clause
from pipeline.sources.documents import Layout, SourceDocument, document_workload, text_of, value_at
from pipeline.training import documents as reading
from pipeline.training.documents import DocumentReader, count_documents

BEGIN = datetime(2026, 11, 20, 10, tzinfo=UTC)
MASKS = MaskSet.load()
PATHS = ["time", "log", "log.level", "kubernetes.labels.app", "namespace_name"]
SOURCES: list[dict[str, Any]] = [
    {"time": "2026-11-20T10:00:00Z", "log": "plain", "namespace_name": "shop"},
    {"time": 1795168801123, "kubernetes": {"labels": {"app": "web"}}, "log": "with a number 7"},
    {"kubernetes.labels.app": "flat", "kubernetes": {"labels": {"app": "deep"}}},
    {"kubernetes": {"labels.app": "half"}, "log": "a\u0000b", "namespace_name": ""},
    {"kubernetes.labels": {"app": "other half"}, "log": None, "time": None},
    {},
]
ODD: list[dict[str, Any]] = [
    {"log": {"nested": ["x"]}, "namespace_name": ["one"]},
    {"log": ["a", "b"], "time": 1.5, "kubernetes": "a text"},
    {"log": "half \ud800 of a pair", "namespace_name": True},
]


def answer(sources: list[dict[str, Any]]) -> str:
    hits = [{"_index": "i", "_id": str(n), "sort": [n], "_source": s} for n, s in enumerate(sources)]
    return json.dumps({"hits": {"hits": hits}})


@pytest.mark.parametrize("sources", [SOURCES, [*SOURCES, *ODD]])
@pytest.mark.parametrize("paths", [[p for p in PATHS if p != "log.level"], PATHS])
def test_fields_are_read_as_the_source_of_documents_reads_them(
    sources: list[dict[str, Any]], paths: list[str]
) -> None:
    page = scan.loose(answer(sources))
    sources = [json.loads(json.dumps(one)) for one in sources]
    assert reading._texts(page, paths).to_dict(as_series=False) == {
        path: [text_of(value_at(one, path)) for one in sources] for path in paths
    }


class StoredPages:
    """Documents as a server answers them, in place of the scan of a point in time."""

    sources: tuple[dict[str, Any], ...] = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.hits = [
            {"_index": f"i{n % 3}", "_id": str(n), "sort": [n // 3], "_source": s}
            for n, s in enumerate(self.sources)
        ]

    def fetch(self, after: list[int] | None, size: int) -> str:
        found = [hit for hit in self.hits if after is None or hit["sort"] > after]
        return json.dumps({"hits": {"hits": found[:size]}}, separators=(",", ":"))

    def close(self) -> None: ...


def test_records_and_places_do_not_depend_on_how_many_pages_are_parsed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Documents without a time, a level or a message, of other types, and with headers that tell them."""
    kinds: list[dict[str, Any]] = [
        {"log": "2026-11-20T11:00:02 INFO user # in"}, {"log": "no header #"}, {"log": "no header either #"},
        {"time": "2026-11-20T09:00:00Z", "log": "2026-11-20T13:00:04 ERROR of its own time #"},
        {"level": "warn", "log": "2026-11-20T15:00:06 INFO of its own level #"}, {},
        {"time": 1795168801123, "level": "error", "log": "both #"}, {"log": {"nested": ["#"]}}, {"time": "?"},
    ]  # fmt: skip
    texts = [json.dumps(kinds[n * n % 7 if n % 5 else n % 9]) for n in range(200)]
    sources = tuple(json.loads(text.replace("#", str(n))) for n, text in enumerate(texts))
    monkeypatch.setattr(StoredPages, "sources", sources)
    monkeypatch.setattr(scan, "_Scan", StoredPages)

    def read(together: int) -> tuple[list[pl.DataFrame], DocumentReader]:
        asked = query("i*", fields=("time", "log", "level"))
        one = DocumentReader(None, asked, BEGIN, size=20, together=together)  # type: ignore[arg-type]
        return list(one.pages()), one

    apart, end = read(1)
    whole = pl.concat(apart)
    assert len(apart) == 11 and end.documents == 200 and end.without_message > 0
    assert whole["level"].n_unique() == 4 and 0 < whole["timestamp"].null_count() < whole.height
    assert whole["message"].str.contains("^user [0-9]+ in$").any()
    for together, many in ((20, 6), (50, 5), (90, 3), (1_000, 2)):
        frames, one = read(together)
        assert (len(frames), one.without_message) == (many, end.without_message)
        assert pl.concat(frames).equals(whole)
    monkeypatch.setattr(reading, "TOGETHER_BYTES", 1)
    assert len(read(1_000)[0]) == 11


def test_workloads_have_the_names_of_the_source_of_documents() -> None:
    paths = ["cluster_id", "namespace_name", "deployment"]
    sources = [
        {"cluster_id": "c", "namespace_name": "shop", "deployment": "web"},
        {"namespace_name": "sh\nop", "deployment": ""},
        {"deployment": "d" * 300},
        {},
    ]
    page = scan.loose(answer(sources))
    found = reading._workloads(reading._texts(page, paths), paths, page["_index"]).to_list()
    layout = replace(Layout.of(Settings()), workload=tuple(paths))
    documents = [SourceDocument(index="i", id="1", number=1, seq=1, source=one) for one in sources]
    assert found == [document_workload(one, layout) for one in documents]
    assert found[:2] == ["c/shop/web", "sh_op"] and found[3] == "i"


@pytest.fixture(scope="module")
def index(opensearch: str) -> Iterator[str]:
    """1,500 documents of two services in two indices of two shards each, 300 of them errors."""
    name = f"docs-{uuid.uuid4().hex[:10]}"
    client = OpenSearch(opensearch)
    for day in "ab":
        client.indices.create(
            index=f"{name}-{day}",
            body={
                "settings": {"number_of_shards": 2, "number_of_replicas": 0},
                "mappings": {"properties": {"time": {"type": "date"}, "log_type": {"type": "keyword"}}},
            },
        )
    actions = (
        {
            "_index": f"{name}-{'ab'[n % 2]}", "_id": str(n), "time": (BEGIN + timedelta(seconds=n)).isoformat(),
            "log": f"{(BEGIN + timedelta(seconds=n)).isoformat()} {'ERROR' if n % 5 == 0 else 'INFO'} request {n} of u{n}",
            "namespace_name": "shop", "deployment": "web" if n % 3 else "db", "log_type": "workload" if n % 2 else "event",
        }
        for n in range(1_500)
    )  # fmt: skip
    helpers.bulk(client, actions, refresh=True)
    yield f"{name}-*"
    client.indices.delete(index=f"{name}-*")
    client.close()


def query(index: str, **more: Any) -> Query:
    given = {"fields": ("time", "log", "level"), "workload_fields": ("namespace_name", "deployment")}
    return Query(store="opensearch", documents=Documents(index=index, **given | more))


def reader(opensearch: str, asked: Query, size: int = 100, together: int = 1) -> DocumentReader:
    client = opensearch_client(Settings(opensearch_url=opensearch))
    return DocumentReader(client, asked, size=size, together=together)


def test_documents_are_selected_by_clause_level_workload_and_time(opensearch: str, index: str) -> None:
    def found(asked: Query) -> pl.DataFrame:
        pages = list(reader(opensearch, asked).pages())
        return pl.concat([pl.DataFrame(schema=LEARN_SCHEMA), *pages])

    everything = found(query(index))
    assert everything.height == 1_500 and everything.schema == pl.Schema(LEARN_SCHEMA)
    assert everything["message"].str.contains(r"^request \d+ of u\d+$").all()  # without its header
    assert everything["level"].value_counts().sort("level").rows() == [("error", 300), ("info", 1_200)]
    assert set(everything["workload"]) == {"shop/web", "shop/db"}
    assert everything["timestamp"].min() == BEGIN
    assert found(query(index, headers=False))["message"].str.contains("ERROR|INFO").all()
    clause = '{"term": {"log_type": "workload"}}'
    assert found(query(index, query=clause)).height == 750
    assert found(query(index, level_not=("error", "fatal"))).height == 1_200
    assert found(query(index, workloads=("shop/db",))).height == 500
    span = replace(query(index), since=BEGIN + timedelta(seconds=10), until=BEGIN + timedelta(seconds=20))
    assert found(span).height == 10 and count_documents(reader(opensearch, span).client, span) == 10
    assert found(replace(query(index), exclude_words=("OF U7",))).height == 1_500 - 111
    client = opensearch_client(Settings(opensearch_url=opensearch))
    with pytest.raises(BadInput, match=r"OpenSearch refuses the query .*correct --query"):
        count_documents(client, query(index, query='{"nonsense": {"a": 1}}'))


def test_an_index_without_the_field_of_messages_says_which_setting_helps(opensearch: str, index: str) -> None:
    wrong = reader(opensearch, query(index, fields=("time", "message", "level")))
    assert sum(page.height for page in wrong.pages()) == 0
    assert wrong.without_message == wrong.documents == 1_500
    assert (
        "has the field 'message'" in wrong.explain_missing()
        and "opensearch_fields" in wrong.explain_missing()
    )


def test_documents_without_any_message_are_given_up_early(
    opensearch: str, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MANY", 300)
    with pytest.raises(TrainingFailed, match="opensearch_fields"):
        list(reader(opensearch, query(index, fields=("time", "nothing", "level"))).pages())


def test_the_standing_source_names_documents_levels_and_a_query(tmp_path: Path) -> None:
    file = tmp_path / "query.json"
    file.write_text('{"query": {"term": {"log_type": "workload"}}}')
    own = Settings(
        opensearch_url="http://localhost:9200", opensearch_fields=("time", "log", "severity"),
        train_source=f"opensearch:logs-*?level_not=ERR,fatal&query={file}", train_span_s=3_600.0,
    )  # fmt: skip
    found = query_of(own, BEGIN)
    assert found.store == "opensearch" and found.since == BEGIN - timedelta(hours=1)
    assert found.documents == Documents(
        index="logs-*", query='{"term": {"log_type": "workload"}}', level_not=("error", "fatal"),
        fields=("time", "log", "severity"), workload_fields=own.opensearch.workload_fields,
    )  # fmt: skip
    polled = query_of(own.replace(opensearch_source="app-*"), BEGIN).documents
    assert polled is not None and not polled.headers  # as the pipeline itself reads them
    for wrong, why in (
        ("nowhere", "write results, parquet, opensearch, or opensearch:logs"),
        ("opensearch:", "train_source"),
        ("opensearch:a b", "names no index"),
        ("opensearch:logs?level=x", "no option 'level'"),
    ):
        with pytest.raises(BadSetting, match=why):
            Settings(opensearch_url="http://localhost:9200", train_source=wrong)
    with pytest.raises(BadSetting, match="OPENSEARCH_URL is not set"):
        Settings(train_source="opensearch:logs-*")
    with pytest.raises(BadInput, match="level 'loud' is none"):
        documents_of(own, TrainSource(store="opensearch", index="x", level_not=("loud",)))
    for text in ("", "[]", "{}", '{"a": 1, "b": 2}', '{"query": 7}', "x" * 70_000):
        file.write_text(text)
        with pytest.raises(BadInput, match=r"the query .*write"):
            query_of(own, BEGIN)
    with pytest.raises(ValueError, match="cannot be read"):
        query_clause(tmp_path / "none.json")
