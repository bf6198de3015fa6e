"""Who may see the console: a cookie of a session stands for a key, and ends with it.

A form needs the token of its session and the origin of this host, for browsers send cookies by themselves.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final
from urllib.parse import quote, urlsplit

import redis
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from fastapi.routing import APIRoute

from pipeline.errors import LogweirError, RedisUnavailable
from pipeline.logs import logger
from pipeline.records.batch import utc_now
from pipeline.service.access.console_sessions import LOCAL, ConsoleSession, ConsoleSessions
from pipeline.service.access.keys import READ
from pipeline.workers.api.access import Asker, own_asker
from pipeline.workers.api.answering import check_parameters, parameters_of
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.views import Visitor, link, render
from pipeline.workers.api.problems import AskRefused, first_mistake, status_of

TITLES: Final = {
    401: "Sign in",
    403: "This key may not do that",
    404: "Nothing is here",
    409: "Somebody was faster",
    503: "Something does not answer",
    504: "That takes too long",
}


# An address may have these beside the parameters of its page. The script of the page reads the zone of its
# times, and mail programs and chats append the other marks to a link without asking.
OF_ALL_PAGES: Final = frozenset({"zone", "fbclid", "gclid", "msclkid", "mc_cid", "mc_eid"})
APPENDED: Final = "utm_"


class SignIn(Exception):
    """Nobody has signed in; the page is asked for again afterwards."""


class ConsoleRoute(APIRoute):
    """A route whose errors are pages for people. It refuses parameters that it does not have, as the API
    does: with a slip in its address a page would show other lines than its reader believes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        known = parameters_of(self.dependant)

        async def answer(request: Request) -> Response:
            try:
                check_parameters(request.url.path, of_page(request.query_params), known)
                return await handler(request)
            except SignIn:
                return _sign_in(request)
            except RequestValidationError as exc:
                return failure_page(request, 400, first_mistake(exc))
            except AskRefused as exc:
                return failure_page(request, exc.status, str(exc))
            except LogweirError as exc:
                return failure_page(request, status_of(exc), str(exc))
            except redis.RedisError as exc:
                return failure_page(request, 503, f"Redis does not answer ({exc})")

        return answer


def of_page(names: Iterable[str]) -> list[str]:
    """The parameters that a page itself must know."""
    return [name for name in names if name not in OF_ALL_PAGES and not name.startswith(APPENDED)]


def cookie_name(request: Request) -> str:
    """Cookies of a host are sent to all its ports, so each port has a name of its own."""
    return f"lw_{request.url.port or 0}"


def sees(scope: str = READ, *, whole: bool = False) -> Callable[[Request], Awaitable[Visitor]]:
    """The dependency of a page or a form. `whole`: it is about the pipeline as a whole."""

    async def visitor(request: Request) -> Visitor:
        found = await _visitor(request)
        if not found.may(scope):
            raise AskRefused(
                403, f"the key {found.asker.name!r} may not do this; it needs the scope {scope!r}"
            )
        if whole and found.asker.only:
            raise AskRefused(
                403,
                f"the key {found.asker.name!r} sees only {', '.join(found.asker.only)}, and this is about "
                "the whole pipeline",
            )
        if request.method != "GET":
            await _check_form(request, found)
        return found

    return visitor


async def _visitor(request: Request) -> Visitor:
    api = api_of(request)
    secret = request.cookies.get(cookie_name(request), "")
    named = api.doorkeeper.proxied(request)
    if named is not None:
        # The proxy says who it is with each request; the cookie only ties forms to this browser.
        fresh = not secret
        session = ConsoleSession(key="", secret=secret or secrets.token_urlsafe(32))
        return Visitor(asker=named, session=session, cookie=cookie_name(request) if fresh else "")
    if not secret:
        raise SignIn
    sessions = ConsoleSessions(api.client, api.settings)
    try:
        found: ConsoleSession | None = await api.facts(sessions.find, secret)
    except RedisUnavailable as exc:
        raise RedisUnavailable("Redis does not answer, so nobody is known here; try again") from exc
    if found is None:
        raise SignIn
    if found.key == LOCAL:
        if not api.doorkeeper.listener.loopback:
            raise SignIn
        return Visitor(asker=own_asker(), session=found)
    try:
        key = (await api.keys.ring()).by_digest.get(found.key)
    except (RedisUnavailable, redis.RedisError) as exc:
        raise RedisUnavailable("Redis does not answer, so no key can be checked; ask again") from exc
    if key is None or not key.holds(utc_now()):
        raise SignIn
    return Visitor(asker=Asker(name=key.name, key=key), session=found)


async def _check_form(request: Request, visitor: Visitor) -> None:
    origin = request.headers.get("origin")
    host = (request.headers.get("host") or "").lower()
    if origin is None or urlsplit(origin).netloc.lower() != host:
        raise AskRefused(403, "a form comes from a page of this console alone; open the page again")
    form = await request.form()
    given = str(form.get("token", "")).encode(errors="replace")  # compared as bytes: a text must be ASCII
    if not hmac.compare_digest(given, visitor.token.encode()):
        raise AskRefused(403, "the form belongs to another session; open the page again")


def _sign_in(request: Request) -> Response:
    if request.headers.get("hx-request"):
        return Response(status_code=401, headers={"HX-Refresh": "true"})
    # A link in a mail: the browser keeps the cookie back until the page itself asks.
    if request.headers.get("sec-fetch-site") == "cross-site" and request.method == "GET":
        return render(request, None, "again.html")
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    if request.method != "GET":  # a form, which must not be asked for: the page that it stood on
        target = page_before(request)
    return RedirectResponse("/in" if target == "/" else f"/in?next={quote(target, safe='')}", 303)


def page_before(request: Request) -> str:
    """The page of this console that a form stood on, the first one where none is named."""
    inside = request.headers.get("referer", "").partition("://")[2]
    host = request.headers.get("host", "")
    return "/" + inside.partition("/")[2] if inside.startswith(f"{host}/") else "/"


def failure_page(request: Request, status: int, sentence: str) -> Response:
    """An error as a page, or as a note on the page where a form is."""
    if status == 500:
        logger().error("console.failed", path=request.url.path, why=sentence)
    if request.headers.get("hx-request"):
        answer = render(request, None, "toast.html", text=sentence, undo=None, bad=True)
        # A piece that asks again by itself must stay on the page.
        answer.headers.update(
            {"HX-Retarget": "#toasts", "HX-Reswap": "beforeend", "HX-Reselect": "[data-toast]"}
        )
        return answer
    title = TITLES.get(status, "It did not work")
    again = ("", "")  # an address and what it is called
    if request.method == "GET" and status == 400 and request.url.query:
        again = (quote(request.url.path), f"{request.url.path} without parameters")
    elif request.method == "GET" and status >= 500:
        again = (link(quote(request.url.path), request.query_params, {}), "Try again")
    return render(
        request, None, "error.html",
        code=status, status=status, title=title, sentence=sentence, again=again,
    )  # fmt: skip
