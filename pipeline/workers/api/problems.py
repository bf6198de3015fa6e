"""Errors as problems (RFC 9457): one sentence with the value and the remedy, and a status."""

from typing import Final

import msgspec
import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipeline.errors import (
    AnswerCancelled,
    BadInput,
    LeaseRefused,
    LiveChanged,
    LogweirError,
    NotFound,
    RedisUnavailable,
    Retryable,
)
from pipeline.logs import logger
from pipeline.units import one_line

PROBLEM: Final = "application/problem+json"
MAX_DETAIL: Final = 1_000  # characters
# The first class that fits decides.
_STATUS: Final = (
    (NotFound, 404),
    (BadInput, 400),
    (LeaseRefused, 409),
    (LiveChanged, 409),
    (AnswerCancelled, 504),
    (Retryable, 503),
    (LogweirError, 500),
)
_TITLES: Final = {
    400: "Bad request",
    401: "A key is needed",
    403: "The key does not allow it",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "The body is too large",
    414: "The query is too long",
    421: "Another host is asked for",
    500: "A fault of ours",
    503: "Try again later",
    504: "It takes too long",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is no success."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    instance: str = ""


class AskRefused(Exception):
    """A request that is refused with this status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def problem(status: int, sentence: object, instance: str = "") -> Response:
    """The answer."""
    body = Problem(
        title=_TITLES.get(status, "It did not work"),
        status=status,
        detail=one_line(sentence)[:MAX_DETAIL],
        instance=instance,
    )
    headers = {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    }
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 503:
        headers["Retry-After"] = "1"
    return Response(msgspec.json.encode(body), status, headers, media_type=PROBLEM)


def status_of(exc: LogweirError) -> int:
    """The status that an error of ours is answered with."""
    return next(status for kind, status in _STATUS if isinstance(exc, kind))


def first_mistake(exc: RequestValidationError) -> str:
    """The first parameter that is wrong, in a sentence."""
    first = exc.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("query", "path", "body"))
    given = str(first.get("input", ""))[:80]
    message = str(first["msg"])
    if first["type"] == "missing":
        return f"{place or 'the body'} is required; give it"
    if first["type"] == "model_attributes_type":
        return f"{place or 'the body'} is no JSON object; send one with Content-Type: application/json"
    return f"{place or 'the body'}: {message[:1].lower()}{message[1:]}, not {given!r}"


def install_problems(app: FastAPI) -> None:
    """Every error of a route becomes a problem."""

    async def of_ours(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, LogweirError)  # noqa: S101 - it is installed for these
        status = status_of(exc)
        if status == 500:
            logger().error("api.failed", path=request.url.path, why=str(exc))
        return problem(status, exc, request.url.path)

    async def refused(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, AskRefused)  # noqa: S101 - it is installed for these
        return problem(exc.status, exc, request.url.path)

    async def of_redis(request: Request, exc: Exception) -> Response:
        return problem(503, RedisUnavailable(f"Redis does not answer ({exc})"), request.url.path)

    async def invalid(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)  # noqa: S101 - it is installed for these
        return problem(400, first_mistake(exc), request.url.path)

    async def of_http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)  # noqa: S101 - it is installed for these
        sentence = str(exc.detail)
        if exc.status_code == 404:
            sentence = f"there is no {request.url.path[:200]} here; /api/v1/openapi.json lists what there is"
        answer = problem(exc.status_code, sentence, request.url.path)
        answer.headers.update(exc.headers or {})
        return answer

    async def failed(request: Request, exc: Exception) -> Response:
        logger().error("api.failed", path=request.url.path, exc_info=exc)
        return problem(500, "the API failed; its log says why", request.url.path)

    app.add_exception_handler(LogweirError, of_ours)
    app.add_exception_handler(AskRefused, refused)
    app.add_exception_handler(redis.RedisError, of_redis)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, failed)
