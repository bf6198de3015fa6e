"""The saved objects for OpenSearch Dashboards fit each other and the documents that the sink writes."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from opensearchpy import OpenSearch
from sink_contract import AT, rows

from pipeline.opensearch.client import opensearch_client
from pipeline.opensearch.documents import RESULT_PROPERTIES, TEMPLATE_PROPERTIES
from pipeline.settings import Settings
from pipeline.sinks.opensearch import OpenSearchSink

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "opensearch"
OBJECTS: list[dict[str, Any]] = [
    json.loads(line) for line in (FOLDER / "dashboards.ndjson").read_text(encoding="utf-8").splitlines()
]
BY_ID = {(o["type"], o["id"]): o for o in OBJECTS}
VISUALIZATIONS = [o for o in OBJECTS if o["type"] == "visualization"]
FIELDS = {"logweir-results": RESULT_PROPERTIES, "logweir-templates": TEMPLATE_PROPERTIES}
# What the editor of Dashboards allows per aggregation; None is any type.
ALLOWED = {
    "terms": {"keyword", "long", "boolean", "date", "double"},
    "date_histogram": {"date"},
    "max": {"long", "double", "date"},
    "top_hits": None,
}


def title(thing: dict[str, Any]) -> str:
    return str(thing["id"])


def pattern_of(thing: dict[str, Any]) -> str:
    """The index pattern an object searches."""
    found = [r["id"] for r in thing["references"] if r["type"] == "index-pattern"]
    assert len(found) == 1
    return str(found[0])


def search_source(thing: dict[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = json.loads(thing["attributes"]["kibanaSavedObjectMeta"]["searchSourceJSON"])
    return source


def aggregations(thing: dict[str, Any]) -> list[dict[str, Any]]:
    aggs: list[dict[str, Any]] = json.loads(thing["attributes"]["visState"])["aggs"]
    return aggs


def fields_used(thing: dict[str, Any]) -> Iterator[str]:
    attributes = thing["attributes"]
    yield from re.findall(r"([\w.]+)\s*:", search_source(thing)["query"]["query"])
    yield from attributes.get("columns", [])
    yield from (field for field, _ in attributes.get("sort", []))
    for agg in aggregations(thing) if "visState" in attributes else []:
        yield from (agg["params"][name] for name in ("field", "sortField") if name in agg["params"])


def test_no_two_objects_have_one_id() -> None:
    assert len(BY_ID) == len(OBJECTS)


def test_every_reference_leads_to_an_object_of_the_file_and_is_used() -> None:
    for thing in OBJECTS:
        text = json.dumps(thing["attributes"])
        names = {reference["name"] for reference in thing["references"]}
        for reference in thing["references"]:
            assert (reference["type"], reference["id"]) in BY_ID, reference
        wanted = set(re.findall(r'RefName\\+":\\+"([^"\\]+)', text))
        assert wanted == names, thing["id"]


def test_the_index_patterns_match_what_is_written_under_the_default_prefix() -> None:
    prefix = Settings().opensearch.prefix
    results = BY_ID["index-pattern", "logweir-results"]["attributes"]
    assert results["title"] == f"{prefix}-results-*"
    assert RESULT_PROPERTIES[results["timeFieldName"]]["type"] == "date"
    assert BY_ID["index-pattern", "logweir-templates"]["attributes"]["title"] == f"{prefix}-templates"


@pytest.mark.parametrize("thing", [o for o in OBJECTS if o["type"] in ("visualization", "search")], ids=title)
def test_every_field_an_object_uses_is_mapped(thing: dict[str, Any]) -> None:
    used = set(fields_used(thing))
    assert used
    assert used <= set(FIELDS[pattern_of(thing)])


@pytest.mark.parametrize("thing", VISUALIZATIONS, ids=title)
def test_every_aggregation_is_allowed_on_the_type_of_its_field(thing: dict[str, Any]) -> None:
    state = json.loads(thing["attributes"]["visState"])
    assert state["title"] == thing["attributes"]["title"]
    ids = [agg["id"] for agg in state["aggs"]]
    assert len(set(ids)) == len(ids)
    for agg in state["aggs"]:
        if agg["type"] == "count":
            continue
        allowed = ALLOWED[agg["type"]]
        assert allowed is None or RESULT_PROPERTIES[agg["params"]["field"]]["type"] in allowed
        assert agg["params"].get("orderBy", ids[0]) in ids


def test_the_dashboard_shows_every_visualization_and_the_anomalous_lines_without_overlap() -> None:
    board = BY_ID["dashboard", "logweir-anomalies"]
    shown = {r["id"] for r in board["references"]}
    assert shown == {v["id"] for v in VISUALIZATIONS} | {"logweir-anomalous-lines"}
    cells = [
        (x, y)
        for panel in json.loads(board["attributes"]["panelsJSON"])
        for g in [panel["gridData"]]
        for x in range(g["x"], g["x"] + g["w"])
        for y in range(g["y"], g["y"] + g["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 48, "the grid of Dashboards has 48 columns"


def body_of(thing: dict[str, Any]) -> dict[str, Any]:
    """The search that Dashboards makes of a visualization: buckets inside each other, metrics in the
    innermost."""
    metrics: dict[str, Any] = {}
    buckets = []
    for agg in aggregations(thing):
        name, kind, params = agg["id"], agg["type"], agg["params"]
        if kind == "max":
            metrics[name] = {"max": {"field": params["field"]}}
        elif kind == "top_hits":
            order = [{params["sortField"]: {"order": params["sortOrder"]}}]
            metrics[name] = {"top_hits": {"size": params["size"], "sort": order, "_source": params["field"]}}
        elif kind == "terms":
            terms = {"field": params["field"], "size": params["size"], "order": {"_count": params["order"]}}
            buckets.append((name, {"terms": terms}))
        elif kind == "date_histogram":
            buckets.append((name, {"date_histogram": {"field": params["field"], "fixed_interval": "1h"}}))
    inner = metrics
    for name, agg in reversed(buckets):
        inner = {name: {**agg, **({"aggs": inner} if inner else {})}}
    query = search_source(thing)["query"]["query"]
    clause = dict([query.split(":")]) if query else {}
    wanted = {"bool": {"filter": [{"term": {k: v}} for k, v in clause.items()]}}
    return {"size": 0, "query": wanted, "aggs": inner}


@pytest.fixture
def search(search_settings: Settings) -> Iterator[OpenSearch]:
    """A client, and results of two workloads on two days: 5 anomalous lines of 20, and one not judged."""
    fine = rows(15, key="n", anomalous=False, score=0.1, template_id=1, level="info")
    bad = rows(3, key="a", anomalous=True, score=0.9, p_value=0.02, template_id=2, level="error")
    bank = {"workload": "bank", "at": AT + timedelta(days=1), "message": "the vault is open"}
    worst = rows(2, key="b", anomalous=True, score=0.99, p_value=0.01, template_id=3, level="fatal", **bank)
    sink = OpenSearchSink(search_settings)
    sink.write("one", pl.concat([fine, bad, rows(1, key="w", reasons=["warming"])]))
    sink.write("two", worst)
    client = opensearch_client(search_settings)
    client.indices.refresh(index=sink.indices)
    yield client
    client.close()


def test_the_server_answers_every_visualization_with_the_right_numbers(
    search: OpenSearch, search_settings: Settings
) -> None:
    def ask(name: str) -> dict[str, Any]:
        answer = search.search(
            index=f"{search_settings.opensearch.prefix}-results-*", body=body_of(BY_ID["visualization", name])
        )
        assert answer["_shards"]["failed"] == 0
        found: dict[str, Any] = answer["aggregations"]
        return found

    def split(name: str) -> dict[str, int]:
        total: dict[str, int] = {}
        for hour in ask(name)["2"]["buckets"]:
            for bucket in hour["3"]["buckets"]:
                total[bucket["key"]] = total.get(bucket["key"], 0) + bucket["doc_count"]
        return total

    assert split("logweir-anomalies-by-workload") == {"shop": 3, "bank": 2}
    assert split("logweir-anomalies-by-level") == {"error": 3, "fatal": 2}
    share = ask("logweir-share")["2"]["buckets"]
    assert {b["key_as_string"]: b["doc_count"] for b in share} == {"false": 15, "true": 5}
    table = [
        (
            template["key"],
            workload["key"],
            workload["doc_count"],
            workload["2"]["value"],
            workload["4"]["hits"]["hits"][0]["_source"]["message"],
        )
        for template in ask("logweir-top-templates")["5"]["buckets"]
        for workload in template["6"]["buckets"]
    ]
    # The latest of three lines within a microsecond each may be any: the index compares milliseconds.
    assert [row[:4] for row in table] == [(2, "shop", 3, 0.9), (3, "bank", 2, 0.99)]
    assert table[1][4] == "the vault is open"


def test_the_server_answers_the_saved_searches(search: OpenSearch, search_settings: Settings) -> None:
    saved = BY_ID["search", "logweir-anomalous-lines"]["attributes"]
    hits = search.search(
        index=f"{search_settings.opensearch.prefix}-results-*",
        body={
            "query": {"term": {"anomalous": True}},
            "sort": [{field: order} for field, order in saved["sort"]],
            "_source": saved["columns"],
        },
    )["hits"]["hits"]
    assert [hit["_source"]["workload"] for hit in hits] == ["bank", "bank", "shop", "shop", "shop"]
    assert set(hits[0]["_source"]) == set(saved["columns"])


def test_the_retention_policy_deletes_results_by_age_and_nothing_else() -> None:
    policy = json.loads((FOLDER / "delete-after-30-days.json").read_text(encoding="utf-8"))["policy"]
    states = {state["name"]: state for state in policy["states"]}
    leaving = states[policy["default_state"]]["transitions"]
    assert [t["conditions"] for t in leaving] == [{"min_index_age": "30d"}]
    assert [states[t["state_name"]]["actions"] for t in leaving] == [[{"delete": {}}]]
    assert [t["index_patterns"] for t in policy["ism_template"]] == [
        [f"{Settings().opensearch.prefix}-results-*"]
    ]
