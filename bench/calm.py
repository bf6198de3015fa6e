"""Incidents of a calm shop by day: known errors, a deploy, one real fault, and nightly jobs that stay away.
And the false alarms of a calm day of one service and of 200.

A model is trained on three days. The week after goes through the product's own steps in the order of time:
masks, templates, verdicts, observations, and a round of the watcher every ten minutes on a Redis of its own.
Only Redis' clock is replaced by that of the lines, so that the week is watched live. The model stays the same
all week.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, cast

import polars as pl
from msgspec.structs import asdict

from bench._calm_services import DAY, false_alarms
from bench._calm_shop import (
    FAULT_DAY,
    JOB,
    MISSING_DAY,
    REFUSED,
    REPORT,
    SEED,
    TRAINING_DAYS,
    WEEK_DAYS,
    ShopLine,
    first_midnight,
    shop_lines,
)
from bench._learnt import train
from bench._running import own_redis, scratch
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import DEPTH, Template, Templates, pack_template
from pipeline.ledger.ledger import Ledger
from pipeline.models import bundle
from pipeline.models.known.patterns import load_known
from pipeline.models.line import LineModel
from pipeline.models.verdict import Knowledge, verdict_of
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Claim, Stage
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import RESULT_SCHEMA, raw_frame
from pipeline.redis.connection import connect
from pipeline.redis.leases import WATCH, Leases, granted
from pipeline.settings import Settings
from pipeline.sources import formats
from pipeline.watching.callbacks import Callbacks, Expected
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.incidents.values import Incident
from pipeline.watching.observation import observe
from pipeline.watching.state import WatcherState
from pipeline.watching.view import View
from pipeline.watching.watcher import Watcher

MOST_A_DAY: Final = 3
CALM_DAYS: Final = (3, 5)  # of the week, without deploy or fault, after the first two
SERVICES: Final = 200
MOST_TIMES: Final = 3  # false alarms of so many services, in those of one
_SLOT: Final = timedelta(minutes=10)
_SEED: Final = 1
_OF_LINE: Final = ["masked", "severe", "level", "workload"]


class _State(WatcherState):
    """The watcher's state at the time of the lines."""

    clock_ms = 0

    def snapshot(self, limit: int, most_events: int) -> View:
        return replace(super().snapshot(limit, most_events), now_ms=self.clock_ms)


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the lines of the shop ({SEED})")


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:  # noqa: ARG001 - every benchmark gets it
    start = first_midnight()
    lines, templates = _parsed(shop_lines(start, args.seed))
    week = start + timedelta(days=TRAINING_DAYS)
    with scratch() as folder:
        manifest, judged = _judged(lines, week, folder / "bundle")
        with own_redis(folder) as settings:
            found = _watched(judged, templates, manifest, settings)
    days: dict[int, list[Incident]] = {day: [] for day in range(1, WEEK_DAYS + 1)}
    for incident in sorted(found, key=lambda one: one.first):
        if incident.first >= week:
            days[(incident.first - week).days + 1].append(incident)
    fault = max(days[FAULT_DAY], key=_gravity, default=None)
    calm = false_alarms(SERVICES, DAY, seed=args.seed, per_day=Settings().watch.alerts_per_day)
    return {
        "false_alarms_of_one_service": calm.of_one,
        f"false_alarms_of_{SERVICES}_services": calm.of_all,
        f"findings_of_{SERVICES}_services": calm.found,
        "incidents_by_day": [len(some) for some in days.values()],
        "fault_first": fault is not None and REFUSED in fault.title,
        "missing_job_named": all(
            any(job in cause.text for one in days[MISSING_DAY] for cause in one.causes)
            for job in (JOB, REPORT)
        ),
        "errors_by_day": _errors(lines, week),
        "titles": {
            str(day): [f"{one.first:%H:%M} {one.title[:150]}" for one in some] for day, some in days.items()
        },
    }


def failed(values: dict[str, Any]) -> bool:
    """Whether the week had more incidents than a person reads, or hid what was wrong."""
    counts = values["incidents_by_day"]
    quiet = max(counts[1:]) <= MOST_A_DAY and not any(counts[day - 1] for day in CALM_DAYS)
    most = MOST_TIMES * max(values["false_alarms_of_one_service"], Settings().watch.alerts_per_day)
    shared = values[f"false_alarms_of_{SERVICES}_services"] <= most
    return not (quiet and shared and values["fault_first"] and values["missing_job_named"])


def _gravity(incident: Incident) -> tuple[int, int, int]:
    return max(cause.grade for cause in incident.causes), incident.severity, incident.count


def _errors(lines: pl.DataFrame, week: datetime) -> list[int]:
    severe = lines.filter("severe", pl.col("timestamp") >= week)
    days = Counter(((severe["timestamp"] - week).dt.total_days() + 1).to_list())
    return [days[day] for day in range(1, WEEK_DAYS + 1)]


def _parsed(lines: list[ShopLine]) -> tuple[pl.DataFrame, dict[int, Template]]:
    """The lines as the pipeline parses, masks and numbers them, and the templates by number."""
    texts = [line.text for line in lines]
    parsed = formats.parse(raw_frame(texts), formats.detect(texts[:200]), arrived=lines[0].at, zone="UTC")
    masked = MaskSet.load().mask(parsed["message"])
    frame = parsed.with_columns(
        masked["masked"],
        masked["pattern_id"],
        severe=pl.col("level").is_in(list(ERROR_LEVELS)).fill_null(value=False),
        workload=pl.Series([line.workload for line in lines]),
    )
    settings = Settings()
    tree = Templates(similarity=settings.drain.similarity, depth=DEPTH, per_workload=len(lines))
    few = frame.unique(_OF_LINE, keep="first", maintain_order=True).select(_OF_LINE)
    ids, templates = [], {}
    for text, severe, _, workload in few.iter_rows():
        template, _ = tree.learn(text, severe=severe, workload=workload)
        assert template is not None
        ids.append(template.template_id)
        templates[template.template_id] = template
    few = few.with_columns(template_id=pl.Series(ids))
    return frame.join(few, on=_OF_LINE, how="left", maintain_order="left", nulls_equal=True), templates


