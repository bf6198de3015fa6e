"""Bulk writing with a result per document.

One request may succeed for some documents and fail for others. Documents refused as busy (429, 5xx) are
retried here with back-off for a few seconds; other errors go to the caller. Requests are idempotent, because
every document has its id."""

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from opensearchpy import OpenSearch
from opensearchpy.exceptions import ConnectionError, TransportError

from pipeline.errors import Rejected, SinkUnavailable
from pipeline.opensearch.client import error_cause, remedy, translate_errors
from pipeline.opensearch.documents import Document

# OpenSearch advises 5 to 15 MiB; the rate is flat from about a thousand documents on.
MAX_BYTES: Final = 5 * 1024 * 1024
MAX_DOCUMENTS: Final = 5_000
# Waits of at most 0.2, 0.4, ... 3.2 s, so 6.2 s in all: enough for a merge or a garbage collection. After
# that the worker goes on with other batches.
TRIES: Final = 6
FIRST_WAIT_S: Final = 0.2

# Errors with status 400 about the index or the cluster (too many shards), so an operator can heal them.
_NOT_OF_THE_RECORD: Final = frozenset(
    {"validation_exception", "index_closed_exception", "invalid_index_name_exception"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One document to delete, unless its version has changed (compare-and-set)."""

    index: str
    id: str
    seq_no: int
    primary_term: int


Item = Document | Removal


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """Documents of one request to retry or to refuse."""

    retry: list[Item] = field(default_factory=list)
    why: str = ""  # the last reason for a retry
    refused: dict[str, str] = field(
        default_factory=dict
    )  # id -> reason, of those that no request will ever store


def write_documents(
    client: OpenSearch,
    documents: Iterable[Document],
    task: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    jitter: Callable[[], float] = random.random,
) -> None:
    """Stores all documents, replacing those of the same id.

    Raises SinkUnavailable for errors that can heal: server away or too busy, no right, index blocked. Raises
    Rejected with the ids of documents that the mapping refuses, after all others are stored."""
    _deliver(client, chunks(documents), task, sleep=sleep, jitter=jitter)


def remove_documents(
    client: OpenSearch,
    removals: Sequence[Removal],
    task: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    jitter: Callable[[], float] = random.random,
) -> None:
    """Deletes documents; skips missing and changed ones. Raises SinkUnavailable."""
    parts = (list(removals[at : at + MAX_DOCUMENTS]) for at in range(0, len(removals), MAX_DOCUMENTS))
    _deliver(client, parts, task, sleep=sleep, jitter=jitter)


def _deliver(
    client: OpenSearch,
    parts: Iterable[Sequence[Item]],
    task: str,
    *,
    sleep: Callable[[float], None],
    jitter: Callable[[], float],
) -> None:
    refused: dict[str, str] = {}
    for part in parts:
        pending = part
        for attempt in range(TRIES):
            outcome = _send(client, pending, task)
            refused |= outcome.refused
            pending = outcome.retry
            if not pending:
                break
            if attempt == TRIES - 1:
                raise SinkUnavailable(f"{task}: {len(pending)} documents are left over, {outcome.why}")
            sleep(FIRST_WAIT_S * 2**attempt * (0.5 + jitter() / 2))
    if refused:
        first, why = next(iter(refused.items()))
        more = f", and {len(refused) - 1:,} more" if len(refused) > 1 else ""
        raise Rejected(f"{task}: the record {first} is refused ({why}){more}", refused)


def chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Requests of bounded size; a document larger than the bound goes alone."""
    chunk: list[Document] = []
    size = 0
    for document in documents:
        if chunk and (len(chunk) == MAX_DOCUMENTS or size + len(document.body) > MAX_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(document)
        size += len(document.body)
    if chunk:
        yield chunk


def _lines(item: Item) -> list[bytes]:
    """The lines of a bulk request for one document."""
    place: dict[str, Any] = {"_index": item.index, "_id": item.id}
    if isinstance(item, Removal):
        place |= {"if_seq_no": item.seq_no, "if_primary_term": item.primary_term}
        return [json.dumps({"delete": place}).encode()]
    return [json.dumps({"index": place}).encode(), item.body]


def _send(client: OpenSearch, chunk: Sequence[Item], task: str) -> _Outcome:
    body = b"\n".join([*(line for item in chunk for line in _lines(item)), b""])
    with translate_errors(task, SinkUnavailable):
        try:
            answer = client.bulk(body=body, params={"filter_path": "errors,items.*.status,items.*.error"})
        except ConnectionError:
            raise  # no server: the caller schedules the retry
        except TransportError as exc:
            status = exc.status_code
            if status not in (429, 502, 503, 504):
                raise
            return _Outcome(retry=list(chunk), why=remedy(int(status), *error_cause(_problem(exc))))
    return _judged(chunk, answer, task) if answer["errors"] else _Outcome()


def _judged(chunk: Sequence[Item], answer: dict[str, Any], task: str) -> _Outcome:
    outcome = _Outcome()
    for document, item in zip(chunk, answer["items"], strict=True):
        (result,) = item.values()
        status = result["status"]
        if status < 300 or (isinstance(document, Removal) and status in (404, 409)):
            continue
        kind, reason = error_cause(result.get("error", {}))
        if kind != "cluster_block_exception" and (status == 429 or status >= 500):
            outcome.retry.append(document)
            outcome.why = remedy(status, kind, reason)
        elif status == 400 and kind not in _NOT_OF_THE_RECORD:
            outcome.refused[document.id] = f"{kind}: {reason}"
        else:
            raise SinkUnavailable(f"{task}: the index {document.index}, {remedy(status, kind, reason)}")
    return outcome


def _problem(exc: TransportError) -> Any:
    return exc.info.get("error") if isinstance(exc.info, dict) else exc.info
