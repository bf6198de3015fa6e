"""100 publishes under load: time until every worker answers under the new version; batches failed, lost,
doubled, stale.

A real `logweir up` with one small real model. Each further version is that bundle with slightly moved
weights, hashes and all, published under the training lease like a training's own, with the same hint. Lines
flow all the time, half of them never seen before, so that ingest, infer and drain all work; a new version has
an empty cache, so the other half is scored again after every publish. A swap is timed by Redis' clock on both
ends: from the pointer's move to the worker's word that it serves the version. With `--machines` further
stacks with data directories of their own share its Redis and a folder as store, and fetch each version."""

import argparse
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from safetensors.numpy import load_file, save_file

from bench._load import Fed, feed, stack, train
from bench._running import scratch
from bench._stored import stored_batches
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.messages.reload import announce
from pipeline.models import bundle
from pipeline.models.registry import Registry
from pipeline.observe.presence import Presence
from pipeline.records.batch import digest, utc_now
from pipeline.redis.connection import connect
from pipeline.redis.leases import TRAINING, Leases, granted
from pipeline.settings import Settings

PUBLISHES: Final = 100
BATCHES_EACH: Final = 4  # that come in between two publishes, at least
START_S: Final = 60.0  # until every worker serves the first version: torch is imported for it
SWAP_MOST_S: Final = 10.0  # a worker that needs longer counts with this
DRAINED_S: Final = 60.0
SERVING: Final = ("ingest", "infer-cpu", "infer-gpu", "drain")  # roles that answer under a model version


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """One publish: when the last ingest worker had it, and what each worker needed."""

    version: str
    ingest_ms: int  # Redis time
    waits_ms: dict[str, int]


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--machines", type=int, default=1, help="stacks with a data directory each (1)")


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder, ExitStack() as machines:
        shared = {"LOGWEIR_STORE_URL": (folder / "store").as_uri()} if args.machines > 1 else {}
        settings = machines.enter_context(stack(folder, **shared))
        if shared:
            settings = settings.replace(store_url=shared["LOGWEIR_STORE_URL"])
        for number in range(2, args.machines + 1):
            place = folder / f"machine-{number}"
            place.mkdir()
            machines.enter_context(stack(place, **shared, REDIS_URL=settings.redis.url or ""))
        train(folder, **shared)
        workers = _workers(settings)
        first = Registry(connect(settings), settings).current()
        if first is None:
            raise RuntimeError(
                "the first training published no model; look at its reason in `logweir models list`"
            )
        _swapped(settings, first.version, workers, within_s=START_S)
        fed = Fed()
        feeder = threading.Thread(target=feed, args=(settings, fed), daemon=True)
        feeder.start()
        began = time.monotonic()
        try:
            swaps = _publish_all(settings, first.version, workers, fed)
        finally:
            fed.stop.set()
            feeder.join(DRAINED_S)
        seconds = time.monotonic() - began
        return _judged(settings, fed, first.version, swaps, seconds)


def _workers(settings: Settings) -> tuple[str, ...]:
    presence = Presence(connect(settings), settings)
    return tuple(w.name for w in presence.live() if w.role in SERVING)


# ---- publishing ------------------------------------------------------------------------------------


def _publish_all(settings: Settings, source: str, workers: tuple[str, ...], fed: Fed) -> list[Swap]:
    client = connect(settings)
    registry, leases = Registry(client, settings), Leases(client, settings)
    app = make_app(settings)
    lease = granted(leases.request(TRAINING, "bench", floor=registry.newest_token()), "training")
    swaps = []
    with leases.holding(lease):
        for number in range(1, PUBLISHES + 1):
            version = registry.name(lease.token, digest("bench", str(number)))
            _next_version(registry, source, version, number)
            registry.publish(version, lease, at=utc_now())
            announce(app)
            swaps.append(_swapped(settings, version, workers))
            deadline = time.monotonic() + SWAP_MOST_S
            while len(fed.batches) < BATCHES_EACH * number:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no batch came in for {SWAP_MOST_S:.0f} s: the load has stopped")
                time.sleep(0.02)
    return swaps


