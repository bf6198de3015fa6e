"""Request coalescing (single-flight): a line that several batches bring at the same time is scored once.

The verdict cache holds a line only after drain has learnt it. Until then its evidence is cached in the
process that scored it, and in Redis, where every scoring process claims the lines that it begins
(lua/drain/evidence_ask.lua). Another process waits for a claimed line, for a short time. Losing the cache or
Redis only costs work: a line is then scored again, and the evidence of a masked line under a version is the
same in every process.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final

import msgspec
import redis
from cachetools import LRUCache

from pipeline.errors import BadPayload, RedisUnavailable
from pipeline.logs import logger
from pipeline.models.evidence import Evidence
from pipeline.records.wire import Codec
from pipeline.redis.arguments import named_arguments
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

NEAR_LIMIT: Final = 20_000  # lines in a process: 20 MiB
# Lines in each half. A line of 2 KiB takes 2.3 KiB, an ordinary one 0.2: 48 MiB at most, 4 as a rule.
HALF_LIMIT: Final = 10_000
BLOB_LIMIT: Final = 2_048  # longer evidence is not shared: with 25 words of 64 characters it has 1.7 KiB
TTL_S: Final = 60  # from the last write
# A claim. A full pass takes 0.1 s where a process has a core, and some seconds where ten share one.
CLAIM_MS: Final = 10_000
WAIT_S: Final = 2.0  # for a claimed line; a peer that died costs this once
POLL_S: Final = 0.02

# The fields in their order, without names: half the bytes.
_NAMES: Final = Evidence.__struct_fields__
_VALUES: Final = attrgetter(*_NAMES)
_CODEC: Final = Codec[Any](
    tuple[float, tuple[str, ...], tuple[str, ...], int, str | None, float, float],
    version=1,
    what="shared evidence",
    newer=BadPayload,
)

Score = Callable[[list[str]], Sequence[Evidence]]


class AskArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of drain/evidence_ask.lua by name."""

    owner: str
    claim_ms: int  # that a line is left to whoever began with it
    half_limit: int  # of the young half
    ttl_s: int


class SingleFlight:
    """The lines in flight of one scoring process; other processes know it as `owner`."""

    def __init__(self, client: "redis.Redis", settings: Settings, owner: str) -> None:
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.owner = owner
        self.wait_s = min(WAIT_S, settings.internal.claim_ttl_ms / 3000)
        self._near: LRUCache[tuple[str, int], Evidence] = LRUCache(NEAR_LIMIT)

    def evidence(self, version: str, lines: Mapping[int, str], score: Score) -> dict[int, Evidence]:
        """The evidence of masked lines by `pattern_id`.

        `score` gets all lines that no other process scores at once. A second call follows only for lines that
        others did not finish in time.
        """
        found = {i: self._near[version, i] for i in lines if (version, i) in self._near}
        missing = [i for i in lines if i not in found]
        deadline = time.monotonic() + self.wait_s
        while missing:
            shared, claimed, awaited = self._claim(version, missing)
            found |= shared
            if awaited and time.monotonic() > deadline:
                claimed, awaited = claimed + awaited, []
            if claimed:
                found |= self._scored(version, {i: lines[i] for i in claimed}, score)
            elif awaited:
                time.sleep(POLL_S)
            missing = awaited
        self._near.update({(version, i): evidence for i, evidence in found.items()})
        return found

    def _scored(self, version: str, lines: Mapping[int, str], score: Score) -> dict[int, Evidence]:
        try:
            new = dict(zip(lines, score(list(lines.values())), strict=True))
        except BaseException:
            self._share(version, dict.fromkeys(lines, b""))  # releases the claims: nobody needs to wait
            raise
        self._share(version, {i: pack_evidence(evidence) for i, evidence in new.items()})
        return new

    def _claim(self, version: str, ids: list[int]) -> tuple[dict[int, Evidence], list[int], list[int]]:
        """(shared evidence, lines to score here, lines that others score now)."""
        asks = AskArgs(owner=self.owner, claim_ms=CLAIM_MS, half_limit=HALF_LIMIT, ttl_s=TTL_S)
        args: list[Any] = [named_arguments(asks), *(_field(version, i) for i in ids)]
        try:
            answers = self.scripts.run("drain/evidence_ask", self._halves(), args)
        except RedisUnavailable:  # the ledger reports it when the batch is handed on
            return {}, ids, []
        shared: dict[int, Evidence] = {}
        claimed: list[int] = []
        awaited: list[int] = []
        for i, answer in zip(ids, answers, strict=True):
            if isinstance(answer, bytes):
                try:
                    shared[i] = unpack_evidence(answer)
                except BadPayload as exc:
                    logger().warning("evidence.unreadable", why=str(exc))
                    claimed.append(i)
            else:
                (claimed if answer else awaited).append(i)
        return shared, claimed, awaited

    def _share(self, version: str, blobs: Mapping[int, bytes]) -> None:
        args: list[Any] = [HALF_LIMIT, TTL_S]
        for i, blob in blobs.items():
            args += [_field(version, i), blob if len(blob) <= BLOB_LIMIT else b""]
        with suppress(RedisUnavailable):
            self.scripts.run("drain/evidence_tell", self._halves(), args)

    def _halves(self) -> list[str]:
        return [self.keys.evidence("young"), self.keys.evidence("old")]


def pack_evidence(evidence: Evidence) -> bytes:
    return _CODEC.pack(_VALUES(evidence))


def unpack_evidence(blob: bytes) -> Evidence:
    """Raises BadPayload for damaged bytes and for those of a newer build."""
    return Evidence(**dict(zip(_NAMES, _CODEC.unpack(blob), strict=True)))


def _field(version: str, pattern_id: int) -> bytes:
    return version.encode() + b"\0" + pattern_id.to_bytes(8, "little")
