"""The single writer of a shard: learns unknown lines, concludes their verdicts, fills the cache.

The tree lives in this process; what it knows is in Redis (`templates`), written together with the verdicts in one
script that refuses a learner whose lease was taken over. A learner that finds a new token or another Redis reads
everything back first, so its tree is never older than Redis.

Where there are several shards (`drain_shards`), templates, counts and verdicts stay common, and every learner follows
what the others write, before each batch. The cache is asked before any learner is and is empty under every new model: a
line that one workload's shard had answered is then answered by whichever shard meets it first, and must get the id that
it had. So a tree has to hold the templates of all. A template is widened by one shard alone, that of the workload which
made it, so no text is ever overwritten by an older one.

Two shards that meet a new shape within one batch of each other both make a template of it: twins. From the next batch on
each line that both cover is given to the one with the lower id, by all shards.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import redis

from pipeline.drain.templates import Change, Template, Templates
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadPayload, LeaseRefused, TooNew
from pipeline.logs import logger
from pipeline.records.batch import WIRE_VERSION
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
        self.keys = Keys(settings.key_prefix)
        self._templates = self._empty()
        self._seen: tuple[int, str] | None = None  # (token, Redis run id) the tree was built under
        self._newest = 0
        self._followed = 0.0  # the change of a template, by any shard, up to which the tree has them all

    def learn(
        self,
        rows: list[dict[str, Any]],
        *,
        version: str,
        workload: str,
        token: int,
        judge: Judge,
    ) -> dict[int, Verdict]:
        """Give every row its template and verdict; returns verdicts by work key.

        Raises LeaseRefused when another learner has taken over: nothing was written.
        """
        self._catch_up(token)
        # Until the write has succeeded the tree may know templates that Redis does not: whatever goes wrong in
        # between, the next batch reads back first.
        seen, self._seen = self._seen, None
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
            # As they are after the last line: one that was widened ten times is packed once.
            templates=[
                (i, pack(self._templates.template(i)), workload if created else "")
                for i, created in changed.items()
            ],
            token=str(token),
            lease=self.lease,
        )
        if not written:
            raise LeaseRefused(
                "another learner has taken over the template tree; this batch is tried again there"
            )
        self._seen = seen
        return verdicts

    @property
    def newest_id(self) -> int:
        """The highest template id of this shard."""
        return self._newest

    def _catch_up(self, token: int) -> None:
        with answering():
            run_id = str(self.client.info("server")["run_id"])
            if self._seen == (token, run_id):
                if self.settings.drain_shards > 1:
                    self._follow()
                return
            # Asked first: what is written in between is read twice, not missed.
            last = self.client.zrange(self.keys.template_changes, -1, -1, withscores=True)
            stored = read_templates(self.client, self.keys)
        self._followed = float(last[0][1]) if last else 0.0
        self._templates = self._empty()
        self._templates.restore(stored)
        # Ids that a Redis without its last second has forgotten may stand in stored results: never give them again.
        self._templates.skip_ids(self._newest)
        self._newest = self._templates.newest_id
        self._seen = (token, run_id)
        logger(token=token).info("learner.ready", templates=len(stored))

    def _follow(self) -> None:
        """Take in what other shards have made and widened since the last batch. Raises redis.RedisError, BadPayload, TooNew."""
        changes: Any = self.client.zrangebyscore(
            self.keys.template_changes, f"({self._followed}", "+inf", withscores=True
        )
        if not changes:
            return
        ids = [template_id for name, _ in changes if not self._templates.is_own(template_id := int(name))]
        if ids:
            blobs: Any = self.client.hmget(self.keys.templates, [str(i) for i in ids])
            self._templates.restore(
                unpack(i, blob) for i, blob in zip(ids, blobs, strict=True) if blob is not None
            )
        self._followed = float(changes[-1][1])

    def _empty(self) -> Templates:
        s = self.settings
        return Templates(
            similarity=s.drain_similarity,
            depth=s.drain_depth,
            per_workload=s.templates_per_workload,
            ids=ids_of(self.shard),
            own=lambda workload: shard_of(workload, s.drain_shards) == self.shard,
        )


def pack(template: Template) -> bytes:
    """A template as it is stored."""
    return bytes(msgpack.packb([WIRE_VERSION, template.text, template.severe, template.workload]))


def unpack(template_id: int, blob: bytes) -> Template:
    """Raises BadPayload, TooNew."""
    try:
        version, *rest = msgpack.unpackb(blob)
        if version > WIRE_VERSION:
            raise TooNew(
                f"template {template_id} has wire version {version}; this build reads up to {WIRE_VERSION}: update it"
            )
        text, severe, workload = rest
        if not (isinstance(text, str) and isinstance(severe, bool) and isinstance(workload, str)):
            raise TypeError("its fields have other types")
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        raise BadPayload(f"stored template {template_id} is not readable: {exc}") from exc
    return Template(template_id=template_id, text=text, severe=severe, workload=workload)


def read_templates(client: "redis.Redis", keys: Keys) -> list[Template]:
    """Every stored template, by id."""
    return sorted(
        (unpack(int(name), blob) for name, blob in byte_map(client.hgetall(keys.templates)).items()),
        key=lambda t: t.template_id,
    )
