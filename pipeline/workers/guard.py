"""Keeps a message that is none from ending a worker.

kombu decodes what it takes from a queue without a net: one value that is not JSON, or not a message, ends the
consumer, and with it the process. Here such a value is logged and dropped; the ledger sends again what it stood for.
"""

from collections.abc import Callable
from queue import Empty
from typing import Any

from kombu.exceptions import OperationalError
from kombu.transport import redis as transport

from pipeline.observe import logger


class Channel(transport.Channel):  # type: ignore[misc] # kombu publishes no types
    """The Redis channel of kombu that drops what is no message."""

    _delivered = False

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        deliver = self.connection._callbacks[queue]

        def checked(raw: Any) -> None:
            self._delivered = True
            if is_message(raw):
                deliver(raw)
            else:
                logger(queue=queue).warning("message.dropped", why="it has not the form of a message")

        self.connection._callbacks[queue] = checked

    def _brpop_read(self, **options: Any) -> Any:
        self._delivered = False
        try:
            return super()._brpop_read(**options)
        except (
            Empty,
            OSError,
            OperationalError,
            *self.connection.connection_errors,
            *self.connection.channel_errors,
        ):
            raise
        except Exception as exc:
            if self._delivered:
                raise
            logger().warning("message.dropped", why=f"it cannot be decoded: {type(exc).__name__}")
            raise Empty from exc


def is_message(raw: object) -> bool:
    """Whether this has everything that kombu reads without asking."""
    if not isinstance(raw, dict) or not isinstance(raw.get("body"), str):
        return False
    properties, headers = raw.get("properties"), raw.get("headers")
    if not isinstance(properties, dict) or not isinstance(headers, dict):
        return False
    info = properties.get("delivery_info")
    texts = (raw.get("content-type"), raw.get("content-encoding"), properties.get("delivery_tag"))
    return (
        isinstance(info, dict)
        and all(isinstance(info.get(name), str) for name in ("exchange", "routing_key"))
        and all(isinstance(text, str) for text in texts)
        and properties.get("body_encoding") in (None, "utf-8", "base64")
    )


def install() -> None:
    """For a process that consumes; senders need none of it."""
    transport.Transport.Channel = Channel
