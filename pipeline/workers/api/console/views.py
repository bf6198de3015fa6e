"""How pages are made: the templates, what every page knows, and the headers that keep it safe."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline import __version__
from pipeline.records.batch import utc_now
from pipeline.service.access.console_sessions import ConsoleSession
from pipeline.units import plural, visible
from pipeline.workers.api.access import Asker
from pipeline.workers.api.console import charts, words

PACKAGE: Final = "pipeline.workers.api.console"
STATIC: Final = {
    "console.css": "text/css",
    "console.js": "text/javascript",
    "chart.js": "text/javascript",
    "theme.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "vendor/htmx.min.js": "text/javascript",
    "vendor/hx-csp.min.js": "text/javascript",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
}
SPANS: Final = ("15m", "1h", "6h", "24h", "7d", "30d")
POLICY: Final = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)


# They stand in pages that are written for all who have the same access.
_NONCE: Final = secrets.token_urlsafe(24)
_NOBODY: Final = ConsoleSession(key="", secret=secrets.token_urlsafe(32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who looks at a page. `token`: what every form carries. `cookie`: the name of one that the browser does
    not have yet."""

    asker: Asker
    session: ConsoleSession
    cookie: str = ""

    @property
    def token(self) -> str:
        return self.session.token

    def may(self, scope: str) -> bool:
        """Whether buttons of this scope are shown."""
        return self.asker.key.may(scope)


class Page(HTMLResponse):
    """A page or a piece of one, with the headers of all of them."""

    def __init__(self, body: str, nonce: str, status: int = 200) -> None:
        super().__init__(body, status, headers=safe_headers(nonce))


def render(
    request: Request, visitor: Visitor | None, template: str, /, *, code: int = 200, **facts: Any
) -> Response:
    """A page. `facts`: the names of its template; `code`: the status of HTTP."""
    nonce = secrets.token_urlsafe(16)
    return answer_with(request, visitor, written(request, visitor, template, nonce, facts), nonce, code)


def written(
    request: Request, visitor: Visitor | None, template: str, nonce: str, facts: Mapping[str, Any]
) -> str:
    """The text of a page."""
    known = {
        "nonce": nonce,
        "me": visitor,
        "path": request.url.path,
        "now": utc_now(),
        "spans": SPANS,
        "link": lambda **changes: link(request.url.path, request.query_params, changes),
    }
    return console_templates().get_template(template).render({**known, **facts})


def answer_with(
    request: Request, visitor: Visitor | None, text: str, nonce: str, code: int = 200
) -> Response:
    """The answer that brings this text."""
    page = Page(text, nonce, code)
    if visitor is not None and visitor.cookie:
        keep_session(request, page, visitor.cookie, visitor.session)
    return page


def written_for_all(request: Request, visitor: Visitor, template: str, facts: Mapping[str, Any]) -> str:
    """The text of a page for everybody with the access of this visitor; `for_one` makes it that of one.

    Nonce and token are secrets of this process until then, so no text of a log line can stand for them."""
    return written(request, replace(visitor, session=_NOBODY), template, _NONCE, facts)


def for_one(request: Request, visitor: Visitor, text: str) -> Response:
    """A page of `written_for_all` with a nonce of its own and the token of this visitor's session."""
    nonce = secrets.token_urlsafe(16)
    return answer_with(
        request, visitor, text.replace(_NONCE, nonce).replace(_NOBODY.token, visitor.token), nonce
    )


def keep_session(request: Request, answer: Response, name: str, session: ConsoleSession) -> None:
    """Gives the browser its cookie. No script reads it, and no page of another site sends it."""
    https = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    answer.set_cookie(name, session.secret, httponly=True, samesite="strict", secure=https, path="/")


def link(path: str, query: Mapping[str, str], changes: Mapping[str, object]) -> str:
    """The address of the same page with other parameters; None and "" leave one out."""
    wanted = {**query, **changes}
    wanted.pop("cursor", None) if "cursor" not in changes else None
    kept = {name: str(value) for name, value in wanted.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(kept)}" if kept else path


def safe_headers(nonce: str) -> dict[str, str]:
    """No script of others, no frame around it, nothing kept by the browser."""
    return {
        "Content-Security-Policy": POLICY.format(nonce=nonce),
        "Cache-Control": "no-store",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    }


@cache
def static_file(name: str) -> tuple[bytes, str]:
    """The bytes and the media type of a file of the console. Raises KeyError."""
    kind = STATIC[name]
    return files(PACKAGE).joinpath("static", name).read_bytes(), kind


@cache
def static_url(name: str) -> str:
    """Its address, which changes with its bytes, so that browsers may keep it for ever."""
    body, _ = static_file(name)
    return f"/static/{sha256(body).hexdigest()[:12]}/{name}"


@cache
def console_templates() -> Environment:
    """Filters give raw text; the templates escape all of it, and show its control characters."""
    env = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update({function.__name__: function for function in (*words.FILTERS, plural)})
    env.globals.update(static=static_url, version=__version__, bars=charts.bars, lane=charts.lane)
    return env


def _shown(value: object) -> object:
    """What an expression of a template prints: every text of others goes through here, whatever it is of."""
    return visible(value) if type(value) is str else value  # Markup is ours
