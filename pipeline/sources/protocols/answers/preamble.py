"""The questions that clients of Elasticsearch ask before their first `_bulk`, and the answers they need.

Each answer is fixed: the receiver has no templates, pipelines or policies, and takes every index. The header
X-Elastic-Product stands on all of them, because clients from 7.14 on refuse a server without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.sources.protocols.json_text import json_of
from pipeline.sources.protocols.tables import tables

ELASTIC_HEADERS: Final[Mapping[str, str]] = {"X-Elastic-Product": "Elasticsearch"}
_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreambleAnswer:
    """Status, headers and body of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def preamble(method: str, path: str) -> PreambleAnswer | None:
    """The answer to a question, None for any other request. `path` is below the prefix of the protocol."""
    parts = [part for part in path.partition("?")[0].split("/") if part]
    known = tables().elasticsearch
    if method not in _METHODS:
        return None
    if parts and parts[0] in known.empty:
        return _json(method, {"acknowledged": True} if method in ("PUT", "POST") else {})
    if method not in ("GET", "HEAD"):
        return None
    if parts[:2] == ["_cat", "health"]:
        line = "1763539200 08:00:00 logweir green 1 1 1 1 0 0 0 0 - 100.0%\n"
        return _answer(method, line.encode(), "text/plain; charset=UTF-8")
    answer = known.answers.get("/".join(parts[:2])) or known.answers.get(parts[0] if parts else "")
    return None if answer is None else _json(method, answer)


def _json(method: str, value: Mapping[str, Any]) -> PreambleAnswer:
    return _answer(method, json_of(value).encode(), "application/json")


def _answer(method: str, body: bytes, content_type: str) -> PreambleAnswer:
    headers = {**ELASTIC_HEADERS, "Content-Type": content_type}
    return PreambleAnswer(status=200, headers=headers, body=b"" if method == "HEAD" else body)
