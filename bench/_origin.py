"""Which service was first: the faults of the set of twelve services (samples/services), one by one.

The baseline teaches lines, sessions and whole traces. Everything else goes through the watcher, one batch
for each service, in one round at the end. For each fault the causes are taken that began within it: flagged
templates, findings in sessions, and those of numbers, each fault after the baseline alone. `first` and
`in_three` count the faults whose service is the likeliest origin, or among the three candidates; a fault
without any cause is neither. Beside them the best of simple rules: the service with the first error, the most
errors, the most new templates, or the most findings.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import polars as pl

from bench._running import own_redis
from bench._shop_data import ShopFault, shop_half
from bench._shop_numbers import number_findings, shop_streams
from bench._units_data import taught_verdicts
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadInput
from pipeline.ledger.ledger import Ledger
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Claim, Stage
from pipeline.records.schema import LEARN_SCHEMA, RESULT_SCHEMA, raw_frame
from pipeline.redis.connection import connect
from pipeline.redis.leases import WATCH, Leases, granted
from pipeline.watching.anomalies import RAW_CHARS
from pipeline.watching.callbacks import Callbacks
from pipeline.watching.incidents.named import by_last_part, named_in_text
from pipeline.watching.incidents.origins import Clue, TraceShape, likely_origins
from pipeline.watching.observation import observe
from pipeline.watching.rows import SESSIONS, WatcherFinding
from pipeline.watching.sessions.keys import JOINT, find_keys, model_name
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.sampling import SessionSampler
from pipeline.watching.state import WatcherState
from pipeline.watching.verdicts import events_of
from pipeline.watching.watcher import Watcher

_TIMEOUT_S: Final = 60.0  # as `session_timeout_s` by default


def measure(folder: Path, *, half: str, seed: int = 1) -> dict[str, Any]:
    """Of one half of the set in this folder."""
    if not (folder / half).is_dir():
        raise BadInput(f"there is no {folder / half}; record it with scripts/record_services")
    masks = MaskSet.load()
    shop = shop_half(half, masks, folder)
    lines = _judged(shop.lines.filter(pl.col("at").is_not_null()), seed=seed)
    models = _models(lines.filter("baseline"))
    found = _watched(lines.filter(~pl.col("baseline")), models)
    joint = models.get(model_name(JOINT, "trace"))
    shape = TraceShape() if joint is None else joint.shape
    numbers = number_findings(shop_streams(half, folder))
    ranks: list[int | None] = []
    clear: list[bool] = []
    rules: dict[str, int] = Counter()
    for fault, shifts in zip(shop.faults, numbers, strict=True):
        within = [item for item in found if item.source == SESSIONS and _began_in(item, fault)] + shifts
        clues = _clues(_within(lines, fault), within, shop.services)
        likely = likely_origins(clues, shape) if clues else None
        names = [one.workload for one in likely.origins] if likely else []
        ranks.append(names.index(fault.service) if fault.service in names else None)
        clear.append(likely is not None and likely.clear)
        for name, service in _rules(_within(lines, fault), within).items():
            rules[name] += service == fault.service
    firsts = [rank == 0 for rank in ranks]
    return {
        "faults": len(shop.faults),
        "first": sum(firsts),
        "in_three": sum(rank is not None for rank in ranks),
        "clear": sum(clear),
        "clear_and_first": sum(a and b for a, b in zip(clear, firsts, strict=True)),
        "best_rule_first": max(rules.values()),
        "rules": dict(rules),
        "first_by_kind": dict(
            Counter(fault.kind for fault, first in zip(shop.faults, firsts, strict=True) if first)
        ),
        "upstream": len(shape.upstream),
    }


def _judged(lines: pl.DataFrame, *, seed: int) -> pl.DataFrame:
    """With template_id, new, flagged, score: what the lines of the baseline teach."""
    keys = ["masked", "severe"]
    sample = lines.filter("baseline").group_by(keys, maintain_order=True).agg(pl.len().alias("count"))
    few = lines.group_by(keys, maintain_order=True).agg(pl.col("level").first())
    few = taught_verdicts(few, sample, seed=seed)
    rows = zip(few["reasons"].to_list(), few["severe"], strict=True)
    few = few.with_columns(severity=pl.Series([_severity(reasons, bad) for reasons, bad in rows]))
    return lines.join(
        few.drop("level", "p_value", "reasons"), on=keys, how="left", maintain_order="left"
    ).with_columns(timestamp=(pl.col("at") * 1e6).cast(pl.Int64).cast(pl.Datetime("us", "UTC")))


def _severity(reasons: Sequence[str], severe: bool) -> int:
    return 3 if severe or any(one.startswith("error-severity") for one in reasons) else 1


def _models(baseline: pl.DataFrame) -> Mapping[str, SessionModel]:
    sampler = SessionSampler(timeout_s=_TIMEOUT_S)
    page = baseline.select("raw", "timestamp", "template_id", pl.col("service").alias("workload"))
    blank = {
        name: pl.lit(None, dtype=kind) for name, kind in LEARN_SCHEMA.items() if name not in page.columns
    }
    sampler.add(page.with_columns(**blank).select(list(LEARN_SCHEMA)), baseline=True)
    return sampler.learn()


def _watched(lines: pl.DataFrame, models: Mapping[str, SessionModel]) -> list[WatcherFinding]:
    """The findings in the sessions of these lines."""

    def model_of(workload: str, kind: str) -> tuple[str, SessionModel] | None:
        model = models.get(model_name(workload, kind))
        return None if model is None else ("m1", model)

    folder = Path(tempfile.mkdtemp(prefix="logweir-bench-"))
    found: list[WatcherFinding] = []
    try:
        with own_redis(folder) as settings:
            client = connect(settings)
            ledger = Ledger(client, settings)
            for number, rows in enumerate(_batches(lines)):
                workload = rows["workload"][0]
                batch = Batch(
                    batch_id=f"b{number}", workload=workload, source=f"{workload}.log", source_key="k",
                    purpose=Purpose.SCORE, arrived=datetime(2026, 11, 26, tzinfo=UTC), formats=(), zone="UTC",
                    records=raw_frame(["x"]),
                )  # fmt: skip
                ledger.intake.accept(batch)
                claim = ledger.claim(batch.batch_id, Stage.INGEST, "bench")
                assert isinstance(claim, Claim)
                seen = observe(claim, rows, find_keys(rows))
                ledger.commit(claim, warming=False, outcomes={}, observation=seen.pack() if seen else b"")
            callbacks = Callbacks(
                session_model=model_of, store=lambda *_: None, normal=lambda *_: frozenset()
            )
            watcher = Watcher(WatcherState(client, settings), settings, callbacks)
            lease = granted(Leases(client, settings).request(WATCH, "bench"), WATCH)
            more = True
            while more:
                summary = watcher.round(lease.token, end=True)
                found += summary.found
                more = summary.more
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _batches(lines: pl.DataFrame) -> list[pl.DataFrame]:
    """RESULT_SCHEMA, at most 5,000 records of one service each."""
    rows = lines.sort("service", "timestamp", maintain_order=True).select(
        pl.int_range(pl.len()).cast(pl.String).alias("record_id"),
        pl.col("service").alias("workload"),
        pl.int_range(1, pl.len() + 1).cast(pl.UInt64).alias("line"),
        pl.lit(1, dtype=pl.UInt32).alias("lines"),
        "timestamp", "template_id", "score", "level", "raw",
        pl.lit(value=True).alias("timed"),
        pl.lit(value=False).alias("anomalous"),  # lines are counted by `_clues`
        pl.lit([], dtype=pl.List(pl.String)).alias("reasons"),
        pl.lit("m1").alias("model_version"),
    )  # fmt: skip
    blank = {
        name: pl.lit(None, dtype=kind) for name, kind in RESULT_SCHEMA.items() if name not in rows.columns
    }
    rows = rows.with_columns(**blank).select(list(RESULT_SCHEMA))
    return [
        part.slice(begin, 5_000)
        for part in rows.partition_by("workload", maintain_order=True)
        for begin in range(0, part.height, 5_000)
    ]


def _within(lines: pl.DataFrame, fault: ShopFault) -> pl.DataFrame:
    return lines.filter(~pl.col("baseline") & pl.col("at").is_between(fault.start, fault.end))


def _began_in(item: WatcherFinding, fault: ShopFault) -> bool:
    return fault.start <= item.at.timestamp() <= fault.end


def _clues(rows: pl.DataFrame, found: Sequence[WatcherFinding], services: Sequence[str]) -> list[Clue]:
    """The causes that began within a fault, from its lines and findings."""
    known = by_last_part(services)
    causes = (
        rows.filter("flagged")
        .sort("timestamp", maintain_order=True)
        .group_by("service", "template_id", maintain_order=True)
        .agg(
            pl.col("timestamp").first(),
            pl.len().alias("n"),
            pl.col("severity").max(),
            pl.col("new").any(),
            pl.col("raw").first(),
        )
    )
    clues = [
        Clue(
            workload=service, kind="template", first=first, timed=True, severity=severity, count=n, new=new,
            named=named_in_text(raw[:RAW_CHARS], service, known),
        )
        for service, _, first, n, severity, new, raw in causes.iter_rows()
    ]  # fmt: skip
    return clues + [
        Clue(
            workload=event.workload, kind=event.kind, first=event.first, timed=event.timed,
            severity=event.severity, count=event.count, new=event.new,
        )
        for event in events_of([], found)
    ]  # fmt: skip


def _rules(rows: pl.DataFrame, found: Sequence[WatcherFinding]) -> dict[str, str | None]:
    """The service that each simple rule names."""
    errors, flagged = rows.filter("severe").sort("timestamp"), rows.filter("flagged")
    findings = Counter(flagged["service"].to_list())
    findings.update(item.workload for item in found)
    fresh = rows.filter("new").unique(["service", "template_id"])
    return {
        "first_error": errors["service"].first() if errors.height else None,  # type: ignore[dict-item]
        "errors": _most(Counter(errors["service"].to_list())),
        "novelty": _most(Counter(fresh["service"].to_list())),
        "findings": _most(findings),
    }


def _most(counts: Counter[str]) -> str | None:
    return min(counts, key=lambda name: (-counts[name], name), default=None)
