"""Usage records on a real Redis and a store in a folder: each end of a lease is stored exactly once."""

import csv
import io
import json
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
import redis
from command_line import Verb
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.gpu.leasing.ended import LeaseEnd, UsageRecord
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.values import (
    Device,
    Grant,
    LeaseKind,
    LeaseMode,
    LeasePart,
    Need,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Report,
    Yield,
)
from pipeline.settings import Settings
from pipeline.sinks.choose import usage_of
from pipeline.sinks.compaction import vacuum
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.retention import GRACE_S, ORPHAN_S
from pipeline.sinks.usage import FOLDER, MERGE_PARTS, USAGE_SCHEMA, UsageTable, usage_sums
from pipeline.tasks import compact
from pipeline.tasks.context import Context
from pipeline.tasks.usage import drain_usage

NODES = {"a": ("GPU-0", "GPU-1"), "b": ("GPU-2",)}
MIB = 1024
START = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAY_S = 86_400.0


@pytest.fixture
def pool(client: "redis.Redis", settings: Settings) -> PoolLedger:
    return ready(PoolLedger(client, settings.replace(gpu_node_ttl_ms=60_000)))


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    context = Context(None, settings)
    yield context
    context.client.close()


@pytest.fixture
def table(tmp_path: Path) -> UsageTable:
    return UsageTable(ParquetSink(tmp_path / "results").objects)


def ready(pool: PoolLedger) -> PoolLedger:
    """A pool of the devices in NODES that grants at once."""
    pool.clear_quarantine()
    for node, uuids in NODES.items():
        devices = tuple(
            Device(
                uuid=uuid, node=node, index=n, name="A100", total_mib=MIB, schedulable_mib=MIB, processes=()
            )
            for n, uuid in enumerate(uuids)
        )
        assert pool.report(Report(node=node, agent=f"agent-{node}", clock_ms=0, devices=devices)) == ""
    return pool


def granted(pool: PoolLedger, name: str, *uuids: str, **need: object) -> PoolLease:
    """A lease on these devices."""
    values = {"memory_mib": 256, "compute_percent": 10, "devices": len(uuids)} | need
    asked = Need(**values)  # type: ignore[arg-type]
    request = PoolRequest(request_id=name, holder=f"holder of {name}", need=asked, ttl_ms=60_000)
    assert pool.wait(request, 60_000) is None
    whole = asked.mode is LeaseMode.EXCLUSIVE
    memory, compute = (MIB, 100) if whole else (asked.memory_mib, asked.compute_percent)
    parts = tuple(LeasePart(uuid=uuid, memory_mib=memory, compute_percent=compute) for uuid in uuids)
    plan = PoolPlan(grants=(Grant(request_id=name, parts=parts, share=0.1, prepaid=1.0),))
    done = pool.commit(pool.snapshot().epoch, plan)
    assert done.why == ""
    return done.leases[0]


def now_ms(pool: PoolLedger) -> int:
    seconds, micros = pool.client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def backdate(pool: PoolLedger, lease: PoolLease, ms_ago: int) -> None:
    """As if the lease had been granted so long ago."""
    key = pool.keys.gpu("leases")
    text = json.loads(pool.client.hget(key, lease.lease_id) or b"")
    pool.client.hset(key, lease.lease_id, json.dumps(text | {"granted_ms": text["granted_ms"] - ms_ago}))


def stored(context: Context) -> list[dict[str, object]]:
    drain_usage(context)
    return context.usage_table.scan().sort("ended_at", "token", "device").collect().to_dicts()


