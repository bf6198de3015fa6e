"""The console: pages for people, on the port of the API."""

import gzip
from functools import cache
from typing import Annotated, Final

from fastapi import APIRouter, Depends, FastAPI, Form, Query, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from pipeline.service.access.console_sessions import LOCAL, ConsoleSession, ConsoleSessions
from pipeline.service.access.keys import READ, key_digest
from pipeline.workers.api.access import while_admitted
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console import (
    compare,
    decisions,
    gpus,
    incidents,
    learning,
    lines,
    now,
    operating,
    patterns,
    plant,
    rates,
    sending,
    sessions,
    silences,
    units,
)
from pipeline.workers.api.console.doors import ConsoleRoute, cookie_name, failure_page, sees
from pipeline.workers.api.console.views import STATIC, Visitor, keep_session, render, static_file
from pipeline.workers.api.problems import AskRefused

ROUTERS: Final = (
    now.router, incidents.router, patterns.router, lines.router, decisions.router, compare.router, rates.router,
    units.router, sessions.router, learning.router, operating.router, plant.router, gpus.router, sending.router, silences.router,
)  # fmt: skip
router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
_YEAR: Final = "public, max-age=31536000, immutable"


def install_console(app: FastAPI) -> None:
    """Adds its pages to the application."""
    for part in (router, *ROUTERS):
        app.include_router(part)
    to_programs = app.exception_handlers[HTTPException]

    async def of_http(request: Request, exc: Exception) -> Response:
        """A page for people, who come with a browser; a problem for programs."""
        assert isinstance(exc, HTTPException)  # noqa: S101 - it is installed for these
        people = "text/html" in request.headers.get("accept", "")
        if exc.status_code == 404 and people and not request.url.path.startswith("/api/"):
            return failure_page(request, 404, f"There is no page {request.url.path[:200]}")
        answer: Response = await to_programs(request, exc)  # type: ignore[misc]
        return answer

    to_log = app.exception_handlers[Exception]

    async def of_fault(request: Request, exc: Exception) -> Response:
        """A page for people where the console itself fails; the log has the traceback."""
        answer: Response = await to_log(request, exc)  # type: ignore[misc]
        people = "text/html" in request.headers.get("accept", "") or request.headers.get("hx-request")
        if people and not request.url.path.startswith("/api/"):
            return failure_page(request, 500, "The console failed; the log of the API says why")
        return answer

    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, of_fault)


@router.get("/static/{version}/{name:path}")
async def get_static(request: Request, name: str) -> Response:
    """A file of the console, kept for ever: its address changes with its bytes."""
    if name not in STATIC:
        return Response("there is no such file\n", 404, media_type="text/plain")
    body, kind = static_file(name)
    headers = {"Cache-Control": _YEAR, "X-Content-Type-Options": "nosniff", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = _packed(name), "gzip"
    return Response(body, headers=headers, media_type=kind)


@router.get("/favicon.ico")
async def get_icon() -> Response:
    """The icon under the name that browsers ask for."""
    body, kind = static_file("icon.svg")
    return Response(body, headers={"Cache-Control": "public, max-age=86400"}, media_type=kind)


@router.get("/in")
async def get_in(
    request: Request,
    once: Annotated[str, Query(max_length=100)] = "",
    to: Annotated[str, Query(max_length=2_000, alias="next")] = "/",
) -> Response:
    """The way in: a link that is good once, or a form for a key."""
    if not once:
        return render(request, None, "in.html", to=to, wrong="")
    api = api_of(request)
    sessions = ConsoleSessions(api.client, api.settings)
    if not api.doorkeeper.listener.loopback or not await api.facts(sessions.take_link, once):
        wrong = (
            "This link was used already, or is older than 10 minutes. `logweir console` prints another one."
        )
        return render(request, None, "in.html", to=to, wrong=wrong, code=403)
    return _entered(request, await api.facts(sessions.begin, LOCAL), to)


@router.post("/in")
async def post_in(
    request: Request,
    key: Annotated[str, Form(max_length=200)] = "",
    to: Annotated[str, Form(max_length=2_000)] = "/",
) -> Response:
    """Signs in with a key."""
    api = api_of(request)
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise AskRefused(403, "a form comes from a page of this console alone; open the page again")
    text = key.strip()
    if api.doorkeeper.is_own(text):
        digest = LOCAL
    else:
        found = (await api.keys.ring()).find([text])
        if found is None or not found.may(READ):
            why = "is not known here, or has expired" if found is None else "has no scope that reads"
            return render(request, None, "in.html", to=to, wrong=f"This key {why}.", code=403)
        digest = key_digest(text)
    sessions = ConsoleSessions(api.client, api.settings)
    return _entered(request, await api.facts(sessions.begin, digest), to)


@router.post("/out")
async def post_out(request: Request, visitor: Annotated[Visitor, Depends(sees())]) -> Response:
    """Signs out."""
    api = api_of(request)
    await api.facts(ConsoleSessions(api.client, api.settings).end, visitor.session.secret)
    answer = RedirectResponse("/in", 303)
    answer.delete_cookie(cookie_name(request))
    return answer


@router.get("/events")
async def get_changes(
    request: Request,
    visitor: Annotated[Visitor, Depends(sees())],
    of: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """The names of changes, for open pages. A name says nothing about any workload. `of`: the names that the
    page shows."""
    feed = api_of(request).feed
    if feed.full:
        return failure_page(request, 503, "too many pages are open already; close some")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    last = request.headers.get("last-event-id", "")[:2_000]
    stream = while_admitted(
        feed.follow(last, frozenset(of.split())), api_of(request).doorkeeper, visitor.asker
    )
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def _entered(request: Request, session: ConsoleSession, to: str) -> Response:
    inside = to.startswith("/") and not to.startswith(("//", "/\\")) and to.isprintable()
    answer = RedirectResponse(to if inside else "/", 303, headers={"Cache-Control": "no-store"})
    keep_session(request, answer, cookie_name(request), session)
    return answer


@cache
def _packed(name: str) -> bytes:
    return gzip.compress(static_file(name)[0], mtime=0)
