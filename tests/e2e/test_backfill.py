"""`logweir backfill` of a folder and of a bucket, with readers that are killed while they read."""

import argparse
import gzip
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from s3_server import S3Server

from e2e.harness import Up, running, sentence, until
from pipeline.commands.backfill import planning
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sources.backfill.archive import archive_of
from pipeline.sources.backfill.plans import Plans

ENV = {
    "LOGWEIR_READER_PROCESSES": "3",
    # Small batches that wait for each other, so that a reader is killed between two of them.
    "LOGWEIR_INTERNAL_BATCH_RECORDS": "200",
    "LOGWEIR_INTERNAL_MAX_PENDING_BATCHES": "6",
    "LOGWEIR_INTERNAL_LEASE_TTL_MS": "2000",
}
DAYS = 3


def entries(day: int, name: str) -> list[str]:
    return [
        f"2026-11-{day:02d}T10:{i // 60 % 60:02d}:{i % 60:02d}Z ERROR {name}: request {day}-{i} failed"
        + ("\n  at a.b.C(D.java:1)\n  at e.f.G(H.java:2)" if i % 10 == 0 else "")
        for i in range(2_000)
    ]


def objects() -> tuple[dict[str, bytes], Counter[str]]:
    """Log objects and their records."""
    found: dict[str, bytes] = {}
    records: Counter[str] = Counter()
    for day in range(1, DAYS + 1):
        for name, ending in (("plain", "log"), ("packed", "log.gz")):
            lines = entries(day, name)
            records.update(lines)
            text = "".join(line + "\n" for line in lines).encode()
            data = gzip.compress(text) if ending == "log.gz" else text
            found[f"{name}/{name}-2026-11-{day:02d}.{ending}"] = data
    return found, records


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.nightly)])
def bucket(request: pytest.FixtureRequest) -> S3Server | None:
    return request.getfixturevalue("s3_server") if request.param == "bucket" else None


@pytest.fixture
def up(bucket: S3Server | None) -> Iterator[Up]:
    with running({**ENV, **(bucket.environment() if bucket else {})}) as stack:
        yield stack


def put(bucket: S3Server | None, folder: Path, data: dict[str, bytes]) -> str:
    if bucket is None:
        for name, content in data.items():
            path = folder / "archive" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return str(folder / "archive")
    from pipeline.store.bucket import _client

    place = bucket.new_place()
    client = _client(bucket.bucket, place.rpartition("/")[2])
    for name, content in data.items():
        client.put(name, content)
    return place


def small_pieces(up: Up, place: str) -> Plans:
    """Makes the plan of the command with small pieces, which the command then goes on with."""
    flags = {
        "since": None, "until": None, "workload": None, "include": [], "exclude": [], "parallel": 3,
        "formats": None, "format": None, "time": None,
    }  # fmt: skip
    state = json.loads((up.data / "stack.json").read_text())
    settings = Settings(redis_url=state["redis_url"])
    plans = Plans(connect(settings), settings)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planning, "PIECE_BYTES", 60_000)
        planning.planned(argparse.Namespace(place=place, **flags), archive_of(place), plans, settings)
    return plans


def test_killed_readers_lose_and_double_no_line_of_an_archive(up: Up, bucket: S3Server | None) -> None:
    data, records = objects()
    victims = [up.pid("reader"), up.pid("reader-2")]
    with bucket.credentials() if bucket else nullcontext():
        place = put(bucket, up.folder, data)
        with up.frozen("ingest-1"):  # the pipeline fills up, and readers wait in the middle of their pieces
            plans = small_pieces(up, place)
            (name,) = plans.names()

            def waiting() -> bool:
                view = plans.view(name)
                assert view is not None and not view.over
                return len(view.reading) == 3 and any(one.lines and one.waits for one in view.reading)

            process = up.logweir.start("backfill", place, "--parallel", "3", "--json")
            until(waiting, what="three readers wait")
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
    assert process.wait(120) == 0, up.err()
    facts = json.loads((up.folder / "out").read_text())
    lines = sum(record.count("\n") + 1 for record in records)
    assert (facts["state"], facts["lines"], facts["failed"]) == ("complete", lines, 0)
    assert facts["pieces"] > len(data) and facts["done"] == facts["pieces"]
    for workload in ("plain", "packed"):
        totals = up.settled(workload)
        assert totals["accepted"] == totals["stored"] == lines // 2
        rows = up.rows(workload)
        assert rows.height == rows["record_id"].n_unique()
        assert Counter(rows["raw"].to_list()) == {r: n for r, n in records.items() if f" {workload}:" in r}
    again = up.logweir("backfill", place)
    assert again.returncode == 0 and "nothing is new" in again.stdout, (again.stdout, again.stderr)
    listed = json.loads(up.logweir("backfill", "--list", "--json").stdout)
    assert [(one["name"], one["state"], one["lines"]) for one in listed] == [(name, "complete", lines)]
    if bucket is None:
        _mistakes_are_said_in_a_sentence(up)


def _mistakes_are_said_in_a_sentence(up: Up) -> None:
    empty = up.folder / "empty"
    empty.mkdir()
    for args, word in (
        ((), "nothing is named to read"),
        ((up.folder / "nope",), "does not exist"),
        ((empty,), "has no object"),
        ((up.folder / "archive", "--since", "soon"), "--since 'soon' is neither"),
        ((up.folder / "archive", "--until", "2020-01-01"), "lies between"),
        ((up.folder / "archive", "--parallel", "1000"), "--parallel 1000"),
        (("--cancel", "nothing"), "there is no backfill 'nothing'"),
        (("--list", up.folder), "stand alone"),
        (("ftp://host/x",), "s3://bucket/prefix"),
    ):
        assert word in sentence(up.logweir("backfill", *args))
