"""The shared verdict cache: masked line -> verdict, keyed by model version.

An answer of an old model can never be given for a new one, so a model swap needs no reset and cannot race.
Two generations of a Redis hash bound it (drain/learn.lua rotates them); a bounded dict in front saves round trips.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis

from pipeline.errors import BadPayload
from pipeline.logs import logger
from pipeline.records.verdict import Verdict
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

CACHE_TTL_S: Final = 86_400
NEAR_LIMIT: Final = 100_000  # verdicts of one version in a process
NEAR_VERSIONS: Final = 4
# The version under which templates are known while there is no model yet.
WARMING_VERSION: Final = "warming"


class Verdicts:
    """Look-ups and writes of one process."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.key_prefix)
        self.scripts = Scripts(client)
        self.limit = settings.verdict_cache_entries
        self.tell = "opensearch" in settings.sinks  # the templates index follows (tasks/tick.py)
        self.shards = settings.drain_shards  # where there are several, their learners follow each other
        self._near: OrderedDict[str, OrderedDict[int, Verdict]] = OrderedDict()

    def lookup(self, version: str, keys: Sequence[int]) -> dict[int, Verdict]:
        """The verdicts that are known under this version; absent keys are unknown."""
        near = self._near_of(version)
        found = {key: near[key] for key in keys if key in near}
        for key in found:
            near.move_to_end(key)
        missing = [key for key in keys if key not in found]
        if missing:
            far = self._from_redis(version, missing)
            found.update(far)
            self._remember(near, far)
        return found

    def learn(
        self,
        version: str,
        verdicts: Mapping[int, Verdict],
        *,
        templates: Sequence[tuple[int, bytes, str]] = (),
        token: str = "",
        lease: str = "drain",
    ) -> bool:
        """Write verdicts and templates `(id, packed, workload to count it for or "")` in one fenced step.

        False when `token` is no longer that of the holder of `lease`: nothing was written.
        """
        args: list[Any] = [
            token,
            self.limit,
            CACHE_TTL_S,
            len(templates),
            int(self.tell),
            int(self.shards > 1),
        ]
        for template_id, blob, workload in templates:
            args += [template_id, blob, workload]
        for key, verdict in verdicts.items():
            args += [_field(key), verdict.pack()]
        k = self.keys
        keys = [
            k.lease(lease), k.templates, k.template_counts, k.verdicts(version, "young"), k.verdicts(version, "old"),
            k.templates_untold, k.template_changes,
        ]  # fmt: skip
        if not self.scripts.run("drain/learn", keys, args):
            return False
        if version in self._near:
            self._remember(self._near[version], verdicts)
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

    def _near_of(self, version: str) -> OrderedDict[int, Verdict]:
        """The dict of a version; of models that serve side by side the least recently asked one goes first."""
        near = self._near.setdefault(version, OrderedDict())
        self._near.move_to_end(version)
        while len(self._near) > NEAR_VERSIONS:
            self._near.popitem(last=False)
        return near

    @staticmethod
    def _remember(near: OrderedDict[int, Verdict], verdicts: Mapping[int, Verdict]) -> None:
        near.update(verdicts)
        while len(near) > NEAR_LIMIT:
            near.popitem(last=False)


def _readable(blob: bytes | None) -> Verdict | None:
    """A cached answer that cannot be read, damaged or of a newer build, is worked out again: it must not kill a batch."""
    if blob is None:
        return None
    try:
        return Verdict.unpack(blob)
    except BadPayload as exc:
        logger().warning("verdict.unreadable", why=str(exc))
        return None


def _field(key: int) -> bytes:
    return key.to_bytes(8, "little")
