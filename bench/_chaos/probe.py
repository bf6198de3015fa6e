"""Looks at a running stack once a second: one consistent read of Redis, the memory of the processes, the live
models.

A sample holds what the invariants of ARCHITECTURE §2 are told from; it judges nothing itself (check.py does).
Every batch is counted from its own ledger entry, beside what the ledger's counters say, so that the two can
be compared."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import psutil  # type: ignore[import-untyped] # it publishes no types
import redis

from bench._chaos.history import History
from bench._chaos.servers import client_of
from pipeline.errors import BadBundle, BadSetting, StoreUnavailable
from pipeline.messages.routing import ALL_QUEUES
from pipeline.models.registry import Registry
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

EVERY_S: Final = 1.0
# Longer silence of Redis is a finding: nothing of ours blocks it for so long.
PATIENCE_S: Final = 2.0
MESSAGES_LOOKED_AT: Final = 20  # of each queue, the newest
UNACKED: Final = "unacked"

# KEYS [1] prefix of all keys: only for a Redis that is no cluster, as every embedded one. Returns JSON.
# Unfinished batches are in `due`, whatever they wait for; one that is not is never found again, and the sum
# of its workload shows it. A rescored batch stays counted as stored. `halves` are parts of accepted ones.
LOOK: Final = """
local p = KEYS[1]
local function map(key)
  local flat, found = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end
local works = {}
local function of(name)
  if not works[name] then
    works[name] = { totals = map(p .. 'totals:' .. name), in_flight = 0, letters = 0 }
  end
  return works[name]
end
for _, name in ipairs(redis.call('SMEMBERS', p .. 'workloads')) do of(name) end
local function count(name, e)
  if e[5] == 'rescore' or not e[2] then return end
  for workload, lines in pairs(e[6] and cjson.decode(e[6]) or { [e[2]] = e[3] }) do
    local work = of(workload)
    work[name] = work[name] + tonumber(lines)
  end
end
local due = { batches = 0, bytes = 0, roots = 0, root_bytes = 0, halves = 0, stages = {} }
local over = { done = true, dead = true, split = true }
for _, id in ipairs(redis.call('ZRANGE', p .. 'due', 0, -1)) do
  local e = redis.call('HMGET', p .. 'batch:' .. id, 'state', 'workload', 'lines', 'bytes', 'kind', 'shares', 'parent')
  if e[1] and not over[e[1]] then
    local bytes = tonumber(e[4] or '0')
    due.batches, due.bytes = due.batches + 1, due.bytes + bytes
    due.stages[e[1]] = (due.stages[e[1]] or 0) + 1
    if e[7] then
      due.halves = due.halves + 1
    elseif e[5] ~= 'rescore' then
      due.roots, due.root_bytes = due.roots + 1, due.root_bytes + bytes
    end
    count('in_flight', e)
  end
end
local dead_bytes, dead = 0, redis.call('ZRANGE', p .. 'dead', 0, -1)
for _, id in ipairs(dead) do
  local e = redis.call('HMGET', p .. 'batch:' .. id, 'state', 'workload', 'lines', 'bytes', 'kind', 'shares')
  if e[1] == 'dead' then
    dead_bytes = dead_bytes + tonumber(e[4] or '0')
    count('letters', e)
  end
end
local models = {}
for _, name in ipairs(redis.call('SMEMBERS', p .. 'model_names')) do
  local key = p .. 'model'
  if name ~= 'shared' then key = key .. ':' .. name end
  local m = redis.call('HMGET', key, 'version', 'generation', 'token', 'how')
  models[name] = { version = m[1] or '', generation = m[2] or '0', token = m[3] or '0', how = m[4] or '' }
end
local leases, tokens = {}, map(p .. 'tokens')
for name in pairs(tokens) do
  local l = redis.call('HMGET', p .. 'lease:' .. name, 'holder', 'token', 'deadline')
  leases[name] = { holder = l[1] or '', token = l[2] or '0', deadline = l[3] or '0' }