def _next_version(registry: Registry, source: str, version: str, number: int) -> None:
    """The bundle once more under another name, its weights moved by a thousandth at most."""
    origin, manifest = registry.path(source), registry.manifest(source)
    weights = load_file(origin / bundle.WEIGHTS)
    rng = np.random.default_rng(number)
    moved = {
        name: (value * (1 + 1e-3 * rng.uniform(-1, 1, value.shape))).astype(value.dtype)
        if np.issubdtype(value.dtype, np.floating)
        else value
        for name, value in weights.items()
    }

    def copied(name: str) -> Any:
        return lambda path: path.write_bytes((origin / name).read_bytes())

    writers = {name: copied(name) for name in manifest.files}
    writers[bundle.WEIGHTS] = lambda path: save_file(moved, path)
    bundle.write_bundle(
        registry.path(version),
        writers=writers,
        manifest=lambda files: replace(
            manifest, version=version, parent=source, created=utc_now(), files=files
        ),
    )


def _swapped(
    settings: Settings, version: str, workers: tuple[str, ...], *, within_s: float = SWAP_MOST_S
) -> Swap:
    """Wait until every worker says that it serves the version."""
    client = connect(settings)
    live, presence = Registry(client, settings).current(), Presence(client, settings)
    if live is None or live.version != version:
        raise RuntimeError(f"{version} was published but {live} is live; does somebody else train here?")
    deadline = time.monotonic() + within_s
    waits: dict[str, int] = {}
    while len(waits) < len(workers) and time.monotonic() < deadline:
        for name, served in presence.serving().items():
            if name in workers and served.versions.get(live.model) == version:
                waits[name] = served.since_ms - live.published_ms
        time.sleep(0.02)
    waits = {name: waits.get(name, round(within_s * 1000)) for name in workers}
    last = max(ms for name, ms in waits.items() if name.startswith("ingest"))
    return Swap(version=version, ingest_ms=live.published_ms + last, waits_ms=waits)


# ---- what came of it -------------------------------------------------------------------------------


def _judged(settings: Settings, fed: Fed, first: str, swaps: list[Swap], seconds: float) -> dict[str, Any]:
    client = connect(settings)
    ledger = Ledger(client, settings)
    deadline = time.monotonic() + DRAINED_S
    while ledger.backlog.counts().get("batches", 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    pipe = client.pipeline(transaction=False)
    for batch_id in fed.batches:
        pipe.hmget(ledger.keys.batch(batch_id), "accepted_ms", "state")
    entries = dict(zip(fed.batches, pipe.execute(), strict=True))
    wanted = ["record_id", "lines", "model_version"]
    frames = [
        one.rows.select(wanted).with_columns(batch=pl.lit(one.batch_id))
        for one in stored_batches(settings)
        if one.rows["workload"][0].startswith("load")
    ]
    rows = pl.concat(frames)
    waits = np.array([ms for swap in swaps for ms in swap.waits_ms.values()])
    workers = sorted(swaps[0].waits_ms)
    by_worker = {name: round(float(np.percentile([s.waits_ms[name] for s in swaps], 99))) for name in workers}
    return {
        "publishes": len(swaps),
        "p99_ms": round(float(np.percentile(waits, 99))),
        "failed": sum(1 for _, state in entries.values() if state != b"done"),
        "lost": sum(fed.batches.values()) - int(rows.unique("record_id")["lines"].sum()),
        "doubled": rows.height - rows["record_id"].n_unique(),
        "stale_verdicts": _stale(rows, entries, first, swaps),
        "p50_ms": round(float(np.percentile(waits, 50))),
        "max_ms": int(waits.max()),
        "p99_ms_by_worker": by_worker,
        "batches": len(fed.batches),
        "versions_in_rows": rows["model_version"].n_unique(),
        "lines_per_s": round(rows.height / seconds),
        "workers": workers,
    }


def _stale(rows: pl.DataFrame, entries: dict[str, Any], first: str, swaps: list[Swap]) -> int:
    """Rows of batches that came in after every ingest worker had swapped, answered under an older version."""
    rank = {version: number for number, version in enumerate([first, *(s.version for s in swaps)])}
    stale = 0
    for (batch_id,), part in rows.group_by("batch"):
        accepted = int(entries[str(batch_id)][0])
        least = max((rank[s.version] for s in swaps if s.ingest_ms < accepted), default=0)
        stale += sum(1 for version in part["model_version"].to_list() if rank.get(version, -1) < least)
    return stale
