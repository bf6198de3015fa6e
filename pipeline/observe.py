"""Structured logs: one event is a fixed name and key=value pairs, with bound context.

JSON to stderr for machines, short lines when a terminal reads along. Log text of users, passwords and
payloads never enter an event.
"""

import logging
import sys
from typing import Any, cast

import structlog


def set_up(level: str, *, json: bool | None = None) -> None:
    """Called once by an entry point, never on import."""
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(
        level=max(getattr(logging, level.upper()), logging.WARNING),
        format='{"time": "%(asctime)s", "level": "%(levelname)s", "logger": "%(name)s", "event": "%(message)s"}',
        stream=sys.stderr,
        force=True,
    )


def logger(**context: object) -> structlog.stdlib.BoundLogger:
    """A logger with context bound to it, e.g. batch, role, model."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(**context))
