"""The questions that clients of Elasticsearch ask before their first `_bulk`, and the answers they need.

Each answer is fixed: the receiver has no templates, pipelines or policies, and takes every index. The header
X-Elastic-Product stands on all of them, because clients from 7.14 on refuse a server without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.sources.protocols.json_text import json_of

# Filebeat refuses a server that is older than itself.
ELASTIC_VERSION: Final = "9.2.0"
ELASTIC_HEADERS: Final[Mapping[str, str]] = {"X-Elastic-Product": "Elasticsearch"}
_CLUSTER: Final = "logweir"
_UUID: Final = "logweir0000000000000000"  # 22 characters, as those of a cluster
_LICENCE: Final = {"uid": _UUID, "type": "basic", "mode": "basic", "status": "active"}
_HEALTH: Final = {
    "cluster_name": _CLUSTER,
    "status": "green",
    "timed_out": False,
    "number_of_nodes": 1,
    "number_of_data_nodes": 1,
    "active_primary_shards": 1,
    "active_shards": 1,
    "relocating_shards": 0,
    "initializing_shards": 0,
    "unassigned_shards": 0,
    "number_of_pending_tasks": 0,
    "active_shards_percent_as_number": 100.0,
}
# By the first part of the path. A client that asks for one of these goes on with any JSON object.
_EMPTY: Final = frozenset(
    {
        "_ilm",
        "_index_template",
        "_component_template",
        "_template",
        "_ingest",
        "_nodes",
        "_logstash",
        "_alias",
    }
)
_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreambleAnswer:
    """Status, headers and body of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def preamble(method: str, path: str, *, version: str = ELASTIC_VERSION) -> PreambleAnswer | None:
    """The answer to a question, None for any other request. `path` is below the prefix of the protocol.

    `version`: of the Elasticsearch that clients shall see."""
    parts = [part for part in path.partition("?")[0].split("/") if part]
    if method not in _METHODS:
        return None
    first, second = (*parts, "", "")[:2]
    if first in _EMPTY:
        acknowledged = {"acknowledged": True} if method in ("PUT", "POST") else {}
        return _json(method, acknowledged)
    if method not in ("GET", "HEAD"):
        return None
    if not parts:
        return _json(method, _about(version))
    if first in ("_license", "_xpack"):
        return _json(method, {"license": _LICENCE} if first == "_license" else _features())
    if (first, second) == ("_cluster", "health"):
        return _json(method, _HEALTH)
    if (first, second) == ("_cat", "health"):
        line = f"1763539200 08:00:00 {_CLUSTER} green 1 1 1 1 0 0 0 0 - 100.0%\n"
        return _answer(method, line.encode(), "text/plain; charset=UTF-8")
    return None


def _about(version: str) -> dict[str, Any]:
    return {
        "name": _CLUSTER,
        "cluster_name": _CLUSTER,
        "cluster_uuid": _UUID,
        "version": {
            "number": version,
            "build_flavor": "default",
            "build_type": "tar",
            "build_hash": "0" * 40,
            "build_date": "2026-01-01T00:00:00.000000000Z",
            "build_snapshot": False,
            "lucene_version": "10.3.0",
            "minimum_wire_compatibility_version": "8.19.0",
            "minimum_index_compatibility_version": "8.0.0",
        },
        "tagline": "You Know, for Search",
    }


def _features() -> dict[str, Any]:
    return {"license": _LICENCE, "features": {"ilm": {"available": True, "enabled": True}}}


def _json(method: str, value: Mapping[str, Any]) -> PreambleAnswer:
    return _answer(method, json_of(value).encode(), "application/json")


def _answer(method: str, body: bytes, content_type: str) -> PreambleAnswer:
    headers = {**ELASTIC_HEADERS, "Content-Type": content_type}
    return PreambleAnswer(status=200, headers=headers, body=b"" if method == "HEAD" else body)
