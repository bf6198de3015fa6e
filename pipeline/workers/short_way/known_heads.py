"""Heads of HTTP requests that clients repeat: the same bytes, but for the digits of Content-Length.

A parser has read such bytes once, so they are compared and not parsed again. Only heads are known whose body
is the next so many bytes and after which the connection goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MOST_HEAD: Final = 4 << 10  # bytes
_DIGITS: Final = 9  # of a length
# These change what the body is, whether the connection goes on, or who the client is.
_UNUSUAL: Final = frozenset(
    {
        b"transfer-encoding",
        b"expect",
        b"upgrade",
        b"trailer",
        b"proxy-connection",
        b"x-forwarded-for",
        b"x-forwarded-proto",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class KnownHead:
    """The bytes around the digits, and what the application knows of such requests."""

    before: bytes
    after: bytes  # with the empty line
    facts: Any

    def measure(self, data: bytes) -> tuple[int, int] | None:
        """The length of the body, and where it begins in these bytes. None for another head or a part."""
        before = self.before
        if not data.startswith(before):
            return None
        end = data.find(b"\r", len(before), len(before) + _DIGITS + 1)
        if end < 0 or not data.startswith(self.after, end):
            return None
        digits = data[len(before) : end]
        return (int(digits), end + len(self.after)) if digits.isdigit() else None


def parted_head(data: bytes, scope: Mapping[str, Any]) -> tuple[bytes, bytes] | None:
    """The bytes before and after the digits of Content-Length, None for a head that cannot be known.

    `data`: begins with a request. `scope`: of ASGI, as a parser has read the head."""
    end = data.find(b"\r\n\r\n", 0, MOST_HEAD)
    if end < 0 or scope["http_version"] != "1.1":
        return None
    request, *lines = data[:end].split(b"\r\n")
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    if request != b"%b %b HTTP/1.1" % (scope["method"].encode(), target):
        return None
    place = _place_of_length(lines, scope["headers"])
    if place is None:
        return None
    number, length = place
    begin = len(request) + sum(2 + len(line) for line in lines[: number + 1]) - length
    return data[:begin], data[begin + length : end + 4]


def _place_of_length(
    lines: Sequence[bytes], headers: Sequence[tuple[bytes, bytes]]
) -> tuple[int, int] | None:
    """The line that ends with the digits, and how many they are; None where the lines are not the headers, or
    where one of these is unusual."""
    if len(lines) != len(headers):
        return None
    found: list[tuple[int, int]] = []
    for number, (line, (name, value)) in enumerate(zip(lines, headers, strict=True)):
        spelled, colon, rest = line.partition(b":")
        if not colon or spelled.lower() != name or rest.lstrip(b" \t") != value:
            return None
        if name in _UNUSUAL or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        if name == b"content-length":
            if not value.isdigit() or len(value) > _DIGITS:
                return None
            found.append((number, len(value)))
    return found[0] if len(found) == 1 else None
