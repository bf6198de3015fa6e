"""`logweir up | status | doctor`: the embedded stack and what is around it."""

import argparse
import importlib.metadata
import platform
import shutil
import sys
import time
from typing import Any, Final

from rich.table import Table

from pipeline.commands.common import cell, display, err, out, print_json, printable, reached, settings_of
from pipeline.errors import LogweirError
from pipeline.observe import set_up
from pipeline.settings import Settings, masked_url

NEEDED_DISK_MIB: Final = 500
CHECK_S: Final = 0.5


def main(args: argparse.Namespace) -> int:
    actions = {"up": _up, "status": _status, "doctor": _doctor}
    return actions[args.action](args)


def _up(args: argparse.Namespace) -> int:
    from pipeline.workers.local import Stack

    settings = settings_of(args, default_level="info")
    set_up(settings.log_level)
    console = err()
    with Stack(settings) as stack:
        facts = {
            "ready_s": round(stack.ready_s, 2),
            "redis_url": masked_url(stack.settings.redis_url or ""),
            "data_dir": str(stack.settings.data_dir),
            "workers": {c.name: c.process.pid for c in stack.children},
        }
        if args.json:
            print_json(facts)
            sys.stdout.flush()
        else:
            where = (
                "" if str(args.data_dir or "") == "" else f" --data-dir {display(stack.settings.data_dir)}"
            )
            console.print(f"ready in {stack.ready_s:.1f} s; Ctrl-C stops it", style="bold", markup=False)
            console.print(f"  send lines:  logweir send FILE{where}", markup=False, soft_wrap=True)
            console.print(f"  look at it:  logweir status{where}", markup=False, soft_wrap=True)
            console.print(
                f"  logs:        {display(stack.settings.data_dir / 'logs')}", markup=False, soft_wrap=True
            )
        try:
            while True:
                time.sleep(CHECK_S)
                stack.check()
        except KeyboardInterrupt:
            console.print("stopping: workers finish their step first", markup=False)
    return 0


def _status(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    facts = gather(settings)
    if args.json:
        print_json(facts)
        return 0
    console = out()
    model = facts["model"]
    console.print(
        f"model     {model['version']} since {model['published']}"
        if model
        else "model     none yet: lines are warming",
        markup=False,
    )
    training = facts["training"]
    console.print(f"training  {training['state']} {printable(training['reason'])}".rstrip(), markup=False)
    stages = ", ".join(f"{name} {n}" for name, n in facts["stages"].items() if n) or "nothing waits"
    console.print(
        f"waiting   {facts['batches']} batches, {facts['bytes'] / 2**20:.1f} MiB ({stages})", markup=False
    )
    if facts["trouble"]:
        console.print(f"trouble   {printable(facts['trouble']['reason'])}", style="red", markup=False)
    workers = Table("worker", "role", "pid", "queues", box=None, pad_edge=False)
    for worker in facts["workers"]:
        workers.add_row(
            *map(cell, (worker["name"], worker["role"], worker["pid"], " ".join(worker["queues"])))
        )
    console.print(workers)
    lines = Table(
        "workload",
        "accepted",
        "stored",
        "in flight",
        "dead",
        "anomalous",
        "warming",
        box=None,
        pad_edge=False,
    )
    for name, t in facts["workloads"].items():
        lines.add_row(
            cell(name),
            *(f"{t[c]:,}" for c in ("accepted", "stored", "in_flight", "dead", "anomalous", "warming")),
        )
    if facts["workloads"]:
        console.print(lines)
    return 0


def gather(settings: Settings) -> dict[str, Any]:
    """The facts of `status`, JSON-ready."""
    from dataclasses import asdict

    import redis

    from pipeline.errors import RedisUnavailable
    from pipeline.ledger import Ledger
    from pipeline.presence import Presence
    from pipeline.registry import Registry
    from pipeline.tasks.context import connect
    from pipeline.training import Status

    client = connect(settings)
    ledger, presence = Ledger(client, settings), Presence(client, settings)
    try:
        counts, live, trouble = ledger.counts(), Registry(client, settings).current(), presence.trouble()
        status = Status.from_redis(client.hgetall(ledger.keys.training))
        workers, totals = presence.live(), ledger.totals()
    except redis.RedisError as exc:
        raise RedisUnavailable(f"Redis does not answer ({exc}); start the stack with `logweir up`") from exc
    names = ("accepted", "stored", "dead", "discarded", "anomalous", "normal", "warming", "unclassified")
    workloads = {name: {n: t.get(n, 0) for n in names} for name, t in totals.items()}
    for t in workloads.values():
        t["in_flight"] = t["accepted"] - t["stored"] - t["dead"] - t["discarded"]
    return {
        "model": asdict(live) if live else None,
        "training": asdict(status) | {"state": status.state.value},
        "batches": counts.get("batches", 0),
        "bytes": counts.get("bytes", 0),
        "stages": {n.removeprefix("stage:"): c for n, c in counts.items() if n.startswith("stage:")},
        "warming_batches": ledger.warming(),
        "trouble": asdict(trouble) if trouble else None,
        "workers": [asdict(w) for w in workers],
        "workloads": workloads,
    }


def _doctor(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    checks = list(_checks(settings))
    bad = [c for c in checks if not c["ok"]]
    if args.json:
        print_json({"ok": not bad, "checks": checks})
        return 1 if bad else 0
    console = out()
    for check in checks:
        mark = "[green]ok[/]     " if check["ok"] else "[red]missing[/]"
        console.print(mark, end=" ")
        console.print(f"{check['what']}: {check['found']}", markup=False, soft_wrap=True)
    console.print(
        "everything is here" if not bad else f"{len(bad)} of {len(checks)} checks failed", markup=False
    )
    return 1 if bad else 0


def _checks(settings: Settings) -> "list[dict[str, Any]]":
    def check(what: str, ok: bool, found: str) -> dict[str, Any]:
        return {"what": what, "ok": ok, "found": found}

    found = [check("Python", sys.version_info >= (3, 11), platform.python_version())]
    for name in ("celery", "redis", "polars", "torch", "transformers", "drain3"):
        try:
            found.append(check(name, True, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(check(name, False, f"not installed; run: pip install {name}"))
    found.append(_redis_check(settings))
    try:
        new = not settings.data_dir.exists()
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        probe = settings.data_dir / ".probe"
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(settings.data_dir).free // 2**20
        if new:
            settings.data_dir.rmdir()  # looking is no reason to leave a directory behind
        enough = free >= NEEDED_DISK_MIB
        found.append(check("data directory", enough, f"{display(settings.data_dir)}, {free:,} MiB free"))
    except OSError as exc:
        found.append(
            check(
                "data directory",
                False,
                f"{settings.data_dir}: {exc.strerror}; choose another with --data-dir",
            )
        )
    try:
        from pipeline.drain.masking import MaskSet

        masks = MaskSet.load(extra=settings.masks)
        found.append(check("masks", True, f"{len(masks.tokens)} tokens, version {masks.version}"))
    except LogweirError as exc:
        found.append(check("masks", False, str(exc)))
    return found


def _redis_check(settings: Settings) -> dict[str, Any]:
    from pipeline.workers.redis_server import check_redis, find_server

    try:
        if settings.redis_url is not None:
            check_redis(settings)
            return {"what": "Redis", "ok": True, "found": "REDIS_URL answers"}
        return {"what": "Redis server", "ok": True, "found": str(find_server())}
    except LogweirError as exc:
        return {"what": "Redis", "ok": False, "found": str(exc)}
