"""What may still become of stored batches, by the ledger's word: compaction seals only what is final."""

from collections.abc import Sequence

from pipeline.ledger.backlog import Backlog, BatchEnding
from pipeline.records.batch import Purpose
from pipeline.settings import Settings
from pipeline.settings.values import kept_results
from pipeline.sinks.choose import parquet_of
from pipeline.sinks.compaction import Compactor, Fate, Fates
from pipeline.sinks.forgotten import Forgotten
from pipeline.sinks.manifest import ResultTable
from pipeline.sinks.retention import Retention


def compactor_of(
    settings: Settings, purpose: Purpose, backlog: Backlog, forgotten: Forgotten | None
) -> Compactor:
    """Compaction of the results of a purpose; a baseline stays for ever. A run, which ends soon and needs its
    memory for other work, seals nothing."""
    limits = kept_results(settings.data.results_keep) if purpose is Purpose.SCORE else {}
    tables = {table: limits[table] for table in ResultTable if table in limits}
    size = limits.get("size")
    return Compactor(
        parquet_of(settings, purpose),
        fates_of(backlog, forgotten),
        Retention(keep_s=tables, max_bytes=None if size is None else int(size)),
        seals=settings.data.results_dir is None,
    )


def fates_of(backlog: Backlog, forgotten: Forgotten | None) -> Fates:
    """The fates of batches by their ids. Raises RedisUnavailable."""

    def fates(batch_ids: Sequence[str]) -> list[Fate]:
        lost = [False] * len(batch_ids) if forgotten is None else forgotten.names(batch_ids)
        endings = backlog.endings(batch_ids)
        return [Fate.OPEN if out else fate(end) for out, end in zip(lost, endings, strict=True)]

    return fates


def fate(ending: BatchEnding) -> Fate:
    """What may still become of a batch whose rows are stored.

    An unknown batch is final: its entry has run out, or it holds findings of the watcher. A rescored batch
    keeps its first rows where the second pass ends badly."""
    if ending.state == "":
        return Fate.FINAL
    if ending.state == "done" and (ending.rescore or not ending.discarded):
        return Fate.WAITS if ending.warming else Fate.FINAL
    if not ending.rescore and (ending.discarded or ending.state in ("dead", "split")):
        return Fate.VOID
    return Fate.OPEN
