"""`_bulk` of Elasticsearch and OpenSearch: pairs of an action and a document, a line each.

`create` and `index` are taken. The answer is for the whole request: shippers lose lines when the items of
one answer differ. Its text is compact, `"errors":false,"items":[` in that order, because Fluent Bit searches
a long answer for that text.
"""

from typing import Any, Final

import msgspec

from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.json_documents import posted_documents
from pipeline.sources.protocols.json_text import check_count, json_of, read_body

_FULL: Final = "es_rejected_execution_exception"


class _Target(msgspec.Struct, frozen=True):
    index: str | None = msgspec.field(default=None, name="_index")


class _Action(msgspec.Struct, frozen=True):
    create: _Target | None = None
    index: _Target | None = None
    update: Any = None
    delete: Any = None


_ACTION: Final = msgspec.json.Decoder(_Action)


def decode_bulk(body: bytes, hints: Hints) -> Decoded:
    """The documents of a request. `hints.path` may name the index of all: `/logs-app/_bulk`."""
    # Two lines a document, and as many blank ones as a sender could have a reason for.
    check_count(body.count(b"\n") // 4)
    default = _index_of(hints.path)
    known: dict[str, str] = {}  # the index of each action, by its line: few lines differ
    documents: list[str] = []
    indices: list[str] = []
    index: str | None = None  # where the next line is a document
    for number, line in enumerate(body.decode("utf-8", "replace").split("\n"), start=1):
        if index is not None:
            if not line or line.isspace():
                raise Undecodable(
                    f"line {number} of the request is empty, where the document of an action should be"
                )
            documents.append(line)
            indices.append(index)
            index = None
        elif (index := known.get(line)) is None and line and not line.isspace():
            index = known[line] = _index_of_action(line, number, default)
    if index is not None:
        raise Undecodable("the last action of the request has no document; send one behind it")
    check_count(len(documents))
    if b"\r" in body:
        documents = [line.rstrip("\r") for line in documents]
    return posted_documents(documents, indices, hints)


def bulk_operations(body: bytes) -> list[str]:
    """The operation of each document of a request that was decoded, for its answer."""
    found: list[str] = []
    is_action = True
    for line in body.split(b"\n"):
        if not is_action:
            is_action = True
        elif line and not line.isspace():
            found.append("create" if line.lstrip(b' \t{"').startswith(b"create") else "index")
            is_action = False
    return found


def bulk_success(operations: list[str], *, took_ms: int) -> bytes:
    """Every document is stored."""
    items = ",".join(f'{{"{operation}":{{"status":201}}}}' for operation in operations)
    return f'{{"took":{took_ms},"errors":false,"items":[{items}]}}'.encode()


def bulk_full(reason: str) -> bytes:
    """The body of status 429, which every shipper sends again as a whole."""
    return bulk_error(_FULL, reason, status=429)


def bulk_items_full(operations: list[str], reason: str) -> bytes:
    """The body of status 200 that refuses each document for now, as a full queue of Elasticsearch does."""
    error = json_of({"status": 429, "error": {"type": _FULL, "reason": reason}})
    items = ",".join(f'{{"{operation}":{error}}}' for operation in operations)
    return f'{{"took":0,"errors":true,"items":[{items}]}}'.encode()


def bulk_error(kind: str, reason: str, *, status: int) -> bytes:
    """The body of every other status: `kind` is the type of the error, in the words of Elasticsearch."""
    cause = {"type": kind, "reason": reason}
    return json_of({"error": {"root_cause": [cause], **cause}, "status": status}).encode()


def _index_of(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    return parts[-2] if len(parts) > 1 and parts[-1] == "_bulk" and parts[-2] != "es" else ""


def _index_of_action(line: str, number: int, default: str) -> str:
    action = read_body(_ACTION, line, f"line {number} of the request, an action,")
    if action.update is not None or action.delete is not None:
        raise Undecodable(
            f"line {number} of the request updates or deletes a document; only create and index are taken"
        )
    target = action.create or action.index
    if target is None:
        raise Undecodable(
            f"line {number} of the request is no action; send create or index before a document"
        )
    return target.index or default
