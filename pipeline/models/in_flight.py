"""EncodedLines that several batches bring at the same time are scored once.

A line is in the verdict cache only once drain has learnt it. Until then its evidence is kept here: near, in the process
that scored it, and in Redis, where every scoring process says with what it begins (redis/lua/drain/evidence_ask.lua). What another
one has begun with is waited for, but not for long. Nothing but work hangs on it: without Redis, and for what is forgotten,
a line is scored again, and the evidence of a masked line under a version is the same whoever works it out.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

import msgpack
import redis

from pipeline.errors import BadPayload, RedisUnavailable
from pipeline.logs import logger
from pipeline.models.evidence import Evidence
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

# Of the list in which evidence stands in Redis; another build may know other fields.
EVIDENCE_VERSION: Final = 1
NEAR_LIMIT: Final = 20_000  # lines in a process: 20 MiB
# EncodedLines in each of two halves. A line of 2 KiB takes 2.3 KiB there, an ordinary one 0.2: 48 MiB at most, 4 as a rule.
HALF_LIMIT: Final = 10_000
BLOB_LIMIT: Final = 2_048  # a longer one is not kept: with 25 words of 64 characters it is 1.7 KiB
TTL_S: Final = 60  # from the last write
# A full pass takes 0.1 s where a process has a core for itself, and some seconds where ten share one.
LEFT_MS: Final = 10_000
# A peer that died costs this once, a line that it had begun with.
WAIT_S: Final = 2.0
LOOK_S: Final = 0.02

_FIELDS: Final = attrgetter(*(field.name for field in fields(Evidence)))

Score = Callable[[list[str]], Sequence[Evidence]]


class InFlight:
    """Of one scoring process, which is known to others as `owner`."""

    def __init__(self, client: "redis.Redis", settings: Settings, owner: str) -> None:
        self.keys = Keys(settings.key_prefix)
        self.scripts = Scripts(client)
        self.owner = owner
        self.wait_s = min(WAIT_S, settings.claim_ttl_ms / 3000)
        self._near: OrderedDict[tuple[str, int], Evidence] = OrderedDict()

    def evidence(self, version: str, lines: Mapping[int, str], score: Score) -> dict[int, Evidence]:
        """The evidence of masked lines by `pattern_id`. `score` gets those that nobody else scores, all at once, and is
        called again only for what others did not bring in time."""
        found = {i: self._near[version, i] for i in lines if (version, i) in self._near}
        missing = [i for i in lines if i not in found]
        deadline = time.monotonic() + self.wait_s
        while missing:
            told, ours, theirs = self._ask(version, missing)
            found |= told
            if theirs and time.monotonic() > deadline:
                ours, theirs = ours + theirs, []
            if ours:
                found |= self._scored(version, {i: lines[i] for i in ours}, score)
            elif theirs:
                time.sleep(LOOK_S)
            missing = theirs
        self._remember(version, found)
        return found

    def _scored(self, version: str, lines: Mapping[int, str], score: Score) -> dict[int, Evidence]:
        try:
            new = dict(zip(lines, score(list(lines.values())), strict=True))
        except BaseException:
            self._tell(version, dict.fromkeys(lines, b""))  # nobody needs to wait for them
            raise
        self._tell(version, {i: pack(evidence) for i, evidence in new.items()})
        return new

    def _ask(self, version: str, ids: list[int]) -> tuple[dict[int, Evidence], list[int], list[int]]:
        """(what is known, what is ours to score, what others score now)."""
        args = [self.owner, LEFT_MS, HALF_LIMIT, TTL_S, *(_field(version, i) for i in ids)]
        try:
            answers = self.scripts.run("drain/evidence_ask", self._halves(), args)
        except RedisUnavailable:  # the ledger says so when the batch is handed on
            return {}, ids, []
        known: dict[int, Evidence] = {}
        ours: list[int] = []
        theirs: list[int] = []
        for i, answer in zip(ids, answers, strict=True):
            if isinstance(answer, bytes):
                try:
                    known[i] = unpack(answer)
                except BadPayload as exc:
                    logger().warning("evidence.unreadable", why=str(exc))
                    ours.append(i)
            else:
                (ours if answer else theirs).append(i)
        return known, ours, theirs

    def _tell(self, version: str, blobs: Mapping[int, bytes]) -> None:
        args: list[Any] = [HALF_LIMIT, TTL_S]
        for i, blob in blobs.items():
            args += [_field(version, i), blob if len(blob) <= BLOB_LIMIT else b""]
        with suppress(RedisUnavailable):
            self.scripts.run("drain/evidence_tell", self._halves(), args)

    def _halves(self) -> list[str]:
        return [self.keys.evidence("young"), self.keys.evidence("old")]

    def _remember(self, version: str, found: Mapping[int, Evidence]) -> None:
        for i, evidence in found.items():
            self._near[version, i] = evidence
            self._near.move_to_end((version, i))
        while len(self._near) > NEAR_LIMIT:
            self._near.popitem(last=False)


def pack(evidence: Evidence) -> bytes:
    """msgpack of version and fields, in their order."""
    return bytes(msgpack.packb([EVIDENCE_VERSION, *_FIELDS(evidence)]))


def unpack(blob: bytes) -> Evidence:
    """Raises BadPayload for what is no evidence, or that of a newer build."""
    try:
        version, surprisal, words, unseen, tokens, severity, novelty, prior = msgpack.unpackb(blob)
        if version != EVIDENCE_VERSION:
            raise BadPayload(f"kept evidence has version {version}; this build reads {EVIDENCE_VERSION}")
        if not (
            all(isinstance(number, float) for number in (surprisal, novelty, prior))
            and isinstance(tokens, int)
            and isinstance(severity, str | None)
            and all(isinstance(word, str) for word in (*words, *unseen))
        ):
            raise BadPayload("kept evidence has fields of other types")
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        raise BadPayload(f"kept evidence is not readable: {exc}") from exc
    return Evidence(
        surprisal=surprisal,
        words=tuple(words),
        unseen=tuple(unseen),
        tokens=tokens,
        severity=severity,
        novelty=novelty,
        prior=prior,
    )


def _field(version: str, pattern_id: int) -> bytes:
    return version.encode() + b"\0" + pattern_id.to_bytes(8, "little")
