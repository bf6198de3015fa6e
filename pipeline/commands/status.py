"""`logweir status`: which models are live, what trains and why (not), what waits, who works, and every workload's lines."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.commands.common import cell, out, print_json, printable, reached, settings_of
from pipeline.controller.trainings import TrainingState
from pipeline.settings import Settings
from pipeline.units import plural

COUNTED = (
    "accepted", "stored", "dead", "discarded", "skipped", "anomalous", "normal", "warming", "unclassified",
)  # fmt: skip


LATE_S = 30.0  # a watcher that has not been at it for so long is told of


def main(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    facts = gather(settings)
    if args.json:
        print_json(facts)
        return 0
    console = out()
    _models(console, facts)
    _trainings(console, facts)
    stages = ", ".join(f"{name} {n}" for name, n in facts["stages"].items() if n) or "nothing waits"
    console.print(
        f"waiting   {plural(facts['batches'], 'batch')}, {facts['bytes'] / 2**20:.1f} MiB ({stages})",
        markup=False,
    )
    _shards(console, facts["drain_shards"])
    _gpus(console, facts["gpus"])
    _watching(console, facts["watching"])
    if facts["dead"]["batches"]:
        dead = f"{plural(facts['dead']['batches'], 'batch')}, {facts['dead']['bytes'] / 2**20:.1f} MiB"
        console.print(f"dead      {dead}; `logweir dead list` shows them", markup=False, soft_wrap=True)
    if facts["closed"] is not None:
        why = f"{printable(facts['closed'])}; `logweir drain --undo` opens the door again"
        console.print(f"drained   nothing is taken in: {why}", style="yellow", markup=False, soft_wrap=True)
    elif facts["full"]:
        console.print(f"full      {facts['full']}", style="red", markup=False, soft_wrap=True)
    if facts["trouble"]:
        console.print(
            f"trouble   {printable(facts['trouble']['reason'])}", style="red", markup=False, soft_wrap=True
        )
    if facts["flower"]:
        console.print(f"watch it  {facts['flower']}", markup=False, soft_wrap=True)
    if facts["metrics"]:
        console.print(f"metrics   {facts['metrics']}", markup=False, soft_wrap=True)
    console.print()
    _workers(console, facts)
    _workloads(console, facts, settings)
    return 0


def _shards(console: Console, shards: Sequence[Mapping[str, Any]]) -> None:
    """Only where there are several: of one the stage says it all."""
    if len(shards) < 2:
        return
    parts = [f"{s['queue']} {s['messages']}{'' if s['served'] else ' (nobody serves it)'}" for s in shards]
    idle = any(not s["served"] for s in shards)
    text = f"drain     {', '.join(parts)}"
    console.print(text, style="red" if idle else None, markup=False, soft_wrap=True)


def _drain_shards(client: Any, settings: Settings, workers: Sequence[Any]) -> list[dict[str, Any]]:
    """Every shard's queue, what lies in it, and whether a worker that lives takes from it."""
    from pipeline.ledger.batches import Stage
    from pipeline.messages.routing import both, stage_queues
    from pipeline.redis.keys import Keys

    keys = Keys(settings.redis.key_prefix)
    served = {queue for worker in workers for queue in worker.queues}
    return [
        {
            "queue": queue,
            "messages": sum(int(client.llen(keys.kombu(name))) for name in both(queue)),
            "served": queue in served,
        }
        for queue in stage_queues(Stage.DRAIN, settings.drain.shards)
    ]


def _gpus(console: Console, gpus: Mapping[str, Any]) -> None:
    if not gpus["devices"]:
        return
    parts = [f"{gpus['usable']} of {gpus['devices']} usable", f"{gpus['leases']} leases"]
    parts += [f"{gpus['waiting']} waiting"] if gpus["waiting"] else []
    console.print(f"GPUs      {', '.join(parts)}; `logweir gpu top` shows them", markup=False, soft_wrap=True)
    for trouble in gpus["trouble"]:
        console.print(f"          {printable(trouble)}", style="red", markup=False, soft_wrap=True)


def _watching(console: Console, watching: Mapping[str, Any]) -> None:
    """Only where there is something to know: a session, an incident, a watcher that does not keep up."""
    parts = [
        plural(watching[name], word)
        for name, word in (("sessions", "open session"), ("incidents", "open incident"))
        if watching[name]
    ]
    late = watching["age_s"] > LATE_S
    if late:
        waits = plural(watching["observations"], "stored batch")
        parts.append(f"nobody has looked at them for {watching['age_s']:,.0f} s, {waits} wait")
    if watching["dropped"]:
        parts.append(f"{plural(watching['dropped'], 'batch')} dropped unseen")
    if parts:
        text = f"watching  {', '.join(parts)}"
        console.print(text, style="red" if late else None, markup=False, soft_wrap=True)


