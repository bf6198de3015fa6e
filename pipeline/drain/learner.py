"""The single writer of the template tree: learns unknown lines, concludes their verdicts, fills the cache.

The tree lives in this process. The store keeps its content in a journal (drain/journal.py), and Redis
(`templates`) holds a copy, written with the verdicts by one script that refuses a learner whose lease was
taken over. The journal is written first. A learner that finds a new token, another Redis or a copy that does
not reflect the newest entry of the journal reads both back before it goes on. It adds what either of them
lacks, so an id keeps its words even if Redis lost its last second, or everything."""

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import redis

from pipeline.drain.journal import Journal, Kept
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
from pipeline.settings import Settings
from pipeline.store.choose import open_store

AT_ONCE: Final = 1_000  # templates of one script: some 10 ms in which Redis answers nobody else
_NO_VERDICTS: Final[Mapping[int, Verdict]] = {}
# (work row, template id) -> verdict
Judge = Callable[[Mapping[str, Any], int], Verdict]


class Learner:
    """One per drain process. Writes only under the newest token of the lease.

    `at_store` is entered while the store is read or written, so that its slowness counts against no batch.
    """

    def __init__(
        self,
        client: "redis.Redis",
        settings: Settings,
        verdicts: Verdicts,
        *,
        at_store: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.client = client
        self.settings = settings
        self.verdicts = verdicts
        self.keys = Keys(settings.redis.key_prefix)
        self.journal = Journal(open_store(settings.data.store))
        self._at_store = at_store
        self._templates = self._empty()
        # (token, Redis run id, newest entry of the journal that Redis reflects) of the tree
        self._built_under: tuple[int, str, int] | None = None

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

        Raises LeaseRefused when another learner has taken over, and StoreUnavailable; then nothing was
        written to Redis.
        """
        run_id = self._catch_up(token)
        # Until the write succeeds the tree may hold templates that Redis lacks: after a failure the next
        # batch reads back.
        self._built_under = None
        verdicts: dict[int, Verdict] = {}
        changed: dict[int, bool] = {}  # template id -> whether it is new
        for row in rows:
            template_id, change = self._templates.place(
                row["masked"], severe=row["severe"], workload=workload
            )
            verdicts[row["key"]] = judge(row, template_id)
            if change is not Change.NONE:
                changed[template_id] = changed.get(template_id, False) or change is Change.CREATED
        # Packed after the last line: a template that was widened ten times is packed once.
        templates = {i: _kept(self._templates.template(i)) for i in changed}
        self._record(templates)
        self._write(templates, {i for i, new in changed.items() if new}, token, version, verdicts)
        self._built_under = (token, run_id, self.journal.position)
        return verdicts

    @property
    def newest_id(self) -> int:
        """The highest template id."""
        return self._templates.newest_id

    def _record(self, templates: Mapping[int, Kept]) -> None:
        """Writes templates to the journal, before any result may name them."""
        if templates:
            with self._at_store():
                self.journal.append(templates)

    def _write(
        self,
        templates: Mapping[int, Kept],
        created: Set[int],
        token: int,
        version: str = "",
        verdicts: Mapping[int, Verdict] = _NO_VERDICTS,
    ) -> None:
        """Writes templates and verdicts to Redis. Raises LeaseRefused when another learner has taken over."""
        written = self.verdicts.learn(
            version,
            verdicts,
            templates=[
                (i, kept.packed, kept.workload if i in created else "") for i, kept in templates.items()
            ],
            token=str(token),
            journal=self.journal.position,
        )
        if not written:
            raise LeaseRefused(
                "another learner has taken over the template tree; this batch is tried again there"
            )

    def _catch_up(self, token: int) -> str:
        """Makes tree, Redis and journal agree where they may differ. Returns the run id of Redis."""
        run_id, reflected = self._redis_state()
        if self._built_under == (token, run_id, reflected):
            return run_id
        with self._at_store():
            kept = self.journal.read()
        with answering():
            stored = {t.template_id: _kept(t) for t in read_templates(self.client, self.keys)}
        # A journal that ends before the entry that Redis reflects is an older one, as from a backup.
        newest = kept | stored if reflected > self.journal.position else stored | kept
        self._record({i: one for i, one in newest.items() if kept.get(i) != one})
        lacking = {i: one for i, one in newest.items() if stored.get(i) != one}
        ids = list(lacking)
        for at in range(0, len(ids), AT_ONCE):
            self._write(
                {i: lacking[i] for i in ids[at : at + AT_ONCE]}, lacking.keys() - stored.keys(), token
            )
        if reflected != self.journal.position:
            self._write({}, set(), token)
        self._templates = self._empty()
        self._templates.restore(unpack_template(i, one.packed) for i, one in newest.items())
        logger(token=token).info("learner.ready", templates=len(self._templates), restored=len(lacking))
        return run_id

    def _redis_state(self) -> tuple[str, int]:
        """The run id of Redis, and the entry of the journal that its copy reflects; 0 for none."""
        pipe = self.client.pipeline(transaction=False)
        pipe.info("server")
        pipe.get(self.keys.templates_journal)
        with answering():
            info, reflected = pipe.execute()
        return str(info["run_id"]), int(reflected or 0)

    def _empty(self) -> Templates:
        return Templates(similarity=self.settings.drain.similarity, depth=DEPTH, per_workload=PER_WORKLOAD)


def _kept(template: Template) -> Kept:
    return Kept(pack_template(template), template.workload)


def read_templates(client: "redis.Redis", keys: Keys) -> list[Template]:
    """Every stored template, by id."""
    return sorted(
        (unpack_template(int(name), blob) for name, blob in byte_map(client.hgetall(keys.templates)).items()),
        key=lambda t: t.template_id,
    )


def template_texts(client: "redis.Redis", keys: Keys) -> dict[int, str]:
    """The text of every stored template by its id."""
    return {one.template_id: one.text for one in read_templates(client, keys)}
