"""How answers leave: JSON with an ETag, or a row a line while the client reads."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from hashlib import blake2b
from typing import Any, Final

import msgspec
from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from pipeline.errors import BadInput
from pipeline.settings.values import nearest
from pipeline.workers.api.problems import AskRefused, Problem

NDJSON: Final = "application/x-ndjson"
JSON: Final = "application/json"
_HEADERS: Final = {"Cache-Control": "private, no-cache", "X-Content-Type-Options": "nosniff"}
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "A problem: one sentence with the value and the remedy (RFC 9457).",
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}


def answers_with(
    model: Any, description: str, *, rows: bool = False, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """The responses of a route for the specification. `rows`: it also answers a row a line."""
    found: dict[str, Any] = {"description": description, "model": model}
    if rows:
        found["content"] = {NDJSON: {"schema": {"type": "string"}}}
    more: dict[int | str, dict[str, Any]] = {} if rows else {304: {"description": "The ETag is still right."}}
    return {status: found, **(more if status == 200 else {}), **_ERRORS}


def as_json(request: Request, value: Any, *, status: int = 200) -> Response:
    """The answer, or 304 where the client has it already."""
    body = msgspec.json.encode(value)
    headers = dict(_HEADERS)
    if request.method == "GET":
        etag = f'"{b64encode(blake2b(body, digest_size=12).digest()).decode()}"'
        headers["ETag"] = etag
        known = request.headers.get("if-none-match", "")
        if etag in [one.strip().removeprefix("W/") for one in known.split(",")]:
            return Response(status_code=304, headers=headers)
    else:
        headers["Cache-Control"] = "no-store"
    return Response(body, status, headers, media_type=JSON)


def wants_rows(request: Request) -> bool:
    """Whether the client asks for a row a line."""
    return NDJSON in request.headers.get("accept", "")


class Rows(StreamingResponse):
    """A row a line. The first page is there, so that an error has a status of its own; the others are asked
    for as the client reads."""

    def __init__(
        self,
        first: Any,
        items: Callable[[Any], list[Any]],
        more: Callable[[Any], AsyncIterator[Any]],
        streams: asyncio.Semaphore,
    ) -> None:
        """`more`: the pages behind one. Raises AskRefused where too many stream."""
        if streams.locked():
            raise AskRefused(503, "too many downloads run already; ask again in a moment")

        async def lines() -> AsyncIterator[bytes]:
            async with streams:
                yield _ndjson(items(first))
                async for page in more(first):
                    yield _ndjson(items(page))

        super().__init__(lines(), headers=_HEADERS, media_type=NDJSON)


class StrictRoute(APIRoute):
    """A route that refuses parameters which it does not have: a slip would give another answer."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI says."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            check_parameters(request.url.path, request.query_params, known)
            return await handle(request)

        known = parameters_of(self.dependant)
        return strict


def parameters_of(dependant: Dependant) -> list[str]:
    """The names of the parameters in the query of a route, and of what it depends on."""
    found: list[str] = []
    for field in dependant.query_params:
        kind = field.field_info.annotation
        model = isinstance(kind, type) and issubclass(kind, BaseModel)
        found += kind.model_fields if model else [field.alias]  # type: ignore[union-attr] # it is a model
    for below in dependant.dependencies:
        found += parameters_of(below)
    return found


def check_parameters(path: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises BadInput for the first parameter that is not known, with the nearest one."""
    for name in given:
        if name not in known:
            others = f"use {', '.join(sorted(known))}" if known else "it has none"
            meant = nearest(name[:60], known, limit=1)
            remedy = f"did you mean {meant[0]!r}?" if meant else others
            raise BadInput(f"{path[:200]} has no parameter {name[:60]!r}; {remedy}")


def problem_schema() -> dict[str, Any]:
    """The JSON Schema of a problem."""
    _, components = msgspec.json.schema_components([Problem], ref_template="#/components/schemas/{name}")
    return dict(components["Problem"])


def _ndjson(rows: list[Any]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