def record(number: int = 0, **changes: object) -> UsageRecord:
    """A record of an hour's use of a quarter of a device, which ended at START."""
    at = int(START.timestamp() * 1000)
    plain = UsageRecord(
        lease_id=f"l{number}", token=number, holder="h", tenant="logweir", kind=LeaseKind.USER, mode=LeaseMode.SHARED,
        node="a", device="GPU-0", device_name="A100", memory_mib=2048, compute_percent=0, share=0.25,
        granted_ms=at - 3_600_000, ended_ms=at, ended=LeaseEnd.RELEASED,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


# The end of a lease


def test_a_released_lease_has_one_record_with_all_that_it_had(pool: PoolLedger, context: Context) -> None:
    lease = granted(pool, "job", "GPU-2", tenant="research", kind=LeaseKind.TRAIN)
    backdate(pool, lease, 90_000)
    before = now_ms(pool)
    assert pool.release(lease)
    (row,) = stored(context)
    seconds = row.pop("seconds")
    granted_at, ended_at = row.pop("granted_at"), row.pop("ended_at")
    assert isinstance(granted_at, datetime) and isinstance(ended_at, datetime) and isinstance(seconds, float)
    assert granted_at.timestamp() * 1000 == pytest.approx(lease.granted_ms - 90_000)
    assert before <= ended_at.timestamp() * 1000 + 0.5 <= now_ms(pool) + 1
    assert seconds == pytest.approx((ended_at - granted_at).total_seconds())
    assert row == {
        "lease_id": "job", "token": lease.token, "holder": "holder of job", "tenant": "research", "kind": "train",
        "mode": "shared", "node": "b", "device": "GPU-2", "device_name": "A100", "memory_mib": 256,
        "compute_percent": 10, "share": 0.25, "ended": "released",
    }  # fmt: skip


def test_every_way_to_end_leaves_one_record_that_names_it(pool: PoolLedger, context: Context) -> None:
    deadlines = pool.keys.gpu("deadlines")
    names = ("released", "abandoned", "swept", "asked again", "revoked", "unyielding", "silent", "restart")
    leases = {
        name: granted(pool, name, "GPU-2" if name == "silent" else "GPU-0", memory_mib=64) for name in names
    }
    pool.release(leases["released"])
    pool.release(leases["released"])
    pool.abandon("abandoned", "holder of abandoned")
    pool.revoke("revoked", "an operator wants it")
    late = now_ms(pool)
    for name in ("swept", "asked again"):
        backdate(pool, leases[name], 50_000)
        pool.client.zadd(deadlines, {name: late - 20_000})
    pool.wait(PoolRequest(request_id="asked again", holder="holder of asked again", need=Need(), ttl_ms=1), 1)
    pool.commit(
        pool.snapshot().epoch, PoolPlan(yields=(Yield(lease_id="unyielding", by_ms=late - 1, why=""),))
    )
    pool.client.zadd(pool.keys.gpu("beats"), {"b": late - 10_000_000})
    pool.sweep()
    pool.clear_quarantine()
    rows = {str(row["lease_id"]): row for row in stored(context)}
    assert len(rows) == context.usage_table.scan().collect().height == len(names)
    assert {name: row["ended"] for name, row in rows.items()} == {
        "released": "released", "abandoned": "released", "swept": "expired", "asked again": "expired",
        "revoked": "revoked", "unyielding": "revoked", "silent": "node_lost", "restart": "restart",
    }  # fmt: skip
    # A lease that nobody renewed ends at its deadline, however late the sweep comes.
    for name in ("swept", "asked again"):
        span_ms = late - 20_000 - (leases[name].granted_ms - 50_000)
        assert rows[name]["seconds"] == pytest.approx(span_ms / 1000)


def test_a_gang_has_a_record_on_each_device_and_counts_as_one_lease(
    pool: PoolLedger, context: Context
) -> None:
    gang = granted(pool, "gang", "GPU-0", "GPU-2", mode=LeaseMode.EXCLUSIVE, memory_mib=0)
    backdate(pool, gang, 3_600_000)
    pool.release(gang)
    rows = stored(context)
    assert [(row["node"], row["device"], row["share"], row["memory_mib"]) for row in rows] == [
        ("a", "GPU-0", 1.0, MIB),
        ("b", "GPU-2", 1.0, MIB),
    ]
    (sums,) = usage_sums(context.usage_table, "tenant").to_dicts()
    assert sums["leases"] == 1
    assert sums["lease_hours"] == sums["gpu_hours"] == sums["gib_hours"] == pytest.approx(2.0, abs=0.01)


ENDS = ("release", "expire", "revoke", "again")


@examples(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(ENDS), st.integers(1, 10**9), st.integers(1, 3)), max_size=12),
    st.randoms(),
)
def test_the_sum_of_the_records_is_the_sum_of_the_leases(
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    ends: list[tuple[str, int, int]],
    chance: random.Random,
) -> None:
    own = Settings(
        redis_url=redis_url, key_prefix=f"t{uuid.uuid4().hex[:12]}", data_dir=tmp_path_factory.mktemp("u"),
        gpu_node_ttl_ms=60_000,
    )  # fmt: skip
    context = Context(None, own)
    pool = ready(PoolLedger(context.client, own))
    low_ms = high_ms = parts = 0
    for end, ms_ago, many in ends:
        # The same name comes again and again: only the token tells those leases apart.
        lease = granted(pool, "job", *("GPU-0", "GPU-1", "GPU-2")[:many])
        backdate(pool, lease, ms_ago)
        since, before = lease.granted_ms - ms_ago, now_ms(pool)
        if end == "expire":
            stop = before - chance.randrange(ms_ago)
            pool.client.zadd(pool.keys.gpu("deadlines"), {"job": stop})
            pool.sweep()
            low_ms, high_ms = low_ms + many * (stop - since), high_ms + many * (stop - since)
        else:
            pool.revoke("job", "why") if end == "revoke" else pool.release(lease)
            low_ms, high_ms = low_ms + many * (before - since), high_ms + many * (now_ms(pool) - since)
        parts += many
        if end == "again":  # a drain between two ends, or not
            drain_usage(context)
    found = pl.DataFrame(stored(context), schema=USAGE_SCHEMA)
    assert found.height == parts
    assert low_ms - 0.5 <= found["seconds"].sum() * 1000 <= high_ms + 0.5
    # What budgets count agrees with the records, day by day; a part of a lease is rounded to a millisecond.
    days = {
        row["day"]: row["gpu_hours"] * 3_600_000 for row in usage_sums(context.usage_table, "day").to_dicts()
    }
    spent = {
        (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=int(name.split()[0]))).strftime("%Y-%m-%d"): int(
            ms
        )
        for name, ms in pool.client.hgetall(pool.keys.gpu("spent")).items()
    }
    assert {day for day, ms in days.items() if ms > parts} <= set(spent)
    for day, ms in spent.items():
        assert ms == pytest.approx(days[day], abs=parts)
    context.client.close()


