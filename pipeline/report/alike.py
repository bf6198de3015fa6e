"""Templates that differ only in who asked: user agent, referrer or address of the client.

One fault behind a web server makes a template for each browser. A reader wants one finding of them. Paths and
statuses stay, because they say what happened.
"""

import re
from collections.abc import Iterable
from typing import Final

_QUOTED: Final = r'"(?:[^"\\]|\\.)*(?:"|\Z)'
# Combined log format: the request, status and size, then referrer and user agent. The size says nothing, and
# a template may have a wildcard in place of the status.
_COMBINED: Final = re.compile(
    r'("[A-Z<][^"]*HTTP/[^"]*")\s(\S+)\s\S+(?:\s(?:' + _QUOTED + r"|<[A-Z*][A-Z0-9_]*>)){1,2}"
)
# `client: <IP>,` of nginx, `remote_addr=<IP>`, `"user_agent": "..."`; the comma before it goes with it.
_NAMED: Final = re.compile(
    r"[,;]?\s?[\"']?\b(?:client(?:_?(?:ip|addr(?:ess)?|port))?|peer(?:_?addr(?:ess)?)?|"
    r"remote_?(?:ip|addr(?:ess)?|host|port)|x_?forwarded_?for|(?:http_?)?user_?agent|(?:http_?)?referr?er)"
    r"[\"']?\s?[:=]\s?(?:" + _QUOTED + r"|<[^>\s]*>(?::<NUM>)?|[^\s,;}\]\"']+)",
    re.IGNORECASE,
)
_ADDRESS: Final = re.compile(r"<IP>(?::<NUM>)?")
STATUS: Final = r"HTTP/[\d.]+\"\s+(\d{3})\b"  # also for Polars
_STATUS: Final = re.compile(STATUS)
_SCANNED: Final = 4_000  # characters; a longer line has its address before that


def request_alone(template: str, status: str) -> str:
    """The request and the status of an access template, which are all that its finding is about; else "".

    The client's address and agent are cut off."""
    found = _COMBINED.match(template[:_SCANNED])
    return f"{found[1]} {status} …" if found and status else ""


def common_form(template: str, messages: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """The template without client, referrer and user agent, and the statuses of these messages.

    Equal for findings that are one to a reader. A template may have a wildcard where the status stood.
    """
    head, tail = template[:_SCANNED], template[_SCANNED:]
    statuses = {match[1] for text in messages if (match := _STATUS.search(text[:_SCANNED]))}
    request = r"\1" if statuses else r"\1 \2"  # the lines say which status it was
    form = _ADDRESS.sub("<*>", _NAMED.sub("", _COMBINED.sub(request, head)))
    return f"{' '.join(form.split())}{tail}", tuple(sorted(statuses))
