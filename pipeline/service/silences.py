"""Silences: incidents of some causes are shown apart until a time, as during maintenance.

A mark says *normal*, and a silence says *not now*. Lines are scored and stored, incidents are grouped and
kept, and nothing is taken out of any answer: only the state of an incident is another one. Silences lie in
Redis, so every machine goes by them at once.
"""

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import redis

from pipeline.controller.watchlist import check_pattern, covers
from pipeline.errors import BadInput, NotFound
from pipeline.records.batch import utc_now
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.service.access.audit import record_change
from pipeline.service.questions import template_number
from pipeline.service.values import CauseView, IncidentState, SilenceView
from pipeline.settings import Settings
from pipeline.units import span

MOST_SILENCES: Final = 200
MAX_SILENCE: Final = timedelta(days=90)
MAX_REASON: Final = 500
SHOWN_FOR: Final = timedelta(days=7)  # after its end
# A silence does not undo what somebody has settled.
_SETTLED: Final = (IncidentState.RESOLVED, IncidentState.SNOOZED)


class SilenceCover:
    """The silences that hold at a moment. Each cause is looked up once, in however many incidents it is."""

    def __init__(self, silences: Iterable[SilenceView], now: datetime) -> None:
        self._holding = [one for one in silences if one.until > now]
        self._found: dict[tuple[str, str | None], tuple[str, ...]] = {}

    def of_cause(self, workload: str, mark: str | None) -> tuple[str, ...]:
        """The ids of those that cover a cause. `mark`: how `logweir mark` names it."""
        key = (workload, mark)
        if key not in self._found:
            self._found[key] = tuple(one.id for one in self._holding if _covers(one, workload, mark))
        return self._found[key]

    def state_of(self, state: IncidentState, causes: Sequence[CauseView]) -> tuple[IncidentState, list[str]]:
        """The state of an incident with these causes, and the ids of the silences that cover some of them.

        Only an incident whose causes are all covered is silenced. The causes that it lists decide, which are
        its most urgent ones."""
        covered = [self.of_cause(cause.workload, cause.mark) for cause in causes]
        if all(covered) and state not in _SETTLED:
            state = IncidentState.SILENCED
        return state, sorted({name for names in covered for name in names})


def _covers(one: SilenceView, workload: str, mark: str | None) -> bool:
    return (
        covers([one.workload], workload)
        and (one.template is None or one.template == mark)
        and (not one.service or covers([one.service], workload.rpartition("/")[2]))
    )


def read_silences(client: "redis.Redis", settings: Settings, now: datetime) -> list[SilenceView]:
    """Those that hold and those that ended lately, the one that ends last first. Raises RedisUnavailable."""
    with answering():
        raw = text_map(client.hgetall(Keys(settings.redis.key_prefix).silences))
    found = [_view(name, json.loads(entry), now) for name, entry in raw.items()]
    return sorted(found, key=lambda one: (one.until, one.id), reverse=True)


def put_silence(
    client: "redis.Redis",
    settings: Settings,
    workload: str,
    *,
    lasts: str,
    why: str,
    by: str,
    template: str | None = None,
    service: str = "",
) -> SilenceView:
    """A new silence. `lasts`: 15m, 2h, 7d. Raises BadInput, RedisUnavailable."""
    now, key = utc_now(), Keys(settings.redis.key_prefix).silences
    check_pattern(workload)
    if service and (check_pattern(service) and "/" in service):
        raise BadInput(f"service {service[:60]!r} has a slash; write the last part of a name, such as cart")
    why = why.strip()
    if not why or len(why) > MAX_REASON or not why.isprintable():
        raise BadInput(f"a silence needs a reason of at most {MAX_REASON} characters; others will ask for it")
    silence = SilenceView(
        id=secrets.token_hex(4),
        workload=workload,
        template=None if template is None else f"T{template_number(template, flag='the template')}",
        service=service,
        until=now + _length(lasts),
        why=why,
        by=by,
        at=now,
    )
    known = read_silences(client, settings, now)
    old = [one.id for one in known if one.until + SHOWN_FOR < now]
    if len(known) - len(old) >= MOST_SILENCES:
        raise BadInput(f"there are {MOST_SILENCES:,} silences, the limit; end some, or use wildcards")
    with answering():
        pipe = client.pipeline(transaction=True)
        if old:
            pipe.hdel(key, *old)
        pipe.hset(key, silence.id, json.dumps(_stored_fields(silence)))
        pipe.execute()
    record_change(
        client, settings, by=by, action="silence.begin", target=silence.id, workload=workload,
        template=silence.template, service=service, until=silence.until, why=why,
    )  # fmt: skip
    return silence


def end_silence(client: "redis.Redis", settings: Settings, name: str, *, by: str) -> SilenceView:
    """Ends one by its id, or the beginning of it: it ends now, and is still shown for a week.

    Raises BadInput, NotFound, RedisUnavailable."""
    now = utc_now()
    found = [one for one in read_silences(client, settings, now) if one.id.startswith(name)] if name else []
    if len(found) != 1:
        raise NotFound(
            f"{len(found) or 'no'} silence{'s' * (len(found) > 1)} {'begin' if found else 'has an id that begins'} "
            f"with {name[:40]!r}; `logweir silence --list` shows them"
        )
    silence = replace(found[0], until=min(found[0].until, now), expired=True)
    with answering():
        client.hset(Keys(settings.redis.key_prefix).silences, silence.id, json.dumps(_stored_fields(silence)))
    record_change(client, settings, by=by, action="silence.end", target=silence.id, workload=silence.workload)
    return silence


def _length(lasts: str) -> timedelta:
    try:
        length = span(lasts.strip())
    except OverflowError:
        length = None
    if not length or length > MAX_SILENCE:
        raise BadInput(
            f"{lasts[:40]!r} is no length of a silence; write 15m, 2h or 7d, at most {MAX_SILENCE.days}d"
        )
    return length


def _stored_fields(silence: SilenceView) -> dict[str, Any]:
    kept = asdict(silence)
    for computed in ("id", "expired", "incidents"):
        del kept[computed]
    return kept | {"until": silence.until.isoformat(), "at": silence.at.isoformat()}


def _view(name: str, entry: dict[str, Any], now: datetime) -> SilenceView:
    until, at = (datetime.fromisoformat(entry.pop(field)).astimezone(UTC) for field in ("until", "at"))
    return SilenceView(id=name, until=until, at=at, expired=until <= now, **entry)