def _models(console: Console, facts: Mapping[str, Any]) -> None:
    if not facts["models"]:
        kept = facts["versions_on_disk"]
        hint = f"; {kept} on disk, `logweir models promote VERSION` takes one" if kept else ""
        console.print(f"model     none yet: lines are warming{hint}", markup=False, soft_wrap=True)
    for model in facts["models"]:
        name = "model" if model["model"] == "shared" else f"model of {printable(model['model'])}"
        since = _moment(model["published_ms"]) if model["published_ms"] else model["published"]
        how = "" if model["how"] == "published" else f", {model['how']}"
        console.print(f"{name:<9} {model['version']} since {since} UTC{how}", markup=False, soft_wrap=True)
    for version, why in facts["model_faults"].items():
        console.print(
            f"fault     {version} cannot be read, so another version serves: {printable(why)}",
            style="red", markup=False, soft_wrap=True,
        )  # fmt: skip


def _trainings(console: Console, facts: Mapping[str, Any]) -> None:
    console.print(f"training  {_training(facts['training'])}", markup=False, soft_wrap=True)
    if facts["trainings_waiting"] > 1:
        console.print(f"          {facts['trainings_waiting']} trainings wait", markup=False)
    for model, asked in facts["retrained"].items():
        whose = "" if model == "shared" else f"{printable(model)}: "
        why = f"{whose}trained because {printable(asked['reason'])}, {_iso(asked['at'])} UTC"
        console.print(f"decided   {why}", markup=False, soft_wrap=True)
    for model, decision in facts["decisions"].items():
        whose = "" if model == "shared" else f"{printable(model)}: "
        what = decision.get("why") or f"trains, because {decision.get('reason')}"
        until = decision.get("until")
        then = f"; looks again at {_iso(until)} UTC at the latest" if until else ""
        console.print(f"next      {whose}{printable(what)}{then}", markup=False, soft_wrap=True)


def _training(status: Mapping[str, Any]) -> str:
    state = status["state"]
    if state == TrainingState.NONE.value:
        return "none yet"
    whose = "" if status["model"] == "shared" else f" of {printable(status['model'])}"
    if state == TrainingState.QUEUED.value:
        later = f" since {_moment(status['created_ms'])} UTC"
        retry = f", try {status['attempt']}" if status["attempt"] > 1 else ""
        return f"queued{whose}{later}{retry}: {printable(status['why'])}".rstrip(": ")
    if status["ended_ms"]:
        at = _moment(status["ended_ms"])
        kept = "" if status["published"] or state != TrainingState.COMPLETED.value else " but not published"
        lines = f", {status['lines']:,} lines" if status["lines"] else ""
        why = f": {printable(status['reason'])}" if status["reason"] else ""
        return f"{state}{kept}{whose} at {at} UTC{lines}{why}"
    left = f", {status['remaining_s']:.0f} s left" if status["remaining_s"] else ""
    return (
        f"{state}{whose} {status['percent']:.0f} % after {status['elapsed_s']:.0f} s{left}, "
        f"{status['lines']:,} lines, asked by {status['asked_by']}: {printable(status['why'])}"
    )


def _workers(console: Console, facts: Mapping[str, Any]) -> None:
    table = Table("worker", "role", "pid", "queues", "serves", box=None, pad_edge=False)
    shared = next((m["version"] for m in facts["models"] if m["model"] == "shared"), "")
    for worker in facts["workers"]:
        serves = worker["serves"].get("shared", "")
        own = len(worker["serves"]) - ("shared" in worker["serves"])
        shown = f"{serves}{f' and {own} own' if own else ''}"
        row = (worker["name"], worker["role"], worker["pid"], " ".join(worker["queues"]), shown)
        table.add_row(*map(cell, row), style="yellow" if serves and serves != shared else None)
    console.print(table)


