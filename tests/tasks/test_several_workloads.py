"""A batch whose records name their workloads: read by each workload's formats, ended in one commit."""

from collections.abc import Iterator

import polars as pl
import pytest
from crash_points import Process, check_sums, snapshot
from small_bundles import ONE, written

from pipeline.messages.app import make_app
from pipeline.producer import Producer
from pipeline.records.batch import SEVERAL, Batch, Purpose, utc_now
from pipeline.records.delivery import Accepted, Claim, RequestIdentity, Stage
from pipeline.records.pushed import PushedRecords
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.sources.pushed import KnownFormats, framed_by_workload
from pipeline.tasks import drain, frontend, infer, ingest, store
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform
from tests.tasks.test_merging import live

JSON = '{"@timestamp":"2026-11-25T10:00:00.5Z","level":"error","msg":"disk full"}'
ISO = "2026-11-25T10:00:01.250Z WARN app: slow answer"


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    made = Process(make_app(settings), settings)
    written(made.registry, ONE)
    live(made, ONE)
    yield made
    made.app.close()


def several(name: str, *records: tuple[str, str]) -> Batch:
    workloads, raws = map(list, zip(*records, strict=True))
    return Batch(
        batch_id=name, workload=SEVERAL, source="intake", source_key=name, purpose=Purpose.SCORE, arrived=utc_now(),
        formats=(), zone="UTC", records=PushedRecords([None] * len(raws), raws=raws, workloads=workloads),
    )  # fmt: skip


def accepted(context: Context, name: str, *records: tuple[str, str]) -> None:
    batch = several(name, *records)
    producer = Producer(context.ledger, context.submit, context.settings)
    assert isinstance(producer.accept_all([batch], [RequestIdentity()]), Accepted)


def known(context: Context, line: str, workload: str) -> None:
    """The line has a verdict from now on."""
    Producer(context.ledger, context.submit, context.settings).send(
        [line], workload=workload, batch_id=f"of {workload}"
    )
    perform(context, Stage.INGEST, f"of {workload}", ingest.step)
    infer.run(context, f"of {workload}")
    for stage, module in ((Stage.DRAIN, drain), (Stage.STORE, store)):
        perform(context, stage, f"of {workload}", module.step)


def test_each_workload_is_read_by_its_own_formats_and_all_end_in_one_commit(context: Context) -> None:
    known(context, JSON, "shop")
    known(context, ISO, "till")
    sink = parquet_of(context.settings)
    before = len(sink.parts())
    accepted(context, "w", ("shop", JSON), ("till", ISO), ("shop", JSON))
    assert ingest.run(context, "w") is None
    assert context.ledger.state("w") == "done" and len(sink.parts()) == before + 1
    rows = sink.scan().filter(pl.col("record_id").str.starts_with("w-")).sort("record_id").collect()
    assert rows.select("record_id", "workload", "level", "message").rows() == [
        ("w-1", "shop", "error", "disk full"),
        ("w-2", "till", "warning", "app: slow answer"),
        ("w-3", "shop", "error", "disk full"),
    ]
    check_sums(snapshot(context.client, context.settings.redis.key_prefix))
    waiting = context.client.lrange(context.ledger.keys.watching("observations"), 0, -1)
    assert len(waiting) == 4, "one of each batch before, one of each workload here"  # type: ignore[arg-type]


def test_a_workload_with_an_unknown_line_leaves_the_batch_with_all_of_its_lines(context: Context) -> None:
    known(context, JSON, "shop")
    accepted(context, "w", ("till", "no paper"), ("shop", JSON), ("till", JSON), ("bank", "shut"))
    assert ingest.run(context, "w") is None
    assert [context.ledger.state(name) for name in ("w", "w.1", "w.4")] == ["done", "ingest", "ingest"]
    left = context.ledger.payload("w.1")
    assert isinstance(left, PushedRecords) and (left.raws, left.places) == (["no paper", JSON], [1, 3])
    totals = context.ledger.backlog.totals()
    assert {name: (t["accepted"], t.get("stored", 0)) for name, t in totals.items()} == {
        "shop": (2, 2), "till": (2, 0), "bank": (1, 0),
    }  # fmt: skip
    check_sums(snapshot(context.client, context.settings.redis.key_prefix))


@pytest.mark.parametrize(
    ("characters", "batches"),
    [(frontend.FRAMED_TOGETHER, [4]), (1, [1] * 4), (len(ISO) + 2 * len(JSON) + 1, [3, 1])],
)
def test_batches_of_every_kind_are_read_in_their_order_however_many_are_framed_together(
    context: Context, characters: int, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    framed = frontend.framed_by_workload
    monkeypatch.setattr(frontend, "FRAMED_TOGETHER", characters)
    monkeypatch.setattr(
        frontend,
        "framed_by_workload",
        lambda several, *of: (passes.append(len(several)), framed(several, *of))[1],
    )
    producer = Producer(context.ledger, context.submit, context.settings)
    accepted(context, "b0", ("till", ISO), ("shop", JSON))
    producer.send([ISO, ISO], workload="till", batch_id="b1")
    producer.send([{"message": "disk full"}], workload="shop", batch_id="b2")
    accepted(context, "b3", ("shop", JSON))
    producer.send([{"message": "shut"}, {"message": "open"}], workload="till", batch_id="b4")
    names = ["b3", "b2", "b1", "b0", "b4"]
    claims = [context.ledger.claim(name, Stage.INGEST, "me") for name in names]
    assert all(isinstance(claim, Claim) for claim in claims)
    prepared = frontend.prepared_batches(context, claims, [None] * len(names))  # type: ignore[arg-type]
    columns = zip(prepared.claims, prepared.records, strict=True)
    assert [(c.batch_id, c.workload, c.records, rows["message"].to_list()) for c, rows in columns] == [
        ("b3", "shop", 1, ["disk full"]),
        ("b2", "shop", 1, ["disk full"]),
        ("b1", "till", 2, ["app: slow answer"] * 2),
        ("b0", "till", 1, ["app: slow answer"]),
        ("b0", "shop", 1, ["disk full"]),
        ("b4", "till", 2, ["shut", "open"]),
    ]
    assert passes == batches


def test_formats_are_looked_for_again_where_a_record_has_another_one() -> None:
    formats = KnownFormats()
    for raw, expected in ((ISO, "iso"), (JSON, "json")):
        framed = framed_by_workload([PushedRecords([None], raws=[raw], workloads=["till"])], formats)
        assert (framed.workloads, framed.formats[0][0]) == (["till"], expected)
        assert [rows["raw"].to_list() for rows in framed.records] == [[raw]]
