"""The watcher's state in Redis, and the one step in which it changes (redis/lua/watching/watched.lua).

A round reads the oldest observations and the states that they touch, and writes all its changes in one
script. The script refuses a watcher whose lease was taken over, or whose states are not those of the last
round. Any worker may do the next round: a process that did the last one keeps some of its states (memory.py),
and another one reads them. A Redis that lost its last seconds lost observations and states of the same
moments.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

import msgspec
import polars as pl
import redis

from pipeline.drain.templates import unpack_template
from pipeline.errors import BadPayload, TooNew
from pipeline.ledger.in_flight import BACKFILL, FRESH, RESCORED, OldestInFlight
from pipeline.logs import logger
from pipeline.records.schema import pack_frame, unpack_frame
from pipeline.records.wire import Codec
from pipeline.redis.arguments import named_arguments_with_bytes
from pipeline.redis.connection import answering, byte_map, text_map
from pipeline.redis.keys import Keys
from pipeline.redis.leases import WATCH
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings
from pipeline.watching.incidents.starts import says_start
from pipeline.watching.memory import RoundMemory
from pipeline.watching.observation import Lane, Observation
from pipeline.watching.rates.minute_counts import MinuteCounts
from pipeline.watching.sessions.growing import GrowingSession
from pipeline.watching.sessions.history import SessionHistory
from pipeline.watching.sessions.keys import KINDS, model_name
from pipeline.watching.sessions.open_sessions import OpenSession, split_name
from pipeline.watching.view import LOST, UNKEPT, Changes, View

T = TypeVar("T")
V = TypeVar("V", int, bytes)

LANES: Final = tuple(Lane)
_LANE_OF: Final = {FRESH: Lane.FRESH, BACKFILL: Lane.BACKFILL, RESCORED: Lane.RESCORED}
# Of the observations of a round, the first of them apart: as many as 16 large batches have. A row of rates
# takes the watcher 1 us. An event of a session takes more, and has a bound of its own.
MAX_ROWS: Final = 50_000
MAX_BYTES: Final = 4 << 20
# Anomalous templates of them. Each is an event of incidents, which remember the ids of 16,384.
MAX_ANOMALIES: Final = 3_200
# So many bytes of observations, and so many for each event that a round may take, are read for it. An event
# takes about 7, and up to 16 where each has a session of its own; what is read in vain is read again.
_ROUND_BYTES: Final = 128 << 10
_EVENT_BYTES: Final = 12
MOST_STARTING: Final = 100_000  # templates of which a process knows whether they are of a start
_KEYS: Final = (
    "observations", "", "sessions", "pulses", "rates", "incidents", "outbox", "pasts", "past_due",
    "numbers", "daily", "left_out",
)  # fmt: skip


class RoundWire(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of watched.lua. Lua's numbers are doubles, so ids of 64 bits travel as text."""

    token: str
    head: int  # Observations ever taken from the list, with those of this round.
    newest: str  # SHA-1 of the newest observation that the round read, "" for none.
    after: str  # Name of the round that was the last one when this one read, "" for none.
    name: str  # Of this round.
    incidents: bytes  # B"" leaves them as they are.
    # Of open sessions: names and states by turns, and for each lane times (ms) of closing and names by turns.
    sessions: list[str | bytes]
    due: list[list[int | str]]
    moved: list[list[str]]  # names of sessions that leave a lane, for each lane
    new: int  # sessions of them that Redis does not have
    closed: list[str]
    histories: list[str | bytes]  # names and states by turns
    histories_due: list[int | str]  # times (ms) of expiry and names by turns
    forgotten_histories: list[str]
    # Workloads and states by turns, as of one HSET.
    minute_counts: list[str | bytes]
    rates: list[str | bytes]
    distributions: list[str | bytes]
    daily: list[str | bytes]
    left_out: list[str | bytes]
    forgotten: list[str]  # workloads
    forgotten_times: list[str]  # fields of `watching` that are theirs
    events: list[tuple[str, str, str]]  # (type, subject, JSON) for others to follow
    rows: list[bytes]
    numbers: list[str | int]  # fields of `watching` and their values by turns
    grown: list[str | int]  # fields of `watching` and what to add to them by turns


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """Rows on their way to the sinks."""

    batch_id: str
    workload: str
    rows: bytes


_ENTRIES: Final = Codec(_Entry, version=1, what="rows of the watcher", newer=BadPayload)


