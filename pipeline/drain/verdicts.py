"""The shared verdict cache: masked line -> verdict, keyed by model version.

The key holds the version, so a model swap needs no reset and cannot race. Two generations of a Redis hash
bound the cache (drain/learn.lua rotates them). A bounded LRU dict in front saves round trips."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import redis

from pipeline.errors import BadPayload
from pipeline.logs import logger
from pipeline.records.verdict import Verdict
from pipeline.redis.arguments import named_arguments_with_bytes
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.redis.leases import DRAIN
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

CACHE_TTL_S: Final = 86_400
# Per model version in Redis: fifty times what a busy pipeline meets in a day, and a small part of
# redis_max_mib.
CACHE_ENTRIES: Final = 500_000
LOCAL_VERDICTS: Final = 100_000  # of one version in a process
LOCAL_VERSIONS: Final = 4
# The version of verdicts before the first model.
WARMING_VERSION: Final = "warming"


class LearnArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of drain/learn.lua by name."""

    token: str  # "": not fenced
    limit: int
    ttl_s: int
    tell: bool  # the templates index follows
    journal: str  # the entry of the journal that Redis reflects after this write; "": unchanged
    templates: list[dict[str, str | bytes]]  # id, packed, workload that counts it or ""
    verdicts: list[bytes]  # keys and verdicts in turn


class Verdicts:
    """Reads and writes of one process."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.limit = CACHE_ENTRIES
        self.tell = "opensearch" in settings.data.sinks  # the templates index follows (tasks/tick.py)
        self._local: OrderedDict[str, OrderedDict[int, Verdict]] = OrderedDict()

    def lookup(self, version: str, keys: Sequence[int]) -> dict[int, Verdict]:
        """The cached verdicts of this version; unknown keys are absent."""
        local = self._local_of(version)
        found = {key: local[key] for key in keys if key in local}
        for key in found:
            local.move_to_end(key)
        missing = [key for key in keys if key not in found]
        if missing:
            shared = self._from_redis(version, missing)
            found.update(shared)
            self._remember(local, shared)
        return found

    def learn(
        self,
        version: str,
        verdicts: Mapping[int, Verdict],
        *,
        templates: Sequence[tuple[int, bytes, str]] = (),
        token: str = "",
        journal: int | None = None,
    ) -> bool:
        """Writes verdicts and templates `(id, packed, workload that counts it or "")` in one fenced step.

        `journal`: the entry of the journal (drain/journal.py) that Redis reflects afterwards.

        False when `token` is no longer that of the holder of the lease; then nothing was written.
        """
        args = LearnArgs(
            token=token,
            limit=self.limit,
            ttl_s=CACHE_TTL_S,
            tell=self.tell,
            journal="" if journal is None else str(journal),
            templates=[{"id": str(i), "packed": packed, "workload": name} for i, packed, name in templates],
            verdicts=[x for key, verdict in verdicts.items() for x in (_field(key), verdict.pack())],
        )
        k = self.keys
        generations = [k.verdicts(version, "young"), k.verdicts(version, "old")]
        keys = [k.lease(DRAIN), k.templates, k.template_counts, *generations]
        keys += [k.templates_untold, k.templates_journal]
        if not self.scripts.run("drain/learn", keys, [named_arguments_with_bytes(args)]):
            return False
        if version in self._local:
            self._remember(self._local[version], verdicts)
        return True

    def _from_redis(self, version: str, keys: Sequence[int]) -> dict[int, Verdict]:
        names = [_field(key) for key in keys]
        young, old = self.keys.verdicts(version, "young"), self.keys.verdicts(version, "old")
        pipe = self.client.pipeline(transaction=False)
        pipe.hmget(young, names)
        pipe.hmget(old, names)
        with answering():
            fresh, aged = pipe.execute()
        found, promote = {}, {}
        for key, blob, aged_blob in zip(keys, fresh, aged, strict=True):
            if (young_verdict := _readable(blob)) is not None:
                found[key] = young_verdict
            elif (old_verdict := _readable(aged_blob)) is not None:
                found[key] = promote[key] = old_verdict
        if promote:
            self.learn(version, promote)
        return found

    def _local_of(self, version: str) -> OrderedDict[int, Verdict]:
        """The dict of a version; the least recently used version is dropped first."""
        local = self._local.setdefault(version, OrderedDict())
        self._local.move_to_end(version)
        while len(self._local) > LOCAL_VERSIONS:
            self._local.popitem(last=False)
        return local

    @staticmethod
    def _remember(local: OrderedDict[int, Verdict], verdicts: Mapping[int, Verdict]) -> None:
        local.update(verdicts)
        while len(local) > LOCAL_VERDICTS:
            local.popitem(last=False)


def _readable(blob: bytes | None) -> Verdict | None:
    """None for a verdict that is damaged or newer: it is computed again, and must not kill a batch."""
    if blob is None:
        return None
    try:
        return Verdict.unpack(blob)
    except BadPayload as exc:
        logger().warning("verdict.unreadable", why=str(exc))
        return None


def _field(key: int) -> bytes:
    return key.to_bytes(8, "little")
