"""The client of OpenSearch, and one sentence for each of its errors.

Certificates are always verified, without a switch. The client does not retry: a bulk and a poll have their
own schedules."""

import base64
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from opensearchpy import OpenSearch
from opensearchpy.connection import Urllib3HttpConnection
from opensearchpy.exceptions import (
    AuthenticationException,
    ConnectionError,
    ConnectionTimeout,
    NotFoundError,
    SerializationError,
    SSLError,
    TransportError,
)
from urllib3 import Timeout

from pipeline.errors import BadSetting, Retryable
from pipeline.settings import Settings

CONNECT_S: Final = 5.0  # a host that takes longer to accept a connection is not one to wait for
READ_S: Final = 30.0  # a bulk of 5 MiB takes about a second; merges and collections of garbage take several


class _Connection(Urllib3HttpConnection):  # type: ignore[misc] # opensearch-py is not followed by mypy
    """Adds place and user to every error, for `translate_errors`; logs nothing."""

    def __init__(self, *, user: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._user = user

    def perform_request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().perform_request(*args, **kwargs)
        except TransportError as exc:
            exc.place = f"{self.hostname}:{self.port}"
            exc.user = self._user
            raise

    def log_request_fail(self, *args: Any, **kwargs: Any) -> None:
        """The handler of the error logs it once, without the body of the request."""


def opensearch_client(settings: Settings, *, reading: bool = False) -> OpenSearch:
    """A client of `settings.opensearch.url`; nothing is sent yet.

    `reading` takes the user who reads log indices, if one is set. A user in the settings goes before one in
    the URL. Requests are not compressed: compression costs a fifth of the bulk rate on loopback, and 25,000
    documents/s are only 20 MB/s. Raises BadSetting without a server."""
    if settings.opensearch.url is None:
        raise BadSetting("OPENSEARCH_URL is not set; name the server, such as https://search.example:9200")
    url = urlsplit(settings.opensearch.url)
    secure = url.scheme == "https"
    user, password = _credentials(settings, reading=reading)
    headers = {}
    if user is not None:
        # The server reads UTF-8; urllib3 would encode as Latin-1, which fails for other passwords.
        word = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
        headers["authorization"] = f"Basic {word}"
    options: dict[str, Any] = {}
    if secure and settings.opensearch.ca is not None:
        # A missing file is an error of the first request, not of this call: the file can come back.
        options = {"verify_certs": True, "ca_certs": str(settings.opensearch.ca)}
    elif secure:
        options = {"ssl_context": ssl.create_default_context()}
    return OpenSearch(
        hosts=[
            {
                "host": url.hostname,
                "port": url.port or (443 if secure else 9200),
                "use_ssl": secure,
                "url_prefix": url.path.strip("/"),
            }
        ],
        connection_class=_Connection,
        headers=headers,
        user=user,
        timeout=Timeout(connect=CONNECT_S, read=READ_S),
        max_retries=0,
        pool_maxsize=2,  # a scan fetches its next page in a thread
        retry_on_timeout=False,
        http_compress=False,
        **options,
    )


def _credentials(settings: Settings, *, reading: bool) -> tuple[str | None, str | None]:
    if reading and settings.opensearch.read_user is not None:
        return settings.opensearch.read_user, settings.opensearch.read_password
    if settings.opensearch.user is not None:
        return settings.opensearch.user, settings.opensearch.password
    url = urlsplit(settings.opensearch.url or "")
    return (
        None if url.username is None else unquote(url.username),
        None if url.password is None else unquote(url.password),
    )


@contextmanager
def translate_errors(task: str, error: type[Retryable]) -> Iterator[None]:
    """Turns opensearch-py's exceptions into `error` with one sentence: `task`, why, and the remedy.

    `task` is a clause such as "results cannot be written to logweir-results-*". Every answer of a server is
    Retryable, because an operator can heal it from outside. Other exceptions, bugs among them, pass.
    """
    try:
        yield
    except TransportError as exc:
        raise error(f"{task}: {_why(exc)}") from exc
    except SerializationError as exc:
        if "Unknown mimetype" not in str(exc):
            raise
        raise error(
            f"{task}: what answers at OPENSEARCH_URL does not speak JSON; name the address of an OpenSearch"
        ) from exc


def is_absence(exc: BaseException | None) -> bool:
    """True for the answer 404 of the server."""
    return isinstance(exc, NotFoundError)


def reason_of(exc: TransportError) -> tuple[str, str]:
    """(type, reason) of the innermost cause; empty strings without one."""
    info = exc.info
    problem = info.get("error") if isinstance(info, dict) else None
    return error_cause(problem) if problem else ("", "" if isinstance(info, Exception) else str(info or ""))


def error_cause(problem: Any) -> tuple[str, str]:
    """(type, reason) of an error object of the server, of a request or of one item of a bulk.

    The reason names index, field and type, but no value of a field, because reasons go to logs.
    """
    if not isinstance(problem, dict):
        return "", str(problem)
    outer = (problem.get("root_cause") or [problem])[0]
    kind, reason = str(outer.get("type") or ""), str(outer.get("reason") or "")
    inner = problem.get("caused_by")
    while isinstance(inner, dict) and "[" not in reason:  # "failed to parse" alone does not name the field
        reason = f"{reason}: {inner.get('reason')}"
        inner = inner.get("caused_by")
    return kind, _short(reason.partition(" Preview of field's value")[0])


def remedy(status: int, kind: str, reason: str, user: str | None = None) -> str:
    """The cause and remedy of an HTTP status, for a request or one item of a bulk."""
    reason = _short(reason)
    if kind == "cluster_block_exception":
        return f"the index is blocked ({reason}); free disk space or remove the block"
    if kind == "index_closed_exception":
        return "the index is closed; open it"
    if status == 403:
        return (
            f"{_named(user, 'the user')} has not the right ({reason}); give its role that action on the index"
        )
    if status == 429:
        return (
            f"the server is too busy (429{_in_brackets(reason)}); "
            "it will be tried again, or give it more memory"
        )
    if status == 404:
        return f"there is no such index (404{_in_brackets(reason)}); check the name and create it"
    if status == 413:
        return "the server takes no request of this size (413); raise its http.max_content_length"
    if status >= 500:
        return f"the server is not ready ({status}{_in_brackets(reason)}); look at the health of the cluster"
    return (
        f"the server refused it ({status}{_in_brackets(reason)}); "
        "change the setting or mapping that this names"
    )


def _why(exc: TransportError) -> str:
    place, user = getattr(exc, "place", "the server"), getattr(exc, "user", None)
    if isinstance(exc, SSLError) and "WRONG_VERSION_NUMBER" in str(exc.error):
        return (
            f"{place} does not speak TLS; write OPENSEARCH_URL with http://, or give the server a certificate"
        )
    if isinstance(exc, SSLError) and "not valid for" in str(exc.error):
        return (
            f"the certificate of {place} is for another host ({_short(str(exc.error))}); name the host in"
            " OPENSEARCH_URL as the certificate does"
        )
    if isinstance(exc, SSLError):
        return (
            f"the certificate of {place} cannot be verified ({_short(str(exc.error))}); set opensearch_ca to "
            "the"
            " PEM file of the authority that signed it"
        )
    if isinstance(exc, ConnectionTimeout):
        return f"{place} did not answer within {READ_S:.0f} s; look at its load, or wait until it recovers"
    if isinstance(exc, ConnectionError):
        return f"{place} is not reachable ({_cause(exc.info)}); start it, or correct OPENSEARCH_URL"
    if isinstance(exc, AuthenticationException):
        named = _named(user, "a client without a user")
        return f"{place} does not accept {named} (401); correct the OpenSearch user and password"
    kind, reason = reason_of(exc)
    status = exc.status_code if isinstance(exc.status_code, int) else 500
    if isinstance(exc, NotFoundError) and kind not in ("", "index_not_found_exception"):
        return f"the server does not know it any more (404, {_short(reason)}); it will be asked for again"
    return remedy(status, kind, reason, user)


def _named(user: str | None, otherwise: str) -> str:
    return otherwise if user is None else f"the user {user!r}"


def _in_brackets(reason: str) -> str:
    return f", {reason}" if reason else ""


def _cause(exc: object) -> str:
    # urllib3 writes "HTTPConnection(host=..., port=...): Failed to ...: [Errno 111] Connection refused".
    text = str(exc)
    found = re.search(r"\[Errno -?\d+\] ([^'\")]+)", text)
    if "RemoteDisconnected" in text:
        return "it closed the connection; a server that wants https:// does that too"
    return found.group(1) if found else _short(text)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
