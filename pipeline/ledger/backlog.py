"""The backlog: unfinished batches, batches that wait for a model, and counters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.ledger.store import LedgerStore, counters, text
from pipeline.records.delivery import UNFINISHED, Stage
from pipeline.records.left_out import KEPT_BACK, LEFT_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEnding:
    """What the ledger says of a stored batch. `state`: as Ledger.state, "" for an unknown batch.

    `rescore`: it was stored before, and is scored again. `warming`: it waits for a model."""

    state: str
    rescore: bool
    discarded: bool
    warming: bool


def has_results(totals: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether these counters of workloads tell of stored results; lines of a baseline are none."""
    return any(one.get(name) for one in totals.values() for name in ("anomalous", "normal", "warming"))


class Backlog:
    """Reads of the ledger as a whole, and the sweeper's part of it."""

    def __init__(self, store: LedgerStore) -> None:
        self.store = store
        self.client, self.keys = store.client, store.keys
        self._rescored_to = 0

    def overdue(self, limit: int = 1_000, *, until_ms: int | None = None) -> list[tuple[str, Stage]]:
        """Unfinished batches that are due now or by `until_ms`: never claimed, released, or with an expired
        claim."""
        until = self.store.now_ms() if until_ms is None else until_ms
        due = self.store.ask(self.client.zrangebyscore, self.keys.due, "-inf", until, start=0, num=limit)
        ids = [text(x) for x in due]
        batches, others = [], []
        for batch_id, state in zip(ids, self.store.field_of_each(ids, "state"), strict=True):
            if state is not None and text(state) in UNFINISHED:
                batches.append((batch_id, Stage(text(state))))
            # The script compares again: an operator or a new model may have put the batch back to work
            # meanwhile.
            elif not self.store.scripts.run(
                "ledger/tidy", [self.keys.batch(batch_id), self.keys.due, self.keys.in_flight], [batch_id]
            ):
                others.append(batch_id)
        self.postpone(others)
        return batches

    def backfills(self, batch_ids: Sequence[str]) -> set[str]:
        """The backfill batches among these."""
        flags = self.store.field_of_each(list(batch_ids), "backfill")
        return {batch_id for batch_id, flag in zip(batch_ids, flags, strict=True) if flag == b"1"}

    def workloads_of(self, batch_ids: Sequence[str]) -> dict[str, str]:
        """Batch id -> workload, without unknown batches."""
        names = self.store.field_of_each(list(batch_ids), "workload")
        pairs = zip(batch_ids, names, strict=True)
        return {batch_id: text(name) for batch_id, name in pairs if name is not None}

    def endings(self, batch_ids: Sequence[str]) -> list[BatchEnding]:
        """What became of each batch, in one round trip."""
        if not batch_ids:
            return []
        pipe = self.client.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipe.hmget(self.keys.batch(batch_id), "state", "kind", "discarded")
        pipe.zmscore(self.keys.warming, list(batch_ids))
        *entries, warming = self.store.ask(pipe.execute)
        return [
            BatchEnding(
                state=text(state or b""),
                rescore=kind == b"rescore",
                discarded=discarded is not None,
                warming=score is not None,
            )
            for (state, kind, discarded), score in zip(entries, warming, strict=True)
        ]

    def postpone(self, batch_ids: Sequence[str]) -> None:
        """Keeps these batches out of `overdue` for `overdue_ms`."""
        if batch_ids:
            at = self.store.now_ms() + self.store.settings.internal.overdue_ms
            self.store.ask(self.client.zadd, self.keys.due, dict.fromkeys(batch_ids, at), xx=True)

    def start_rescoring(self, limit: int, *, has_model: Callable[[str], bool]) -> list[str]:
        """Sends batches through the stages again that were stored while warming and have a model now; their
        ids."""
        # Where only some workloads have a model, batches of the others must not hide theirs. So more batches
        # are read than sent, and when none of them was ready, the next call reads further.
        first, many = self._rescored_to, 10 * limit
        warming = self.store.ask(self.client.zrange, self.keys.warming, first, first + many - 1)
        ids = [text(x) for x in warming]
        workloads = self.workloads_of(ids)
        ready = [i for i in ids if i not in workloads or has_model(workloads[i])]
        self._rescored_to = first + many if not ready and len(ids) == many else 0
        k, overdue_ms = self.keys, self.store.settings.internal.overdue_ms
        return [
            batch_id
            for batch_id in ready[:limit]
            if self.store.scripts.run(
                "ledger/rescore",
                [k.batch(batch_id), k.due, k.counts, k.warming, k.in_flight],
                [batch_id, overdue_ms],
            )
        ]

    def pending(self) -> tuple[int, int]:
        """(batches in flight, warming batches) of one moment, because batches move between the two."""
        pipe = self.client.pipeline(transaction=True)
        pipe.hget(self.keys.counts, "batches")
        pipe.zcard(self.keys.warming)
        batches, warming = self.store.ask(pipe.execute)
        return int(batches or 0), int(warming)

    def warming(self) -> int:
        """Batches that wait for a model."""
        return int(self.store.ask(self.client.zcard, self.keys.warming))

    def watcher_lag(self) -> int:
        """Stored batches that the watcher has not read, plus findings that no sink has."""
        pipe = self.client.pipeline(transaction=False)
        pipe.llen(self.keys.watching("observations"))
        pipe.llen(self.keys.watching("outbox"))
        return sum(map(int, self.store.ask(pipe.execute)))

    def observed(self) -> tuple[int, int]:
        """(observations that the watcher has taken so far, those that wait), of one moment."""
        taken, waiting, _ = self.unobserved()
        return taken, waiting

    def unobserved(self) -> tuple[int, int, int]:
        """`observed`, and the bytes of those that wait, of the same moment."""
        pipe = self.client.pipeline(transaction=True)
        pipe.hmget(self.keys.watching(), "head", "bytes")
        pipe.llen(self.keys.watching("observations"))
        (head, size), waiting = self.store.ask(pipe.execute)
        return int(head or 0), int(waiting), int(size or 0)

    def watching(self) -> dict[str, float]:
        """The state of the watcher: open sessions and incidents, waiting and dropped observations, and what
        its rates and numbers left out (records/left_out.py), and findings that the alarm budget kept back.

        `age_s`: seconds since the last round while there was anything to read.
        """
        k = self.keys
        pipe = self.client.pipeline(transaction=False)
        pipe.hgetall(k.watching())
        pipe.llen(k.watching("observations"))
        pipe.hlen(k.watching("sessions"))
        flat, observations, sessions = self.store.ask(pipe.execute)
        totals, now = counters(flat), self.store.now_ms()
        return {
            "sessions": sessions,
            "incidents": totals.get("incidents", 0),
            "observations": observations,
            "dropped": totals.get("dropped", 0),
            **{kind: totals.get(kind, 0) for kind in (*LEFT_OUT, KEPT_BACK, "workloads")},
            "age_s": max(0, now - totals.get("round_ms", now)) / 1000,
        }

    def counts(self) -> dict[str, int]:
        """`batches`, `bytes` and `stage:<name>` in flight."""
        return counters(self.store.ask(self.client.hgetall, self.keys.counts))

    def totals(self) -> dict[str, dict[str, int]]:
        """Line counters by workload."""
        names = sorted(text(x) for x in self.store.ask(self.client.smembers, self.keys.workloads))
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(self.keys.totals(name))
        return dict(zip(names, map(counters, self.store.ask(pipe.execute)), strict=True))
