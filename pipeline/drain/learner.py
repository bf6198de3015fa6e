"""The single writer of the template tree: learns unknown lines, concludes their verdicts, fills the cache.

The tree lives in this process; what it knows is in Redis (`templates`), written together with the verdicts in one
script that refuses a learner whose lease was taken over. A learner that finds a new token or another Redis reads
everything back first, so its tree is never older than Redis.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import redis

from pipeline.drain.templates import UNCLASSIFIED, Change, Template, Templates
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadPayload, LeaseRefused, TooNew
from pipeline.keyspace import Keys, answering, byte_map
from pipeline.observe import logger
from pipeline.records import WIRE_VERSION, Verdict
from pipeline.settings import Settings

# (work row, template id) -> verdict
Judge = Callable[[Mapping[str, Any], int], Verdict]


class Learner:
    """One per drain process. `token` is asked for before every write; it raises LeaseRefused when we are not the one."""

    def __init__(self, client: "redis.Redis", settings: Settings, verdicts: Verdicts) -> None:
        self.client = client
        self.settings = settings
        self.verdicts = verdicts
        self.keys = Keys(settings.key_prefix)
        self._templates = self._empty()
        self._seen: tuple[int, str] | None = None  # (token, Redis run id) the tree was built under
        self._newest = 0

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
        changed: dict[int, tuple[bytes, str]] = {}
        for row in rows:
            template, change = self._templates.learn(row["masked"], severe=row["severe"], workload=workload)
            template_id = template.template_id if template else UNCLASSIFIED
            verdicts[row["key"]] = judge(row, template_id)
            if template and change is not Change.NONE:
                created = change is Change.CREATED or changed.get(template_id, (b"", ""))[1] != ""
                changed[template_id] = (pack(template), workload if created else "")
        self._newest = max(self._newest, self._templates.newest_id)
        written = self.verdicts.learn(
            version, verdicts, templates=[(i, blob, w) for i, (blob, w) in changed.items()], token=str(token)
        )
        if not written:
            raise LeaseRefused(
                "another learner has taken over the template tree; this batch is tried again there"
            )
        self._seen = seen
        return verdicts

    @property
    def newest_id(self) -> int:
        """The highest template id given."""
        return self._newest

    def _catch_up(self, token: int) -> None:
        with answering():
            run_id = str(self.client.info("server")["run_id"])
            if self._seen == (token, run_id):
                return
            stored = read_templates(self.client, self.keys)
        self._templates = self._empty()
        self._templates.restore(stored)
        # Ids that a Redis without its last second has forgotten may stand in stored results: never give them again.
        self._templates.skip_ids(self._newest)
        self._newest = self._templates.newest_id
        self._seen = (token, run_id)
        logger(token=token).info("learner.ready", templates=len(stored))

    def _empty(self) -> Templates:
        s = self.settings
        return Templates(
            similarity=s.drain_similarity, depth=s.drain_depth, per_workload=s.templates_per_workload
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
