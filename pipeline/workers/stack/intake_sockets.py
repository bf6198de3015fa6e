"""The sockets of the intake. The supervisor opens them, so a restart of the process loses no connection."""

import socket
from collections.abc import Sequence
from dataclasses import replace

from pipeline.settings.listeners import DEFAULT, Listener
from pipeline.workers import sockets


class IntakeSockets:
    """The open sockets of a stack, in the order of its listeners."""

    def __init__(self) -> None:
        self._opened: list[socket.socket | None] = []
        self.listeners: list[Listener] = []  # with the ports that were found

    def open(self, texts: Sequence[str]) -> tuple[str, ...]:
        """The listeners with their ports. Raises BadInput."""
        # A second stack on this machine takes one of the next ports, as its metrics do. A chosen port is that
        # one or none: senders know it.
        tries = sockets.TRIES if tuple(texts) == (DEFAULT,) else 1
        for listener in map(Listener.parse, texts):
            opened = sockets.listener_socket(listener, tries=tries)
            self._opened.append(opened)
            port = listener.port if opened is None else opened.getsockname()[1]
            self.listeners.append(replace(listener, port=port).absolute())
        return tuple(map(str, self.listeners))

    @property
    def fds(self) -> tuple[int, ...]:
        """-1 where the process opens its own."""
        return tuple(-1 if opened is None else opened.fileno() for opened in self._opened)

    @property
    def urls(self) -> list[str]:
        """Where senders on this machine find the intake."""
        return [listener.address for listener in self.listeners]

    def close(self) -> None:
        for opened in filter(None, self._opened):
            opened.close()
        self._opened, self.listeners = [], []