def _judged(lines: pl.DataFrame, week: datetime, out: Path) -> tuple[bundle.Manifest, pl.DataFrame]:
    """RESULT_SCHEMA of all lines, those of the week with the verdicts of a model of the days before."""
    before = lines.filter(pl.col("timestamp") < week)
    sample = before.group_by("masked", "pattern_id", "severe", "template_id", maintain_order=True).agg(
        pl.len().alias("count"),
        pl.col("timestamp").min().alias("first_seen"),
        pl.col("timestamp").max().alias("last_seen"),
    )
    names = tuple(lines["workload"].unique().sort())
    manifest = train(
        sample.with_columns(baseline=pl.lit(value=False)),
        out,
        seed=_SEED,
        news_per_day=Settings().train.news_per_day,
        workloads=names,
    )
    few = lines.unique([*_OF_LINE, "template_id"], keep="first", maintain_order=True)
    evidence = LineModel.load(out).score(few["masked"].to_list())
    knowledge = Knowledge(calibration=manifest.calibration, known=load_known(out))
    rows = zip(few.iter_rows(named=True), evidence, strict=True)
    verdicts = [verdict_of({**row, **asdict(of)}, row["template_id"], knowledge) for row, of in rows]
    few = few.select(*_OF_LINE).with_columns(
        score=pl.Series([v.score for v in verdicts]),
        anomalous=pl.Series([v.anomalous for v in verdicts]),
        p_value=pl.Series([v.p_value for v in verdicts], dtype=pl.Float64),
        reasons=pl.Series([list(v.reasons) for v in verdicts], dtype=pl.List(pl.String)),
        model_version=pl.lit(manifest.version),
    )
    judged = lines.drop("source").join(few, on=_OF_LINE, how="left", maintain_order="left", nulls_equal=True)
    scored = pl.col("timestamp") >= week
    judged = judged.with_columns(
        pl.when(scored).then(pl.col(name)) for name in ("score", "anomalous", "p_value", "model_version")
    ).with_columns(
        record_id=pl.format("k-{}", "line"),
        source=pl.format("{}.log", pl.col("workload").str.replace("/", "-")),
    )
    return manifest, judged.select(pl.col(name).cast(kind) for name, kind in RESULT_SCHEMA.items())


def _watched(
    lines: pl.DataFrame, templates: Mapping[int, Template], manifest: bundle.Manifest, settings: Settings
) -> list[Incident]:
    """The incidents of these lines, watched live."""
    client = connect(settings)
    ledger, state = Ledger(client, settings), _State(client, settings)
    watcher = Watcher(state, settings, _callbacks(manifest))
    client.hset(
        state.keys.templates,
        mapping={str(number): pack_template(template) for number, template in templates.items()},
    )
    lease = granted(Leases(client, settings).request(WATCH, "bench"), WATCH)
    for number, (until, batches) in enumerate(_slots(lines, first_midnight())):
        state.clock_ms = round(until.timestamp() * 1000)
        for rows in batches:
            _store(ledger, rows, f"b{number}-{rows['workload'][0]}", until)
        while watcher.round(lease.token).more:
            pass
    blob = client.get(state.keys.watching("incidents"))
    return Incidents.unpack(cast("bytes | None", blob)).all()


def _callbacks(manifest: bundle.Manifest) -> Callbacks:
    return Callbacks(
        session_model=lambda *_: None,
        store=lambda *_: None,
        normal=lambda *_: frozenset(),
        expected=lambda _: Expected.by(manifest),
    )


def _slots(lines: pl.DataFrame, start: datetime) -> Iterator[tuple[datetime, list[pl.DataFrame]]]:
    """The batches of each ten minutes, one for each workload."""
    slot = ((pl.col("timestamp") - start).dt.total_seconds() // _SLOT.total_seconds()).alias("slot")
    by_slot = lines.with_columns(slot).partition_by("slot", as_dict=True, include_key=False)
    days = TRAINING_DAYS + WEEK_DAYS
    for number in range(round(timedelta(days=days) / _SLOT)):
        some = by_slot.get((number,))
        yield start + (number + 1) * _SLOT, [] if some is None else some.partition_by("workload")


def _store(ledger: Ledger, rows: pl.DataFrame, batch_id: str, until: datetime) -> None:
    workload, source = rows["workload"][0], rows["source"][0]
    batch = Batch(
        batch_id=batch_id, workload=workload, source=source, source_key="k", purpose=Purpose.SCORE,
        arrived=until, formats=(), zone="UTC", records=raw_frame(["x"]),
    )  # fmt: skip
    ledger.intake.accept(batch)
    claim = ledger.claim(batch_id, Stage.INGEST, "bench")
    assert isinstance(claim, Claim)
    seen = observe(replace(claim, accepted_ms=round(until.timestamp() * 1000)), rows, None)
    ledger.commit(claim, warming=False, outcomes={}, observation=seen.pack() if seen else b"")