# Exactly once

KILLED = """
import os, signal, sys
from pipeline.gpu.leasing.ended import EndedLeases
from pipeline.settings import Settings
from pipeline.tasks.context import Context
from pipeline.tasks.usage import drain_usage
EndedLeases.remove = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
drain_usage(Context(None, Settings.load()))
"""


def test_a_kill_between_the_store_and_redis_doubles_nothing(
    pool: PoolLedger, context: Context, settings: Settings
) -> None:
    for name in ("x", "y"):
        pool.release(granted(pool, name, "GPU-0"))
    killed = subprocess.run([sys.executable, "-c", KILLED], env=settings.to_environ(), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert context.usage_table.scan().collect().height == 2 == context.ended_leases.count()
    pool.release(granted(pool, "z", "GPU-0"))
    assert [row["lease_id"] for row in stored(context)] == ["x", "y", "z"]
    assert context.ended_leases.count() == 0


def test_a_lease_whose_end_redis_forgot_keeps_its_first_end(
    pool: PoolLedger, context: Context, table: UsageTable
) -> None:
    lease = granted(pool, "job", "GPU-0")
    before = pool.client.hget(pool.keys.gpu("leases"), "job")
    pool.release(lease)
    (first,) = stored(context)
    # As after the loss of Redis's last second: the lease lives again, and its end is unknown.
    pool.client.hset(pool.keys.gpu("leases"), "job", before or b"")
    pool.client.zadd(pool.keys.gpu("deadlines"), {"job": now_ms(pool) + 60_000})
    pool.revoke("job", "its holder has gone")
    assert stored(context) == [first]


def test_two_writers_at_once_store_each_record_once(table: UsageTable) -> None:
    class Slow(UsageTable):
        def _identities(self, *args: object) -> pl.DataFrame:
            found = super()._identities(*args)  # type: ignore[arg-type]
            if not first:
                first.append(table.add([record(1), record(2)]))  # the other one is first
            return found

    first: list[int] = []
    assert Slow(table.objects).add([record(2), record(3), record(3)]) == 1
    assert first == [2]
    assert sorted(table.scan().collect()["lease_id"]) == ["l1", "l2", "l3"]
    files = [one.key for one in table.objects.found(FOLDER)]
    assert len(files) == 3, "two parts and the manifest: the file of the lost swap is away"


def test_a_stack_per_machine_and_one_store_give_one_sum(
    redis_url: str, client: "redis.Redis", tmp_path: Path
) -> None:
    store = f"file://{tmp_path}/shared"
    stacks = []
    for name in ("one", "two"):
        own = Settings(
            redis_url=redis_url, key_prefix=f"t{uuid.uuid4().hex[:12]}", data_dir=tmp_path / name, store_url=store
        )  # fmt: skip
        stacks.append((ready(PoolLedger(client, own)), Context(None, own)))
    for pool, context in stacks:
        lease = granted(pool, "job", "GPU-0")
        backdate(pool, lease, 1_800_000)
        pool.release(lease)
        compact.run(context)
    answers = [usage_sums(context.usage_table, "node").to_dicts() for _, context in stacks]
    assert answers[0] == answers[1]
    assert [(row["node"], row["leases"]) for row in answers[0]] == [("a", 2)]
    assert answers[0][0]["lease_hours"] == pytest.approx(1.0, abs=0.01)
    for _, context in stacks:
        context.client.close()


def test_records_wait_in_redis_while_the_store_is_away(
    pool: PoolLedger, settings: Settings, tmp_path: Path
) -> None:
    place = tmp_path / "store"
    place.write_text("no folder")
    context = Context(
        None,
        settings.replace(
            store_url=f"file://{place}", sinks=("opensearch",), opensearch_url="http://127.0.0.1:9"
        ),
    )
    pool.release(granted(pool, "job", "GPU-0"))
    compact.run(context)
    trouble = context.presence.trouble()
    assert trouble is not None and trouble.stage == "usage" and str(place) in trouble.reason
    assert context.ended_leases.count() == 1
    place.unlink()
    compact.run(context)
    assert context.ended_leases.count() == 0
    assert context.usage_table.scan().collect().height == 1
    context.client.close()


def test_the_stream_is_bounded_and_counts_what_it_loses(
    pool: PoolLedger, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.redis import scripts

    text = scripts.script_text
    monkeypatch.setattr(
        scripts, "script_text", lambda name: text(name).replace("RECORDS_MAX = 50000", "RECORDS_MAX = 2")
    )
    for name in ("x", "y", "z"):
        pool.release(granted(pool, name, "GPU-0"))
    pool.sweep()
    assert [row["lease_id"] for row in stored(context)] == ["y", "z"]
    assert pool.client.hget(pool.keys.gpu("sums"), "lost") == b"1"


# The table


def test_small_parts_of_a_day_become_one_and_the_old_files_go_after_a_while(table: UsageTable) -> None:
    for number in range(MERGE_PARTS):
        table.add([record(number)])
    table.add(
        [record(99, ended_ms=record().ended_ms - 86_400_000, granted_ms=record().granted_ms - 86_400_000)]
    )
    now = START.timestamp() + 60
    before = usage_sums(table, "device")
    table.maintain(None, now)
    parts = table.manifest().parts
    assert sorted((part.day, part.rows) for part in parts) == [("2026-11-19", 1), ("2026-11-20", MERGE_PARTS)]
    assert usage_sums(table, "device").equals(before)
    rows = pl.read_parquet(Path(table.objects.url.removeprefix("file://")) / parts[-1].name)
    assert rows["lease_id"].is_sorted(), "of one tenant, device and moment"
    edits = table.manifest().edits
    table.maintain(None, now + GRACE_S - 1)
    assert table.manifest().edits == edits, "nothing is due"
    after = time.time() + ORPHAN_S + GRACE_S
    table.maintain(None, after)
    table.maintain(None, after)
    assert len(list(table.objects.found(FOLDER))) == len(table.manifest().parts) + 1
    assert usage_sums(table, "device").equals(before)


def test_records_leave_thirteen_months_after_the_end_of_their_lease(
    table: UsageTable, settings: Settings
) -> None:
    from pipeline.settings.values import kept_results

    keep_s = kept_results(settings.data.results_keep)["usage"]
    assert keep_s == 395 * DAY_S
    table.add([record(1)])
    table.maintain(keep_s, START.timestamp() + keep_s - 1)
    assert table.scan().collect().height == 1
    table.maintain(keep_s, START.timestamp() + keep_s + 1)
    assert table.scan().collect().height == 0


def test_a_damaged_file_is_named_and_an_absent_one_left_out(table: UsageTable) -> None:
    table.add([record(1)])
    table.add([record(2)])
    first = table.manifest().parts[0].name
    table.objects.put(first, b"no parquet")
    with pytest.raises(BadPayload, match="restore the damaged file, or remove it"):
        usage_sums(table, "tenant")
    table.objects.delete(first)
    assert usage_sums(table, "tenant")["leases"].to_list() == [1]
    table.maintain(None, START.timestamp() + 2 * DAY_S)
    assert len(table.manifest().parts) == 2, "no merge forgets a file that may come back"


def test_the_results_of_a_run_hold_no_records_of_use(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "results")
    UsageTable(sink.objects).add([record(1)])
    vacuum(sink)
    assert list((tmp_path / "results").rglob("*.parquet")) == []


def test_a_lease_counts_only_for_the_part_of_it_that_lies_in_the_span(table: UsageTable) -> None:
    table.add([record(1), record(2, tenant="research", granted_ms=record().ended_ms - 7_200_000, share=1.0)])
    half = timedelta(minutes=30)
    sums = usage_sums(table, "tenant", START - 3 * half, START - half)
    assert sums.to_dicts() == [
        {"tenant": "research", "leases": 1, "lease_hours": 1.0, "gpu_hours": 1.0, "gib_hours": 2.0},
        {"tenant": "logweir", "leases": 1, "lease_hours": 0.5, "gpu_hours": 0.125, "gib_hours": 1.0},
    ]
    assert usage_sums(table, "tenant", START + half).is_empty()
    assert usage_sums(table, "tenant", None, START - 5 * half).is_empty()


# The command and the metrics


def test_the_command_prints_sums_as_a_table_as_csv_and_as_json(logweir: Verb, settings: Settings) -> None:
    assert "no ended leases in this span" in logweir("gpu", "usage").out
    table = usage_of(settings)
    table.add([record(1), record(2, tenant="=cmd", kind=LeaseKind.INFER)])
    said = logweir("gpu", "usage")
    assert said.code == 0 and said.out.splitlines()[0].split() == [
        "tenant",
        "leases",
        "lease-hours",
        "GPU-hours",
        "GiB-hours",
    ]
    assert ["logweir", "1", "1.00", "0.25", "2.00"] in [line.split() for line in said.out.splitlines()]
    assert "in all 0.50 GPU-hours and 4.00 GiB-hours" in said.out
    told = json.loads(logweir("gpu", "usage", "--json", "--by", "kind", "--since", "2026-11-20T11:30").out)
    assert (told["by"], told["since"]) == ("kind", "2026-11-20T11:30:00+00:00")
    assert [(row["kind"], row["lease_hours"]) for row in told["usage"]] == [("infer", 0.5), ("user", 0.5)]
    rows = list(csv.DictReader(io.StringIO(logweir("gpu", "usage", "--csv").out)))
    assert [(row["tenant"], row["gpu_hours"]) for row in rows] == [
        ("'=cmd", "0.250000"),
        ("logweir", "0.250000"),
    ]
    both = logweir("gpu", "usage", "--csv", "--json")
    assert (both.code, "choose one of them" in both.err) == (2, True)
    assert logweir("gpu", "usage", "--since", "soon").code == 2


def test_the_store_and_status_show_the_records_and_how_long_they_stay(
    logweir: Verb, settings: Settings
) -> None:
    usage_of(settings).add([record(1), record(2)])
    assert "usage     2 records of GPU use" in logweir("store").out
    assert "usage 395 d" in logweir("status").out


def test_prometheus_gets_device_seconds_of_the_tenants_in_the_settings(
    pool: PoolLedger, settings: Settings
) -> None:
    from pipeline.workers.scrape import Scrape

    for name, tenant in (("x", "research"), ("y", "nobody"), ("z", "logweir")):
        lease = granted(pool, name, "GPU-0", tenant=tenant, kind=LeaseKind.TRAIN)
        backdate(pool, lease, 400_000)
        pool.release(lease)
    scrape = Scrape(pool.client, settings.replace(gpu_tenants=("research=2",)))
    family = next(one for one in scrape.collect() if one.name == "logweir_gpu_seconds")
    found = {(one.labels["tenant"], one.labels["kind"]): one.value for one in family.samples}
    assert set(found) == {
        (t, k) for t in ("logweir", "research", "other") for k in ("train", "infer", "serve", "user")
    }
    for tenant in ("logweir", "research", "other"):
        assert found[tenant, "train"] == pytest.approx(100, abs=1)
        assert found[tenant, "user"] == 0


def test_a_lease_over_midnight_counts_for_both_days(table: UsageTable) -> None:
    late = datetime(2026, 11, 20, 22, tzinfo=UTC)
    table.add([
        between(1, late, late + timedelta(hours=27)),  # to 01:00 of the day after the next
        between(2, late, late + timedelta(hours=2)),  # to midnight, and no further
    ])  # fmt: skip
    days = usage_sums(table, "day").to_dicts()
    assert [(row["day"], row["leases"], row["lease_hours"]) for row in days] == [
        ("2026-11-20", 2, 4.0),
        ("2026-11-21", 1, 24.0),
        ("2026-11-22", 1, 1.0),
    ]
    cut = usage_sums(table, "day", late + timedelta(hours=1), late + timedelta(hours=3)).to_dicts()
    assert [(row["day"], row["lease_hours"]) for row in cut] == [("2026-11-20", 2.0), ("2026-11-21", 1.0)]


def between(number: int, start: datetime, end: datetime) -> UsageRecord:
    return replace(
        record(number), granted_ms=round(start.timestamp() * 1000), ended_ms=round(end.timestamp() * 1000)
    )


def test_a_hundred_leases_of_random_length_are_replayed_to_the_second(table: UsageTable) -> None:
    chance = random.Random(22)
    history: list[tuple[datetime, datetime, str]] = []
    records: list[UsageRecord] = []
    for number in range(100):
        start = START + timedelta(milliseconds=chance.randrange(5 * 86_400_000))
        end = start + timedelta(milliseconds=chance.randrange(2 * 86_400_000))
        user = f"{chance.choice(['ann', 'bob'])}@a"
        history.append((start, end, user))
        records.append(replace(between(number, start, end), holder=f"{user}:{number}"))
    for first in range(0, 100, 25):
        table.add(records[first : first + 30])  # some come twice
    since, until = START + timedelta(hours=7), START + timedelta(days=4, minutes=1)
    # The replay walks each lease hour by hour and knows nothing of the table.
    by_day: dict[str, float] = {}
    by_user: dict[str, float] = {}
    for start, end, user in history:
        at = max(start, since)
        while at < min(end, until):
            following = min(at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1), end, until)
            length_s = (following - at).total_seconds()
            by_day[f"{at:%Y-%m-%d}"] = by_day.get(f"{at:%Y-%m-%d}", 0.0) + length_s
            by_user[user] = by_user.get(user, 0.0) + length_s
            at = following
    for column, replayed in (("day", by_day), ("user", by_user)):
        found = {
            row[column]: row["lease_hours"] * 3600
            for row in usage_sums(table, column, since, until).to_dicts()
        }
        assert found == pytest.approx(replayed, abs=1e-3)
