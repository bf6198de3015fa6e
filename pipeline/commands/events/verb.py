"""`logweir events`: what has happened, the oldest first, and with --follow what happens."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from pipeline.commands.common import err, out, print_json, printable, reading, redis_explained
from pipeline.errors import BadInput, RedisUnavailable, SourceUnavailable
from pipeline.observe.events import CloudEvent, EventPage, check_event_types
from pipeline.records.batch import utc_now
from pipeline.service.questions import asked_event

if TYPE_CHECKING:
    from pipeline.service.reading import PipelineReader

PAGE: Final = 500
NEWEST: Final = 50
POLL_S: Final = 1.0
VALUE_CHARS: Final = 200


def main(args: argparse.Namespace) -> int:
    types = args.type or []
    check_event_types(types)
    since = asked_event(args.since, utc_now(), flag="--since")
    at = reading(args)
    if args.follow:
        if args.limit is not None:
            raise BadInput("--follow has no end; leave out --limit, or --follow")
        with redis_explained():
            for event in _following(at, since, types):
                _print_row(event, as_json=args.json)
        return 0
    with redis_explained():
        found = _all(at, since, types, args.limit)
    if found.gap:
        _note_gap()
    if args.json:
        print_json([msgspec.to_builtins(event) for event in found.events])
        return 0
    if not found.events:
        out().print("no events" + (" behind that one" if since else " yet"), markup=False)
    for event in found.events:
        _print_row(event, as_json=False)
    return 0


def _all(at: "PipelineReader", since: str | None, types: list[str], limit: int | None) -> EventPage:
    if since is None:
        return at.event_log(None, min(limit or NEWEST, PAGE), types)
    events: list[CloudEvent] = []
    last, gap = since, False
    while True:
        left = PAGE if limit is None else min(PAGE, limit - len(events))
        page = at.event_log(last, left, types)
        events += page.events
        last, gap = page.last, gap or page.gap
        if len(page.events) < left or len(events) == limit:
            return EventPage(events=events, last=last, gap=gap)


def _following(at: "PipelineReader", since: str | None, types: list[str]) -> Iterator[CloudEvent]:
    """From the newest ones on, or behind an id. A pipeline that does not answer is asked again."""
    page = at.event_log(since, PAGE if since else 10, types)
    is_away = False
    while True:
        if page.gap:
            _note_gap()
        yield from page.events
        sys.stdout.flush()
        if len(page.events) < PAGE:
            time.sleep(POLL_S)
        try:
            page = at.event_log(page.last, PAGE, types)
            is_away = False
        except (RedisUnavailable, SourceUnavailable) as exc:
            if not is_away:
                err().print(f"{exc}; waiting for it", markup=False, soft_wrap=True)
            is_away, page = True, EventPage(last=page.last)


def _note_gap() -> None:
    err().print("older events behind that one are no longer kept", style="yellow", markup=False)


def _print_row(event: CloudEvent, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        return
    facts = " ".join(
        f"{name}={_value(value)}" for name, value in event.data.items() if _is_told(event, value)
    )
    row = f"{event.id}  {event.time:%Y-%m-%d %H:%M:%S}  {event.type:<16}  {event.subject}  {facts}"
    out().print(printable(row), markup=False, soft_wrap=True)


def _is_told(event: CloudEvent, value: object) -> bool:
    return value not in ("", None, event.subject)


def _value(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    shown = text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 2] + " …"
    quoted = isinstance(value, str) and not {" ", '"'}.isdisjoint(shown)
    return json.dumps(shown, ensure_ascii=False) if quoted else shown