class WatcherState:
    """One per process. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.batches = OldestInFlight(client, self.keys)
        self.damaged = 0  # observations and states of the last snapshot and since that nobody can read
        self._starting: dict[int, bool] = {}  # whether the template is one of a start
        self._memory: RoundMemory | None = None

    def snapshot(self, limit: int, most_events: int) -> View:
        """The state, with the oldest `limit` observations; fewer if these have more events, rows or
        anomalies, or more than about MAX_BYTES, at least one."""
        k = self.keys
        memory, self._memory = self._memory, None
        self.damaged = 0
        # Batches in flight are read first: a batch that is stored meanwhile is at worst in both.
        with answering():
            pipe = self.client.pipeline(transaction=False)
            pipe.time()
            pipe.hmget(k.watching(), "bytes", "round")
            pipe.llen(k.watching("observations"))
            (seconds, micros), (stored_bytes, last), count = pipe.execute()
            if memory is not None and (last or b"").decode() != memory.round:
                memory = None
            in_flight = self._in_flight()
            # So many observations of the mean size have these bytes.
            most_bytes = min(MAX_BYTES, _ROUND_BYTES + _EVENT_BYTES * most_events)
            limit = max(1, min(limit, most_bytes * int(count) // max(1, int(stored_bytes or 0))))
            pipe = self.client.pipeline(transaction=True)
            pipe.hgetall(k.watching())
            pipe.lrange(k.watching("observations"), 0, limit - 1)
            pipe.llen(k.watching("observations"))
            pipe.hlen(k.watching("sessions"))
            pipe.hlen(k.watching("pasts"))
            numbers, blobs, size, sessions, histories = pipe.execute()
        stored = text_map(numbers)
        # A round of another process that came between is refused or found in the step that changes.
        if memory is not None and stored.get("round", "") != memory.round:
            memory = None
        counts = None if memory is None else memory.minute_counts
        observed: list[Observation] = []
        read = events = rows = anomalies = 0
        for blob in blobs:
            observation = self._readable("observation", Observation.unpack, blob)
            if observation is not None:
                events += observation.events.height
                rows += observation.rows
                anomalies += observation.anomalies.height
            if read and (events > most_events or rows > MAX_ROWS or anomalies > MAX_ANOMALIES):
                break
            read += 1
            if observation is not None:
                observed.append(observation)
        return View(
            now_ms=seconds * 1000 + micros // 1000,
            in_flight=in_flight,
            head=int(stored.get("head", 0)),
            unread=size - read,
            observed=observed,
            read=read,
            newest=hashlib.sha1(blobs[read - 1], usedforsecurity=False).hexdigest() if read else "",
            round=stored.get("round", ""),
            open=sessions,
            events=int(stored.get("events", 0)),
            histories=histories,
            history_events=int(stored.get("past_events", 0)),
            lost_ms=_times(LOST, stored),
            unkept_ms=_times(UNKEPT, stored),
            incidents_ms=int(stored.get("incidents_ms", 0)),
            minute_counts=self._minute_counts() if counts is None else counts,
            incidents=None if memory is None else memory.incidents,
            sessions={} if memory is None else memory.sessions,
        )

    def _minute_counts(self) -> dict[str, MinuteCounts]:
        with answering():
            pulses = byte_map(self.client.hgetall(self.keys.watching("pulses")))
        found = {
            name.decode(): self._readable("pulse", MinuteCounts.unpack, blob, workload=name.decode())
            for name, blob in pulses.items()
        }
        return {name: counts for name, counts in found.items() if counts is not None}

    def _in_flight(self) -> dict[Lane, int]:
        oldest = {_LANE_OF[lane]: at_ms for lane, at_ms in self.batches.oldest().items()}
        if Lane.RESCORED in oldest:
            # Batches that will be scored again and are not sent yet come after those that are.
            with answering():
                warming = self.client.zrange(self.keys.warming, 0, 0, withscores=True)
            for _, at_ms in cast("list[tuple[bytes, float]]", warming):
                oldest[Lane.RESCORED] = min(oldest[Lane.RESCORED], int(at_ms))
        return oldest

    def sessions(self, names: Sequence[str]) -> dict[str, OpenSession]:
        """The open ones of these; a damaged one counts as not open."""
        return self.whole(self.growing(names))

    def growing(
        self, names: Sequence[str], kept: Mapping[str, GrowingSession] = MappingProxyType({})
    ) -> dict[str, GrowingSession]:
        """The open ones of these, their events unread; a damaged one counts as not open. `kept`: those that
        are not read again."""
        unread = [name for name in names if name not in kept] if kept else names
        read = self._read(
            "sessions", unread, lambda name, blob: GrowingSession.unpack(*split_name(name), blob)
        )
        found = ((name, kept.get(name) or read.get(name)) for name in names) if kept else read.items()
        return {name: session for name, session in found if session is not None}

    def whole(self, sessions: Mapping[str, GrowingSession]) -> dict[str, OpenSession]:
        """These sessions with their events, without damaged ones."""
        found = {name: self._readable("session", OpenSession.of, one) for name, one in sessions.items()}
        return {name: session for name, session in found.items() if session is not None}

    def histories(self, names: Sequence[str]) -> dict[str, SessionHistory]:
        """Of these sessions; a damaged one counts as missing."""
        return self._read("pasts", names, lambda _, blob: SessionHistory.unpack(blob))

    def _read(self, field: str, names: Sequence[str], unpack: Callable[[str, bytes], T]) -> dict[str, T]:
        found = {}
        for name, blob in self._blobs(field, names).items():
            value = self._readable(field.removesuffix("s"), unpack, name, blob)
            if value is not None:
                found[name] = value
        return found

    def _readable(self, kind: str, unpack: Callable[..., T], *args: Any, **context: str) -> T | None:
        """None, and a warning, for a damaged value."""
        try:
            return unpack(*args)
        except BadPayload as exc:
            logger(**context).warning("watch.damaged", what=kind, why=str(exc))
            self.damaged += 1
            return None

    def _blobs(self, field: str, names: Sequence[str]) -> dict[str, bytes]:
        if not names:
            return {}
        with answering():
            blobs = cast("list[bytes | None]", self.client.hmget(self.keys.watching(field), list(names)))
        return {name: blob for name, blob in zip(names, blobs, strict=True) if blob is not None}

    def due(self, until_ms: Mapping[Lane, int], limit: int) -> list[str]:
        """Sessions that close by then, per lane; those due first."""
        with answering():
            pipe = self.client.pipeline(transaction=False)
            for lane in LANES:
                key = self.keys.watching("idle", lane.value)
                pipe.zrangebyscore(key, "-inf", until_ms[lane], start=0, num=limit)
            found = pipe.execute()
        return [name.decode() for names in found for name in names]

    def longest_idle(self, limit: int) -> list[str]:
        """Sessions that close first, over all lanes."""
        with answering():
            pipe = self.client.pipeline(transaction=False)
            for lane in LANES:
                pipe.zrange(self.keys.watching("idle", lane.value), 0, limit - 1, withscores=True)
            found = pipe.execute()
        by_time = sorted((at, name) for names in found for name, at in names)
        return [name.decode() for _, name in by_time[:limit]]

    def expired(self, until_ms: int, limit: int) -> list[str]:
        """Sessions whose histories expire by then, at most `limit`."""
        key = self.keys.watching("past_due")
        with answering():
            found = self.client.zrangebyscore(key, "-inf", until_ms, start=0, num=limit)
        return [name.decode() for name in cast("list[bytes]", found)]

    def oldest_histories(self, limit: int) -> list[str]:
        """Sessions whose histories expire first."""
        with answering():
            found = self.client.zrange(self.keys.watching("past_due"), 0, limit - 1)
        return [name.decode() for name in cast("list[bytes]", found)]

    def rates(self, workloads: Sequence[str]) -> dict[str, bytes]:
        """The states of the rates of these workloads."""
        return self._blobs("rates", workloads)

    def distributions(self, workloads: Sequence[str]) -> dict[str, bytes]:
        """The states of the numbers of these workloads."""
        return self._blobs("numbers", workloads)

    def daily(self, workloads: Sequence[str]) -> dict[str, bytes]:
        """The templates of these workloads that come every day."""
        return self._blobs("daily", workloads)

    def incidents(self) -> bytes | None:
        """The state of incidents."""
        with answering():
            return cast("bytes | None", self.client.get(self.keys.watching("incidents")))

    def texts(self, template_ids: Iterable[int]) -> dict[int, str]:
        """The texts of these templates; unknown ones are missing, as are those of a newer build."""
        wanted = sorted(set(template_ids))
        if not wanted:
            return {}
        with answering():
            blobs = self.client.hmget(self.keys.templates, [str(x) for x in wanted])
        found = {}
        for template_id, blob in zip(wanted, cast("list[bytes | None]", blobs), strict=True):
            if blob is not None:
                try:
                    found[template_id] = unpack_template(template_id, blob).text
                except (BadPayload, TooNew):
                    continue
        return found

    def starting(self, template_ids: Set[int]) -> set[int]:
        """Of these templates the ones whose texts are of a program that starts. A process asks for each
        once."""
        if len(self._starting) > MOST_STARTING:
            self._starting.clear()
        unknown = template_ids - self._starting.keys()
        if unknown:
            self._starting |= {one: says_start(text) for one, text in self.texts(unknown).items()}
        return {one for one in template_ids if self._starting.get(one)}

    def change(self, changes: Changes, *, token: int, view: View | None = None) -> bool:
        """Write all changes in one step. False, without a change, after a takeover or a loss in Redis.

        `view`: the state before, of which this process then keeps what the changes made of it."""
        keys = [self.keys.lease(WATCH), *(self.keys.watching(*([name] if name else [])) for name in _KEYS)]
        keys += [self.keys.events, *(self.keys.watching("idle", lane.value) for lane in LANES)]
        wire = RoundWire(
            token=str(token),
            head=changes.head,
            newest=changes.newest,
            after=changes.after,
            name=str(uuid.uuid4().int >> 66),
            incidents=changes.incidents,
            **_by_lane(changes.sessions),
            closed=list(changes.over),
            histories=_by_turns({name: history.pack() for name, (history, _) in changes.histories.items()}),
            histories_due=[one for name, (_, at_ms) in changes.histories.items() for one in (at_ms, name)],
            forgotten_histories=list(changes.forgotten_histories),
            minute_counts=_by_turns({name: one.pack() for name, one in changes.minute_counts.items()}),
            rates=_by_turns(changes.rates),
            distributions=_by_turns(changes.distributions),
            daily=_by_turns(changes.daily),
            left_out=_by_turns(changes.left_out),
            forgotten=changes.forgotten,
            forgotten_times=[
                prefix + model_name(workload, kind)
                for workload in changes.forgotten
                for kind in ("", *KINDS)
                for prefix in (LOST, UNKEPT)
            ],
            events=changes.events,
            rows=[pack_entry(*entry) for entry in changes.rows],
            numbers=_by_turns(changes.numbers),
            grown=_by_turns(changes.grown),
        )
        changed = bool(self.scripts.run("watching/watched", keys, [named_arguments_with_bytes(wire)]))
        if changed and view is not None:
            self._memory = RoundMemory.after(view, changes, wire.name)
        return changed

    def pause(self, seconds: float) -> None:
        """No rounds for so long, because one hung."""
        with answering():
            self.client.set(self.keys.watching("rests"), "1", px=round(seconds * 1000))

    def paused(self) -> bool:
        """Whether `pause` holds."""
        with answering():
            return bool(self.client.exists(self.keys.watching("rests")))

    def outbox(self) -> list[bytes]:
        """Rows that are not in every sink yet, oldest first, as `unpack_entry` reads them."""
        with answering():
            return cast("list[bytes]", self.client.lrange(self.keys.watching("outbox"), 0, -1))

    def delivered(self, entry: bytes, *, lost: int = 0) -> None:
        """Every sink has these rows, or never will: then so many findings are `lost`. Idempotent."""
        with answering():
            pipe = self.client.pipeline(transaction=True)
            pipe.lrem(self.keys.watching("outbox"), 1, entry)  # type: ignore[arg-type]
            if lost:
                pipe.hincrby(self.keys.watching(), "failed", lost)
            pipe.execute()


def _times(prefix: str, stored: Mapping[str, str]) -> dict[str, int]:
    """The times of the fields with this prefix, by the names of session models."""
    return {name.removeprefix(prefix): int(at) for name, at in stored.items() if name.startswith(prefix)}


def pack_entry(batch_id: str, workload: str, rows: pl.DataFrame) -> bytes:
    """Rows on their way to the sinks."""
    return _ENTRIES.pack(_Entry(batch_id, workload, pack_frame(rows)))


def unpack_entry(blob: bytes) -> tuple[str, str, pl.DataFrame]:
    """(batch id, workload, rows). Raises BadPayload."""
    entry = _ENTRIES.unpack(blob)
    return entry.batch_id, entry.workload, unpack_frame(entry.rows)


def _by_turns(fields: Mapping[str, V]) -> list[str | V]:
    """Each key with its value behind it."""
    return [one for pair in fields.items() for one in pair]


def _by_lane(sessions: Mapping[str, tuple[GrowingSession | OpenSession, int]]) -> dict[str, Any]:
    """The fields of RoundWire that tell of open sessions."""
    states: list[str | bytes] = []
    due: list[list[int | str]] = [[] for _ in LANES]
    moved: list[list[str]] = [[] for _ in LANES]
    places = {lane: place for place, lane in enumerate(LANES)}
    new = 0
    for name, (session, due_ms) in sessions.items():
        states += (name, session.pack())
        due[places[session.lane]] += (due_ms, name)
        new += session.was is None
        if session.was is not None and session.was is not session.lane:
            moved[places[session.was]].append(name)
    return {"sessions": states, "due": due, "moved": moved, "new": new}
