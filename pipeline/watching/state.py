"""What the watcher keeps in Redis, and the one step in which it changes (redis/lua/watching/watched.lua).

A round reads the oldest observations and the states they touch, and writes back what has changed, in one script that
refuses a watcher whose lease was taken over. Nothing is kept in a process between two rounds, so any worker may do the
next one, and a Redis that lost its last seconds lost observations and states of the same moments.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import msgpack
import polars as pl
import redis

from pipeline.drain.templates import unpack_template
from pipeline.errors import BadPayload, TooNew
from pipeline.logs import logger
from pipeline.records.schema import pack_frame, unpack_frame
from pipeline.redis.connection import answering, byte_map, text_map
from pipeline.redis.keys import Keys
from pipeline.redis.leases import WATCH
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings
from pipeline.watching.observation import Lane, Observation
from pipeline.watching.rates.minute_counts import MinuteCounts
from pipeline.watching.sessions.history import SessionHistory
from pipeline.watching.sessions.open_sessions import OpenSession, split_name
from pipeline.watching.view import LOST, Changes, View

T = TypeVar("T")

LANES: Final = tuple(Lane)
# Batches in flight that are looked at, those due first: they wait longest. Reading one takes 15 us.
LOOKED_AT: Final = 2_000


class WatcherState:
    """One per process."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)

    def snapshot(self, most: int, most_events: int) -> View:
        """The oldest `most` observations, fewer where they have more events of sessions than that, but one at least; and
        what every round needs. Raises RedisUnavailable."""
        k = self.keys
        # What is in flight is read first: what is stored meanwhile is in the list, and at worst seen as both.
        with answering():
            seconds, micros = self.client.time()
            in_flight = self._in_flight()
            pipe = self.client.pipeline(transaction=True)
            pipe.hgetall(k.watching())
            pipe.lrange(k.watching("observations"), 0, most - 1)
            pipe.llen(k.watching("observations"))
            pipe.hlen(k.watching("sessions"))
            pipe.hlen(k.watching("pasts"))
            pipe.hgetall(k.watching("pulses"))
            numbers, blobs, size, sessions, pasts, pulses = pipe.execute()
        known = text_map(numbers)
        observed: list[Observation] = []
        read = events = 0
        for blob in blobs:
            seen = _read(blob)
            events += 0 if seen is None else seen.events.height
            if read and events > most_events:
                break
            read += 1
            if seen is not None:
                observed.append(seen)
        return View(
            now_ms=seconds * 1000 + micros // 1000,
            in_flight=in_flight,
            head=int(known.get("head", 0)),
            unread=size - read,
            observed=observed,
            read=read,
            newest=hashlib.sha1(blobs[read - 1], usedforsecurity=False).hexdigest() if read else "",
            round=known.get("round", ""),
            open=sessions,
            events=int(known.get("events", 0)),
            histories=pasts,
            history_events=int(known.get("past_events", 0)),
            lost_ms={name[len(LOST) :]: int(at) for name, at in known.items() if name.startswith(LOST)},
            incidents_ms=int(known.get("incidents_ms", 0)),
            minute_counts={
                name.decode(): pulse
                for name, blob in byte_map(pulses).items()
                if (pulse := _pulse(name.decode(), blob)) is not None
            },
        )

    def _in_flight(self) -> dict[Lane, int]:
        ids = self.client.zrange(self.keys.due, 0, LOOKED_AT - 1)
        pipe = self.client.pipeline(transaction=False)
        for batch_id in cast("list[bytes]", ids):
            pipe.hmget(self.keys.batch(batch_id.decode()), "accepted_ms", "kind", "backfill")
        # Those that will be scored again and are not sent yet come after those that are.
        pipe.zrange(self.keys.warming, 0, 0, withscores=True)
        *entries, warming = pipe.execute()
        oldest: dict[Lane, int] = {}
        for accepted, kind, backfill in entries:
            if accepted is not None:
                lane = Lane.BACKFILL if backfill == b"1" else Lane.FRESH
                lane = Lane.RESCORED if kind == b"rescore" else lane
                oldest[lane] = min(oldest.get(lane, int(accepted)), int(accepted))
        if Lane.RESCORED in oldest and warming:
            oldest[Lane.RESCORED] = min(oldest[Lane.RESCORED], int(warming[0][1]))
        return oldest

    def sessions(self, names: Sequence[str]) -> dict[str, OpenSession]:
        """Those of these that are open; a damaged one is as if it were not. Raises RedisUnavailable."""
        return self._read("sessions", names, lambda name, blob: OpenSession.unpack(*split_name(name), blob))

    def due(self, until_ms: Mapping[Lane, int], most: int) -> list[str]:
        """Sessions that close by then, per lane; those due first. Raises RedisUnavailable."""
        with answering():
            pipe = self.client.pipeline(transaction=False)
            for lane in LANES:
                key = self.keys.watching("idle", lane.value)
                pipe.zrangebyscore(key, "-inf", until_ms[lane], start=0, num=most)
            found = pipe.execute()
        return [name.decode() for names in found for name in names]

    def longest_idle(self, most: int) -> list[str]:
        """Raises RedisUnavailable."""
        with answering():
            pipe = self.client.pipeline(transaction=False)
            for lane in LANES:
                pipe.zrange(self.keys.watching("idle", lane.value), 0, most - 1, withscores=True)
            found = pipe.execute()
        by_time = sorted((at, name) for names in found for name, at in names)
        return [name.decode() for _, name in by_time[:most]]

    def histories(self, names: Sequence[str]) -> dict[str, SessionHistory]:
        """Those of these that are kept; a damaged one is as if it were not. Raises RedisUnavailable."""
        return self._read("pasts", names, lambda _, blob: SessionHistory.unpack(blob))

    def _read(self, what: str, names: Sequence[str], unpack: Callable[[str, bytes], T]) -> dict[str, T]:
        """Those of these that a hash has and that can be read. Raises RedisUnavailable."""
        if not names:
            return {}
        with answering():
            blobs = cast("list[bytes | None]", self.client.hmget(self.keys.watching(what), list(names)))
        found = {}
        for name, blob in zip(names, blobs, strict=True):
            if blob is not None:
                try:
                    found[name] = unpack(name, blob)
                except BadPayload as exc:
                    logger().warning("watch.damaged", what=what.removesuffix("s"), why=str(exc))
        return found

    def expired(self, until_ms: int, most: int) -> list[str]:
        """Names of which the past is kept for long enough by then, at most `most`. Raises RedisUnavailable."""
        key = self.keys.watching("past_due")
        with answering():
            found = self.client.zrangebyscore(key, "-inf", until_ms, start=0, num=most)
        return [name.decode() for name in cast("list[bytes]", found)]

    def oldest_histories(self, most: int) -> list[str]:
        """Names of those that are forgotten first. Raises RedisUnavailable."""
        with answering():
            found = self.client.zrange(self.keys.watching("past_due"), 0, most - 1)
        return [name.decode() for name in cast("list[bytes]", found)]

    def rates(self, workloads: Sequence[str]) -> dict[str, bytes]:
        """Their states, as far as there are any. Raises RedisUnavailable."""
        if not workloads:
            return {}
        with answering():
            blobs = cast(
                "list[bytes | None]", self.client.hmget(self.keys.watching("rates"), list(workloads))
            )
        return {name: blob for name, blob in zip(workloads, blobs, strict=True) if blob is not None}

    def incidents(self) -> bytes | None:
        """Raises RedisUnavailable."""
        with answering():
            return cast("bytes | None", self.client.get(self.keys.watching("incidents")))

    def texts(self, template_ids: Iterable[int]) -> dict[int, str]:
        """Templates in words, as far as they are known. Raises RedisUnavailable."""
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
                    continue  # a newer build knows its words
        return found

    def change(self, changes: Changes, *, token: int) -> bool:
        """All of it at once; False when the lease is another's or Redis is not as it was read: nothing was changed. Raises RedisUnavailable."""
        k = self.keys
        names = (
            "observations",
            "",
            "sessions",
            "pulses",
            "rates",
            "incidents",
            "outbox",
            "pasts",
            "past_due",
        )
        keys = [k.lease(WATCH), *(k.watching(*([name] if name else [])) for name in names)]
        keys += [k.watching("idle", lane.value) for lane in LANES]
        sessions = [
            x
            for name, (session, due_ms) in changes.sessions.items()
            for x in (name, LANES.index(session.lane) + 1, due_ms, session.pack())
        ]
        pasts = [x for name, (past, due_ms) in changes.histories.items() for x in (name, due_ms, past.pack())]
        pulses = [x for name, pulse in changes.minute_counts.items() for x in (name, pulse.pack())]
        rates = [x for name, blob in changes.rates.items() for x in (name, blob)]
        numbers = [x for name, value in changes.numbers.items() for x in (name, value)]
        args: list[Any] = [token, changes.head, changes.incidents]
        args += [changes.after, uuid.uuid4().int >> 66, changes.newest]
        args += [len(changes.sessions), *sessions, len(changes.over), *changes.over]
        args += [
            len(changes.histories),
            *pasts,
            len(changes.forgotten_histories),
            *changes.forgotten_histories,
        ]
        args += [len(changes.minute_counts), *pulses, len(changes.rates), *rates]
        args += [len(changes.forgotten), *changes.forgotten, len(changes.rows)]
        args += [pack_entry(*entry) for entry in changes.rows]
        args += [len(changes.numbers), *numbers]
        return bool(self.scripts.run("watching/watched", keys, args))

    def rest(self, seconds: float) -> None:
        """No rounds for so long. Raises RedisUnavailable."""
        with answering():
            self.client.set(self.keys.watching("rests"), "1", px=round(seconds * 1000))

    def rests(self) -> bool:
        """Whether a round hung lately. Raises RedisUnavailable."""
        with answering():
            return bool(self.client.exists(self.keys.watching("rests")))

    def outbox(self) -> list[bytes]:
        """Rows that no sink has yet, oldest first, as `unpack_entry` reads them. Raises RedisUnavailable."""
        with answering():
            return cast("list[bytes]", self.client.lrange(self.keys.watching("outbox"), 0, -1))

    def delivered(self, entry: bytes) -> None:
        """Every sink has these rows. May be said twice. Raises RedisUnavailable."""
        with answering():
            self.client.lrem(self.keys.watching("outbox"), 1, entry)  # type: ignore[arg-type]


def pack_entry(batch_id: str, workload: str, rows: pl.DataFrame) -> bytes:
    """Rows on their way to the sinks."""
    return bytes(msgpack.packb([batch_id, workload, pack_frame(rows)]))


def unpack_entry(blob: bytes) -> tuple[str, str, pl.DataFrame]:
    """(batch id, workload, rows). Raises BadPayload."""
    try:
        batch_id, workload, rows = msgpack.unpackb(blob)
        return str(batch_id), str(workload), unpack_frame(rows)
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        raise BadPayload(f"rows of the watcher are not readable: {exc}") from exc


def _read(blob: bytes) -> Observation | None:
    try:
        return Observation.unpack(blob)
    except BadPayload as exc:
        logger().warning("watch.damaged", what="observation", why=str(exc))
        return None


def _pulse(workload: str, blob: bytes) -> MinuteCounts | None:
    try:
        return MinuteCounts.unpack(blob)
    except BadPayload as exc:
        logger(workload=workload).warning("watch.damaged", what="pulse", why=str(exc))
        return None
