"""Requests with known heads: they go from their connection to an application without a parser and a task."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from pipeline.workers.short_way.known_heads import KnownHead

# In the scope of a request that has had its turn, and whose body came too late for the short way.
WAITED: Final = "logweir.waited"


class ShortConnection(Protocol):
    """The connection of such a request."""

    def answer_short(self, status: int, headers_and_body: bytes, *, cut: bool) -> None:
        """As `ShortRequest.answer`."""

    def leave_short_way(self, data: bytes) -> None:
        """The bytes of the request go the usual way."""


class ShortWay(Protocol):
    """An application, as it takes requests with known heads."""

    def head_of(self, before: bytes, after: bytes, scope: Mapping[str, Any]) -> KnownHead | None:
        """The head of these bytes and of this scope; None where its requests go the usual way."""

    def begin(self, request: "ShortRequest") -> bool:
        """Calls `answer` or `go_usual_way` of the request later. False where it is to go the usual way at
        once. Its body may still arrive."""


class ShortRequest:
    """A request with a known head, until it is answered."""

    __slots__ = ("_begins", "_connection", "_pieces", "facts", "gone", "length", "missing")

    def __init__(
        self, connection: ShortConnection, facts: Any, data: bytes, *, length: int, begins: int
    ) -> None:
        """`length`: of the body, which begins at this place of the data."""
        self.facts, self.length = facts, length
        self.gone = False  # its client is
        self.missing = length - (len(data) - begins)  # bytes of the body
        self._connection, self._begins, self._pieces = connection, begins, [data]

    @property
    def body(self) -> bytes:
        first, *others = self._pieces
        return b"".join((first[self._begins :], *others))

    def add(self, data: bytes) -> None:
        """More of the body."""
        self._pieces.append(data)
        self.missing -= len(data)

    def answer(self, status: int, headers_and_body: bytes, *, cut: bool = False) -> None:
        """`headers_and_body`: with line ends and the empty line. `cut`: the connection ends after it."""
        if not self.gone:
            self._connection.answer_short(status, headers_and_body, cut=cut)

    def go_usual_way(self) -> None:
        """As if its bytes had just come."""
        if not self.gone:
            self._connection.leave_short_way(b"".join(self._pieces))
