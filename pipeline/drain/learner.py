"""The single writer of a shard: learns unknown lines, concludes their verdicts, fills the verdict cache.

The tree lives in this process. Redis (`templates`) holds its content, written with the verdicts by one script
that refuses a learner whose lease was taken over. A learner that finds a new token or another Redis reads
everything back first, so its tree is never older than Redis.

With several shards (`drain_shards`), templates, counts and verdicts are common, and every learner follows the
changes of the others before each batch. Reason: the cache is empty under every new model, so the shard that
meets a line first answers it, and the line must get its old id. Only the shard of the workload that created a
template widens it, so an older text never overwrites a newer one.

Two shards that meet a new shape within one batch of each other create *twins*. From the next batch on, all
shards give a line that both twins cover to the lower id."""

from collections.abc import Callable, Mapping
from typing import Any

import redis

from pipeline.drain.templates import (
    DEPTH,
    PER_WORKLOAD,
    Change,
    Template,
    Templates,
    pack_template,
    unpack_template,
)
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import LeaseRefused
from pipeline.logs import logger
from pipeline.records.verdict import Verdict
from pipeline.redis.connection import answering, byte_map
from pipeline.redis.keys import Keys
from pipeline.redis.shards import ids_of, of_shard, shard_of
from pipeline.settings import Settings

# (work row, template id) -> verdict
Judge = Callable[[Mapping[str, Any], int], Verdict]


class Learner:
    """One per drain process, of one shard. Writes only under the newest token of that shard's lease."""

    def __init__(
        self, client: "redis.Redis", settings: Settings, verdicts: Verdicts, *, shard: int = 0
    ) -> None:
        self.shard = shard
        self.lease = of_shard("drain", shard)
        self.client = client
        self.settings = settings
        self.verdicts = verdicts
        self.keys = Keys(settings.redis.key_prefix)
        self._templates = self._empty()
        self._built_under: tuple[int, str] | None = None  # (token, Redis run id) of the tree
        self._newest = 0
        self._followed = 0.0  # score of the last change of any shard that the tree has

    def learn(
        self,
        rows: list[dict[str, Any]],
        *,
        version: str,
        workload: str,
        token: int,
        judge: Judge,
    ) -> dict[int, Verdict]:
        """Gives every row its template and verdict; returns verdicts by work key.

        Raises LeaseRefused when another learner has taken over; then nothing was written.
        """
        self._catch_up(token)
        # Until the write succeeds the tree may hold templates that Redis lacks: after a failure the next
        # batch reads back.
        built_under, self._built_under = self._built_under, None
        verdicts: dict[int, Verdict] = {}
        changed: dict[int, bool] = {}  # template id -> whether it is new
        for row in rows:
            template_id, change = self._templates.place(
                row["masked"], severe=row["severe"], workload=workload
            )
            verdicts[row["key"]] = judge(row, template_id)
            if change is not Change.NONE:
                changed[template_id] = changed.get(template_id, False) or change is Change.CREATED
        self._newest = max(self._newest, self._templates.newest_id)
        written = self.verdicts.learn(
            version,
            verdicts,
            # Packed after the last line: a template that was widened ten times is packed once.
            templates=[
                (i, pack_template(self._templates.template(i)), workload if created else "")
                for i, created in changed.items()
            ],
            token=str(token),
            lease=self.lease,
        )
        if not written:
            raise LeaseRefused(
                "another learner has taken over the template tree; this batch is tried again there"
            )
        self._built_under = built_under
        return verdicts

    @property
    def newest_id(self) -> int:
        """The highest template id of this shard."""
        return self._newest

    def _catch_up(self, token: int) -> None:
        with answering():
            run_id = str(self.client.info("server")["run_id"])
            if self._built_under == (token, run_id):
                if self.settings.drain.shards > 1:
                    self._follow()
                return
            # Read first: a change in between is read twice, not missed.
            last = self.client.zrange(self.keys.template_changes, -1, -1, withscores=True)
            stored = read_templates(self.client, self.keys)
        self._followed = float(last[0][1]) if last else 0.0
        self._templates = self._empty()
        self._templates.restore(stored)
        # A Redis that lost its last second may have forgotten ids that stored results hold: never reuse them.
        self._templates.skip_ids(self._newest)
        self._newest = self._templates.newest_id
        self._built_under = (token, run_id)
        logger(token=token).info("learner.ready", templates=len(stored))

    def _follow(self) -> None:
        """Adds the changes of other shards since the last batch. Raises redis.RedisError, BadPayload,
        TooNew."""
        changes: Any = self.client.zrangebyscore(
            self.keys.template_changes, f"({self._followed}", "+inf", withscores=True
        )
        if not changes:
            return
        ids = [template_id for name, _ in changes if not self._templates.is_own(template_id := int(name))]
        if ids:
            blobs: Any = self.client.hmget(self.keys.templates, [str(i) for i in ids])
            self._templates.restore(
                unpack_template(i, blob) for i, blob in zip(ids, blobs, strict=True) if blob is not None
            )
        self._followed = float(changes[-1][1])

    def _empty(self) -> Templates:
        s = self.settings
        return Templates(
            similarity=s.drain.similarity,
            depth=DEPTH,
            per_workload=PER_WORKLOAD,
            ids=ids_of(self.shard),
            is_ours=lambda workload: shard_of(workload, s.drain.shards) == self.shard,
        )


def read_templates(client: "redis.Redis", keys: Keys) -> list[Template]:
    """Every stored template, by id."""
    return sorted(
        (unpack_template(int(name), blob) for name, blob in byte_map(client.hgetall(keys.templates)).items()),
        key=lambda t: t.template_id,
    )


def template_texts(client: "redis.Redis", keys: Keys) -> dict[int, str]:
    """The text of every stored template by its id."""
    return {one.template_id: one.text for one in read_templates(client, keys)}
