"""A whole deployment in one process that can be killed at any of its outside effects, and what must hold
afterwards.

An outside effect is whatever outlives the process: a command that changes Redis, a message, a step of writing
a file. Reading changes nothing, so a crash after it is a crash before the next effect."""

import base64
import errno
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import polars as pl
import pytest
import redis
from celery import Celery
from small_bundles import ONE, written

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import RedisUnavailable
from pipeline.messages.pace import PassPace
from pipeline.messages.routing import ALL_QUEUES
from pipeline.models.evidence import Evidence
from pipeline.models.known.patterns import KNOWN_SCHEMA, KnownPatterns
from pipeline.models.threshold import calibrate
from pipeline.models.verdict import Knowledge
from pipeline.records.batch import utc_now
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import SCRIPT_DIR, script_text
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.sources.pushed import framed
from pipeline.tasks import drain, infer, ingest, periodic, store, train
from pipeline.tasks.context import Context
from pipeline.tasks.loaded import LoadedModels

MODULES: Final = {module.NAME: module for module in (ingest, infer, drain, store, train)}
# What only looks; everything else that is sent to Redis counts as an effect.
READS: Final = frozenset(
    [
        "GET",
        "GETRANGE",
        "MGET",
        "HGET",
        "HMGET",
        "HGETALL",
        "HVALS",
        "HLEN",
        "HEXISTS",
        "STRLEN",
        "ZRANGE",
        "ZREVRANGE",
        "ZRANGEBYSCORE",
        "ZCARD",
        "ZCOUNT",
        "ZSCORE",
        "SMEMBERS",
        "SISMEMBER",
        "LRANGE",
        "LLEN",
        "TIME",
        "INFO",
        "EXISTS",
        "TYPE",
        "TTL",
        "PING",
        "SCRIPT",
    ]
)
SHAS: Final = {
    hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest(): name
    for path in SCRIPT_DIR.rglob("[!_]*.lua")
    for name in [path.relative_to(SCRIPT_DIR).with_suffix("").as_posix()]
}
NO_GPUS: Final = ("gpu/sweep", "gpu/snapshot")  # there are none: these change nothing
MASKS: Final = MaskSet.load()
ROUNDS: Final = 60  # of working and sweeping; what is not done by then never ends


class Killed(BaseException):
    """The process is no more. No `except Exception` and no cleaning up helps: nothing of it gets out any
    more."""


class Fault(StrEnum):
    """What happens at the chosen effect."""

    BEFORE = "killed before"
    AFTER = "killed after"
    ANSWER = "the answer is lost"  # it was done, and whoever asked is told otherwise
    REFUSED = "refused"  # it was not done, and whoever asked is told so
    TWICE = "twice"  # it was done once more at once, and the second answer counts