end
local running = {}
for _, id in ipairs(redis.call('ZREVRANGE', p .. 'trainings', 0, 19)) do
  local t = redis.call('HMGET', p .. 'training:' .. id, 'state', 'ended_ms')
  if t[1] and t[1] ~= 'queued' and not t[2] then running[#running + 1] = id end
end
local now = redis.call('TIME')
return cjson.encode({ workloads = works, due = due, counts = map(p .. 'counts'), dead = { letters = #dead, bytes = dead_bytes },
  warming = redis.call('ZCARD', p .. 'warming'), models = models, leases = leases, tokens = tokens,
  gpu_tokens = map(p .. 'gpu:tokens'), running = running, redis_s = now[1] })
"""


class Probe(threading.Thread):
    """Notes a sample every second until it is stopped; `{"away": true}` while Redis does not answer."""

    def __init__(
        self,
        history: History,
        settings: Settings,
        pids: Callable[[], list[int]],
        *,
        every_s: float = EVERY_S,
        intact: Callable[[], bool] = lambda: True,
    ) -> None:
        """`intact`: whether the store is itself now; otherwise what it says of models is not asked."""
        super().__init__(name="chaos-probe", daemon=True)
        self.history, self.settings, self.pids, self.every_s = history, settings, pids, every_s
        self.look = Look(settings, intact)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self.sample()
            self._over.wait(max(0.05, self.every_s - (time.monotonic() - began)))
        self.look.close()

    def sample(self) -> None:
        """Note one sample now."""
        rss = memory_of(self.pids())
        try:
            facts = self.look()
        except (redis.RedisError, OSError) as exc:
            self.history.note("sample", away=True, why=f"{type(exc).__name__}: {exc}"[:120], rss=rss)
        else:
            self.history.note("sample", **facts, rss=rss)

    def stop(self) -> None:
        """End it; the last sample is whole."""
        self._over.set()
        if self.is_alive():
            self.join(2 * PATIENCE_S + self.every_s)


class Look:
    """One look at everything in Redis and at the files of the live models. Calling it raises
    redis.RedisError."""

    def __init__(self, settings: Settings, intact: Callable[[], bool] = lambda: True) -> None:
        if settings.redis.url is None:
            raise BadSetting("the probe knows no Redis; give it the settings of a running stack")
        self.keys = Keys(settings.redis.key_prefix)
        self.prefix = settings.redis.key_prefix
        self.queues = ALL_QUEUES
        # No second try: a look that took two tries is no look at one moment.
        self.client = client_of(settings.redis.url, timeout_s=PATIENCE_S)
        self.intact = intact
        self.registry = Registry(self.client, settings)
        self._whole: set[str] = set()

    def __call__(self) -> dict[str, Any]:
        pipe = self.client.pipeline(transaction=True)
        pipe.eval(LOOK, 1, self.keys(""))
        pipe.info()
        for queue in self.queues:
            pipe.llen(f"{self.prefix}:{queue}")
            pipe.lrange(f"{self.prefix}:{queue}", 0, MESSAGES_LOOKED_AT - 1)
        pipe.hlen(f"{self.prefix}:{UNACKED}")
        raw, server, *queues, unacked = pipe.execute()
        facts: dict[str, Any] = plain(json.loads(raw))
        for name, model in facts["models"].items():
            model["fault"] = self._fault(model["version"]) if model["version"] else f"no version of {name}"
        facts["memory"] = [int(server["used_memory"]), int(server.get("maxmemory", 0))]
        facts["server"] = str(server["run_id"])
        facts["queues"] = dict(zip(self.queues, queues[0::2], strict=True)) | {UNACKED: unacked}
        facts["messages"] = dict(Counter(content_of(m) for part in queues[1::2] for m in part))
        return facts

    def close(self) -> None:
        self.client.close()

    def _fault(self, version: str) -> str:
        """Why a live version cannot be fetched from the store, "" when it can: hashed once, then asked
        whether it is there. "" as well while somebody is at the store."""
        if not self.intact():
            return ""
        try:
            if version not in self._whole:
                self.registry.stored.verified(version)
                self._whole.add(version)
            found = "" if self.registry.stored.stored(version) else f"{version} is gone from the store"
        except (BadBundle, StoreUnavailable) as exc:
            found = str(exc)
        return found if self.intact() else ""


def plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Numbers as numbers: a hash of Redis holds text, and an empty table of Lua is an empty list or an empty
    object."""

    def table(value: Any) -> dict[str, Any]:
        return value if isinstance(value, dict) else {}

    def numbers(value: Any) -> dict[str, int]:
        return {name: int(float(n)) for name, n in table(value).items()}

    works = {}
    for name, work in table(facts["workloads"]).items():
        totals = numbers(work["totals"])
        works[name] = {n: totals.get(n, 0) for n in ("accepted", "stored", "dead", "discarded", "skipped")}
        works[name] |= {"in_flight": int(work["in_flight"]), "letters": int(work["letters"])}
    due = facts["due"]
    return {
        **facts,
        "workloads": works,
        "due": {**{n: int(v) for n, v in due.items() if n != "stages"}, "stages": numbers(due["stages"])},
        "counts": numbers(facts["counts"]),
        "models": {
            name: {**m, "generation": int(m["generation"]), "token": int(m["token"])}
            for name, m in table(facts["models"]).items()
        },
        "leases": {
            name: {**lease, "token": int(lease["token"]), "deadline": int(lease["deadline"])}
            for name, lease in table(facts["leases"]).items()
        },
        "tokens": numbers(facts["tokens"]),
        "gpu_tokens": numbers(facts["gpu_tokens"]),
        "running": list(facts["running"]),
        "redis_s": int(facts["redis_s"]),
    }


def content_of(message: bytes) -> str:
    """The content type of one message of Celery, or in a word what it is instead."""
    try:
        data = json.loads(message)
        headers, kind = data["headers"], str(data["content-type"])
    except (ValueError, KeyError, TypeError):
        return "unreadable"
    if not isinstance(headers, Mapping):
        return "unreadable"
    return "jsonpickle" if b"py/object" in message else kind


def memory_of(pids: list[int]) -> list[tuple[int, str, float]]:
    """(process id, what it is, MiB of resident memory) of those that live."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                words = process.cmdline() or [process.name()]
                found.append((pid, " ".join(words[-3:])[-60:], round(process.memory_info().rss / 2**20, 1)))
    return found