def _workloads(console: Console, facts: Mapping[str, Any], settings: Settings) -> None:
    # accepted = stored + in flight + dead + discarded + skipped: whatever is not zero shows.
    rare = [n for n in ("discarded", "skipped") if any(t[n] for t in facts["workloads"].values())]
    names = ["accepted", "stored", "in_flight", "dead", *rare, "anomalous", "warming"]
    table = Table("workload", *(n.replace("_", " ") for n in names), "watched", box=None, pad_edge=False)
    for name, t in facts["workloads"].items():
        table.add_row(cell(name), *(f"{t[n]:,}" for n in names), "yes" if t["watched"] else "")
    if facts["workloads"]:
        console.print()
        console.print(table)
    if settings.watch.unwatched == "skip" and not facts["watchlist"]["patterns"]:
        console.print(
            "nothing is watched and unwatched = skip, so every line is only counted; "
            "`logweir watch add NAME` changes that",
            style="red", markup=False, soft_wrap=True,
        )  # fmt: skip


def _moment(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _iso(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def _pool(client: Any, settings: Settings) -> dict[str, Any]:
    """The GPU pool in a few numbers."""
    from pipeline.gpu.leasing.pool_ledger import PoolLedger

    pool = PoolLedger(client, settings).snapshot()
    return {
        "devices": len(pool.devices),
        "usable": sum(device.usable for device in pool.devices),
        "leases": len(pool.leases),
        "waiting": len(pool.waiting),
        "trouble": [f"{d.name} of {d.node}: {d.why}" for d in pool.devices if d.why],
    }


def gather(settings: Settings) -> dict[str, Any]:
    """The facts of `status`, JSON-ready. Raises RedisUnavailable."""
    import redis

    from pipeline.controller.tick import decisions
    from pipeline.controller.trainings import Trainings
    from pipeline.controller.watchlist import Watchlist
    from pipeline.errors import RedisUnavailable
    from pipeline.ledger.ledger import Ledger
    from pipeline.models.registry import Registry
    from pipeline.observe.presence import Presence
    from pipeline.redis.attach import running
    from pipeline.redis.connection import connect

    client = connect(settings)
    stack = running(settings.data.dir) or {}
    ours = stack if stack.get("redis_url") == settings.redis.url else {}
    ledger, presence = Ledger(client, settings), Presence(client, settings)
    trainings, registry = Trainings(client, settings), Registry(client, settings)
    try:
        counts, trouble, totals = ledger.counts(), presence.trouble(), ledger.totals()
        models, faults, workers, serving = (
            registry.live(),
            registry.faults(),
            presence.live(),
            presence.serving(),
        )
        status, watched = trainings.now(), Watchlist(client, settings).look()
        decided, waiting = decisions(client, ledger.keys), int(client.zcard(ledger.keys.training_queue))
        asked = decisions(client, ledger.keys, "retrain")
        gpus, refusal, door = _pool(client, settings), ledger.refusal(), ledger.door()
        watching = ledger.watching()
        dead = int(client.zcard(ledger.keys.dead))
        shards = _drain_shards(client, settings, workers)
    except redis.RedisError as exc:
        raise RedisUnavailable(f"Redis does not answer ({exc}); start the stack with `logweir up`") from exc
    workloads: dict[str, dict[str, Any]] = {n: {c: t.get(c, 0) for c in COUNTED} for n, t in totals.items()}
    for name, t in workloads.items():
        t["in_flight"] = t["accepted"] - t["stored"] - t["dead"] - t["discarded"] - t["skipped"]
        t["watched"] = watched.covers(name)
    live_models = {model.version for model in models}
    return {
        "model": next((asdict(m) for m in models if m.model == "shared"), None),
        "models": [asdict(m) for m in models],
        "model_faults": {v: why for v, why in faults.items() if v in live_models},
        "training": asdict(status),
        "trainings_waiting": waiting,
        "decisions": decided,
        "retrained": {model: entry for model, entry in asked.items() if model in decided},
        "versions_on_disk": len(registry.versions()),
        "watchlist": {"version": watched.version, "patterns": list(watched.patterns)},
        "batches": counts.get("batches", 0),
        "bytes": counts.get("bytes", 0),
        "stages": {n.removeprefix("stage:"): c for n, c in counts.items() if n.startswith("stage:")},
        "dead": {"batches": dead, "bytes": counts.get("dead_bytes", 0)},
        "closed": door,
        "full": None if refusal is None else str(refusal),
        "warming_batches": ledger.warming(),
        "trouble": asdict(trouble) if trouble else None,
        "watching": watching,
        "drain_shards": shards,
        "gpus": gpus,
        "flower": ours.get("flower"),
        "metrics": ours.get("metrics"),
        "workers": [
            asdict(w) | {"serves": serving[w.name].versions if w.name in serving else {}} for w in workers
        ],
        "workloads": workloads,
    }
