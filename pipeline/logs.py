"""Structured logs: one event is a fixed name and key=value pairs, with bound context.

JSON to stderr for machines, short lines when a terminal reads along. Log text of users, passwords and
payloads never enter an event. The first event imports structlog: that takes a fifth of a
second, and a sender may never log one.
"""

import logging
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    import structlog


def set_up(level: str, *, json: bool | None = None) -> None:
    """Called once by an entry point, never on import."""
    import structlog

    if json is None:
        json = not sys.stderr.isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    tail: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=shared + tail,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Unfailing(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    # Libraries log through the standard module; the same processors format their messages.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name, _of_library],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(getattr(logging, level.upper()), logging.WARNING))


class _Unfailing:
    """A stream that drops what cannot be written, as the handlers of the standard module do. A full disk must
    not keep a batch from being given back."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # no space, a closed pipe; a closed stream
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def _of_library(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A foreign message becomes the `message` of one event, so that events keep their closed set of names."""
    return {**event, "event": "library", "message": event["event"]}


def logger(**context: object) -> "structlog.stdlib.BoundLogger":
    """A logger with context bound to it, e.g. batch, role, model.

    Where no entry point has called `set_up`, events go through the standard module, as those of any library.
    If the host program has no handler, warnings reach stderr; structlog as it comes would print to stdout.
    """
    import structlog

    if structlog.is_configured():
        return cast("structlog.stdlib.BoundLogger", structlog.get_logger(**context))
    wrapped = structlog.wrap_logger(
        logging.getLogger("logweir"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return cast("structlog.stdlib.BoundLogger", wrapped.bind(**context))