@dataclass(slots=True)
class Crash:
    """Strikes at some effects, counted from 1, and remembers what they were."""

    fault: Fault
    at: tuple[int, ...] = ()
    count: int = 0
    struck: int = 0
    dead: bool = False
    seen: list[str] = field(default_factory=list)
    watch: Callable[[], None] = lambda: None

    def effect(self, what: str, do: Callable[[], Any], error: Exception) -> Any:
        if self.dead:
            raise Killed
        self.count += 1
        self.seen.append(what)
        if self.count not in self.at:
            found = do()
            self.watch()
            return found
        self.struck += 1
        if self.fault in (Fault.BEFORE, Fault.AFTER):
            self.dead = True
        if self.fault in (Fault.AFTER, Fault.ANSWER):
            do()
            self.watch()
        if self.fault is Fault.TWICE:
            do()
            self.watch()
            return do()
        raise Killed if self.dead else error

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing strikes meanwhile, and nothing is counted."""
        at, count, seen = self.at, self.count, len(self.seen)
        self.at = ()
        yield
        self.at, self.count = at, count
        del self.seen[seen:]


class Models(LoadedModels):
    """Every line surprisals the same, and no line is known."""

    def scorer(self, version: str) -> Any:
        return self

    def score(self, masked: Sequence[str]) -> list[Evidence]:
        return [Evidence(surprisal=1.0, tokens=3) for _ in masked]

    def knowledge(self, version: str) -> Knowledge:
        known = KnownPatterns(pl.DataFrame(schema=KNOWN_SCHEMA))
        return Knowledge(calibration=calibrate([], total=1), known=known)


class Process(Context):
    """A worker without a real network."""

    @cached_property
    def models(self) -> LoadedModels:
        return Models(self.registry, self.settings, self.profile)


# Everything that the deployment counts, at one moment: sums by workload, gauges, and what lies about.
SNAPSHOT: Final = """
local p = ARGV[1]
local out = { gone = {}, lines = {}, batches = 0, bytes = 0, dead_bytes = 0, stages = {}, payloads = {}, works = {}, unfinished = {} }
local function short(key, kind) return string.sub(key, #p + #kind + 3) end
for _, key in ipairs(redis.call('KEYS', p .. ':payload:*')) do out.payloads[short(key, 'payload')] = redis.call('STRLEN', key) end
for _, key in ipairs(redis.call('KEYS', p .. ':work:*')) do out.works[short(key, 'work')] = 1 end
for _, key in ipairs(redis.call('KEYS', p .. ':batch:*')) do
  local b = redis.call('HMGET', key, 'state', 'lines', 'workload', 'kind', 'bytes', 'shares')
  local function count(word)
    if b[4] == 'rescore' then return end
    for name, lines in pairs(b[6] and cjson.decode(b[6]) or { [b[3]] = b[2] }) do
      out.lines[name] = out.lines[name] or { flight = 0, dead = 0 }
      out.lines[name][word] = out.lines[name][word] + lines
    end
  end
  if b[1] == 'dead' then
    count('dead')
    out.dead_bytes = out.dead_bytes + b[5]
  elseif b[1] ~= 'done' and b[1] ~= 'split' then
    count('flight')
    out.batches, out.bytes = out.batches + 1, out.bytes + b[5]
    out.stages[b[1]] = (out.stages[b[1]] or 0) + 1
    -- What is scored again is read back from the sink.
    if b[4] ~= 'rescore' and not out.payloads[short(key, 'batch')] then out.gone[#out.gone + 1] = key end
    out.unfinished[short(key, 'batch')] = redis.call('ZSCORE', p .. ':due', short(key, 'batch')) or 'not in due'
  end
end
out.due = redis.call('ZCARD', p .. ':due')
out.in_flight = redis.call('ZCARD', p .. ':in_flight')
local function hash(key)
  local flat, map = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do map[flat[i]] = tonumber(flat[i + 1]) end
  return map
end
out.counts, out.totals = hash(p .. ':counts'), {}
for _, name in ipairs(redis.call('SMEMBERS', p .. ':workloads')) do out.totals[name] = hash(p .. ':totals:' .. name) end
return cjson.encode(out)
"""


def snapshot(client: "redis.Redis", prefix: str) -> dict[str, Any]:
    """Everything that the ledger of this prefix counts, at one moment."""
    found: dict[str, Any] = json.loads(client.eval(SNAPSHOT, 0, "{" + prefix + "}"))
    return found


def check_sums(found: dict[str, Any]) -> None:
    """Every line is counted once, every gauge is what the entries say, and every unfinished batch is looked
    after."""
    for workload, sums in found["totals"].items():
        if not sums:
            continue
        entries = found["lines"].get(workload, {"flight": 0, "dead": 0})
        ended = sum(sums.get(name, 0) for name in ("stored", "dead", "discarded", "skipped"))
        assert sums["accepted"] == ended + entries["flight"], (workload, sums, entries)
        assert sums.get("dead", 0) == entries["dead"], (workload, sums, entries)
    counts, stages = found["counts"], found["stages"] or {}
    assert (counts.get("batches", 0), counts.get("bytes", 0)) == (found["batches"], found["bytes"]), found
    assert counts.get("dead_bytes", 0) == found["dead_bytes"], found
    gauges = {name.removeprefix("stage:"): n for name, n in counts.items() if name.startswith("stage:") and n}
    assert gauges == (stages or {}), found
    unfinished = found["unfinished"] or {}
    assert "not in due" not in unfinished.values(), unfinished
    assert found["due"] == found["in_flight"] == len(unfinished), found
    assert not found["gone"], found


class World:
    """One deployment under a key prefix and a directory of its own. `now` is the process that runs at
    present."""

    def __init__(self, app: Celery, settings: Settings, crash: Crash, *, redeliver: bool) -> None:
        self.app, self.settings, self.crash = app, settings, crash
        self.redeliver = redeliver  # a message whose worker was killed comes again; else it is lost
        self.plain = redis.Redis.from_url(str(settings.redis.url))
        self.started = utc_now()  # a source that reads again says the same
        self.keys = Keys(self.settings.redis.key_prefix)
        self.sent: Counter[str] = Counter()
        self.send_task = send = app.send_task

        def counted(task: str, *args: Any, **kwargs: Any) -> Any:
            self.sent[task] += 1
            return crash.effect(f"send {task}", lambda: send(task, *args, **kwargs), OSError("cut"))

        self.app.send_task = counted
        crash.watch = self.check_now
        self.now = self._start()

    def _start(self) -> Process:
        process = Process(self.app, self.settings)
        process.__dict__["masks"] = MASKS  # reading them takes longer than everything else here
        process.pace = PassPace(sleep=lambda _: None)  # nothing comes meanwhile
        process.__dict__["client"] = crashing(str(self.settings.redis.url), self.crash)
        return process

    def close(self) -> None:
        self.app.send_task = self.send_task
        prefix = self.settings.redis.key_prefix
        names = [*self.plain.keys("{" + prefix + "}*"), *self.plain.keys(prefix + "*")]
        if names:
            self.plain.delete(*names)
        self.plain.close()
        shutil.rmtree(self.settings.data.dir, ignore_errors=True)

    def model(self) -> None:
        """A model is live from now on."""
        with self.crash.off():
            written(self.now.registry, ONE)
        pointer = {"version": ONE, "generation": 1, "token": 1, "published": "", "history": json.dumps([ONE])}
        self.plain.hset(self.keys.model(), mapping=pointer)
        self.plain.sadd(self.keys.model_names, "shared")

    def act(self, do: Callable[["World"], Any]) -> Any:
        """Do it, and again by another process where this one was killed, or was told that it was not done."""
        for _ in range(6):
            try:
                return do(self)
            except Killed:
                self.crash.dead = False
                self.now = self._start()
                self.time_passes()
            except RedisUnavailable:
                self.time_passes()
        raise AssertionError("it was never done, though only a few effects fail")

    def work(self) -> None:
        """Deliver and sweep until nothing waits and nothing is sent any more."""
        for _ in range(ROUNDS):
            delivered = self.deliver()
            self.time_passes()
            periodic.run(self.now)
            if not delivered and not self.lying() and not self.waits():
                return
        raise AssertionError(f"it never ends: {snapshot(self.plain, self.settings.redis.key_prefix)}")

    def waits(self) -> int:
        return int(self.plain.zcard(self.keys.due)) + int(self.plain.zcard(self.keys.training_queue))

    def lying(self) -> int:
        return sum(int(self.plain.llen(f"{self.settings.redis.key_prefix}:{queue}")) for queue in ALL_QUEUES)

    def deliver(self) -> int:
        """Give every message that lies in a queue to the process, as a Celery worker would."""
        count = 0
        for queue in ALL_QUEUES:
            key = f"{self.settings.redis.key_prefix}:{queue}"
            for _ in range(int(self.plain.llen(key))):
                raw = self.plain.rpop(key)
                if raw is None:
                    break  # a group took the messages of its batches out of the queue
                message = json.loads(raw)
                encoded = message["properties"].get("body_encoding") == "base64"  # by Celery
                body = base64.b64decode(message["body"]) if encoded else message["body"]
                args = json.loads(body)[0]
                count += 1
                try:
                    MODULES[message["headers"]["task"]].run(self.now, *args)
                except Killed:
                    if self.redeliver:
                        self.plain.lpush(key, raw)
                    raise
        return count

    def time_passes(self) -> None:
        """Every claim and every lease runs out, every pause is over, and everything that waits is overdue."""
        pipe = self.plain.pipeline(transaction=False)
        for key in self.plain.keys("{" + self.settings.redis.key_prefix + "}:batch:*"):
            if self.plain.hget(key, "owner"):
                pipe.hset(key, "deadline", 1)
            if self.plain.hexists(key, "not_before"):
                pipe.hset(key, "not_before", 0)
        for key in self.plain.keys("{" + self.settings.redis.key_prefix + "}:lease:*"):
            if self.plain.hget(key, "holder"):
                pipe.hset(key, "deadline", 1)
        for key in (self.keys.due, self.keys.training_queue):
            for name in self.plain.zrange(key, 0, -1):
                pipe.zadd(key, {name: 1})
        pipe.execute()

    def check_now(self) -> None:
        check_sums(snapshot(self.plain, self.settings.redis.key_prefix))

    def rows(self) -> Counter[str]:
        """Every stored line, with how often it is stored."""
        found: Counter[str] = Counter()
        found.update(ParquetSink(self.settings.data.results).scan().collect()["message"].to_list())
        return found

    def check_end(self, *, stored: Sequence[str], dead: Sequence[str] = ()) -> None:
        """All is quiet: these lines are stored once each, these are dead, and nothing else is anywhere."""
        assert self.rows() == Counter(stored)
        found = snapshot(self.plain, self.settings.redis.key_prefix)
        check_sums(found)
        assert (found["batches"], found["bytes"], found["due"]) == (0, 0, 0)
        letters = self.now.ledger.dead_letters.newest()
        lines = [
            raw for letter in letters for raw in framed(self.now.ledger.payload(letter.batch_id))[0]["raw"]
        ]
        assert sorted(lines) == sorted(dead)
        assert set(found["payloads"] or ()) == {letter.batch_id for letter in letters}, (
            "payloads that nobody deletes"
        )
        assert not found["works"], "work that nobody deletes"
        assert self.lying() == 0
        before = self.sent.total()
        self.time_passes()
        with self.crash.off():
            periodic.run(self.now)
        assert self.sent.total() == before, "messages for what is done"


def crashing(url: str, crash: Crash) -> "redis.Redis":
    """A client whose commands that change something are effects."""
    client = redis.Redis.from_url(url)
    execute, pipeline = client.execute_command, client.pipeline

    def watched(*args: Any, **options: Any) -> Any:
        if str(args[0]).split()[0].upper() in READS:
            if crash.dead:
                raise Killed
            return execute(*args, **options)
        what = SHAS.get(str(args[1]), " ".join(str(a) for a in args[:2])[:60])
        if what in NO_GPUS:
            return execute(*args, **options)
        return crash.effect(what, lambda: execute(*args, **options), redis.ConnectionError("cut"))

    def piped(*args: Any, **options: Any) -> Any:
        pipe = pipeline(*args, **options)
        run = pipe.execute

        def watched_pipe(*a: Any, **o: Any) -> Any:
            if all(str(c[0][0]).split()[0].upper() in READS for c in pipe.command_stack):
                if crash.dead:
                    raise Killed
                return run(*a, **o)
            commands = list(pipe.command_stack)

            def run_all() -> Any:
                pipe.command_stack = list(commands)  # which a first run has emptied
                return run(*a, **o)

            return crash.effect("pipeline", run_all, redis.ConnectionError("cut"))

        pipe.execute = watched_pipe
        return pipe

    client.execute_command, client.pipeline = watched, piped  # type: ignore[method-assign]
    return client


@contextmanager
def files_count(crash: Crash) -> Iterator[None]:
    """The steps of writing files are effects."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.MonkeyPatch.context() as patch:

        def watch(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                return crash.effect(f"{name}", lambda: real(*args, **kwargs), full)

            patch.setattr(owner, name, watched)

        watch(os, "fsync")
        for name in ("replace", "rename", "unlink"):
            watch(Path, name)
        yield


Life = Callable[[World], None]


def tireless(settings: Settings) -> Settings:
    """Nothing runs out but by `World.time_passes`."""
    long = 600_000
    return settings.replace(max_attempts=3, overdue_ms=long, claim_ttl_ms=long, lease_ttl_ms=long)


def live(app: Celery, settings: Settings, life: Life, crash: Crash, *, redeliver: bool = False) -> Crash:
    """A life from its beginning to its end in an empty world; raises AssertionError with what went before."""
    world = World(app, settings, crash, redeliver=redeliver)
    try:
        with files_count(crash):
            life(world)
    except AssertionError as exc:
        story = [
            f"{n}{' <-- ' + crash.fault if n in crash.at else ''} {what}"
            for n, what in enumerate(crash.seen, 1)
        ]
        raise AssertionError("\n".join([str(exc), f"redeliver={redeliver}", *story])) from exc
    finally:
        crash.dead = False
        crash.at = ()
        world.close()
    return crash
