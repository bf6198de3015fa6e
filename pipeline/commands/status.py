"""`logweir status`: live models, trainings and their reasons, waiting batches, workers, lines of each
workload. The exit code is 1 while no worker runs."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.table import Table

from pipeline.commands.common import answering_with, cell, out, print_json, printable, reading
from pipeline.controller.training_status import Status, TrainingState
from pipeline.redis.keys import SHARED
from pipeline.service.values import LeftOutLines, PoolCounts, StackStatus
from pipeline.units import plural, seconds, size

SHOWN_LEFT_OUT: Final = 5  # workloads
LATE_S: Final = 30.0  # a watcher's pause from which the status names it as late


def main(args: argparse.Namespace) -> int:
    status = reading(args).status()
    code = 0 if status.workers else 1
    with answering_with(code):
        if args.json:
            print_json(asdict(status))
        else:
            _print(status)
    return code


def _print(status: StackStatus) -> None:
    console = out()
    _models(console, status)
    _trainings(console, status)
    _intake(console, status)
    _results(console, status)
    if status.flower:
        console.print(f"watch it  {status.flower}", markup=False, soft_wrap=True)
    for url in status.intake:
        console.print(f"take in   {url}", markup=False, soft_wrap=True)
    if status.metrics:
        console.print(f"metrics   {status.metrics}", markup=False, soft_wrap=True)
    if status.api:
        console.print(f"ask it    {status.api}", markup=False, soft_wrap=True)
    console.print()
    _workers(console, status)
    _workloads(console, status)


def _intake(console: Console, status: StackStatus) -> None:
    """Batches that wait, by stage, and every reason why they do."""

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    stages = ", ".join(f"{name} {n}" for name, n in status.stages.items() if n) or "nothing waits"
    console.print(
        f"waiting   {plural(status.batches, 'batch')}, {status.bytes / 2**20:.1f} MiB ({stages})",
        markup=False,
    )
    _gpus(console, status.gpus)
    _watching(console, status.watching)
    for one in status.dropped:
        line(f"dropped   {one.count:,} {one.what}", "yellow")
    _left_out(console, status.left_out)
    if status.dead["batches"]:
        dead = f"{plural(status.dead['batches'], 'batch')}, {status.dead['bytes'] / 2**20:.1f} MiB"
        line(f"dead      {dead}; `logweir dead list` shows them")
    if status.closed is not None:
        why = f"{printable(status.closed)}; `logweir drain --undo` opens the door again"
        line(f"drained   nothing is taken in: {why}", "yellow")
    elif status.full:
        line(f"full      {status.full}", "red")
    if status.trouble:
        line(f"trouble   {printable(status.trouble.reason)}", "red")
    if status.redis_loss:
        line(f"lost      {status.redis_loss.sentence}", "yellow")


def _results(console: Console, status: StackStatus) -> None:
    """How much is stored, and for how long."""
    if status.results is None:
        return
    records, size_mib = status.results["rows"], status.results["bytes"] // 2**20
    kept = [f"{name} {seconds(length)}" for name, length in status.results_keep.items() if name != "size"]
    if bound := status.results_keep.get("size"):
        kept.append(f"at most {size(int(bound) // 2**20)}")
    text = f"{plural(records, 'record')} in {plural(status.results['files'], 'file')}, {size(size_mib)}"
    console.print(f"results   {text}; kept: {', '.join(kept) or 'for ever'}", markup=False, soft_wrap=True)


def _gpus(console: Console, gpus: PoolCounts) -> None:
    if not gpus.devices:
        return
    parts = [f"{gpus.usable} of {gpus.devices} usable", f"{gpus.leases} leases"]
    parts += [f"{gpus.waiting} waiting"] if gpus.waiting else []
    console.print(f"GPUs      {', '.join(parts)}; `logweir gpu top` shows them", markup=False, soft_wrap=True)
    for trouble in gpus.trouble:
        console.print(f"          {printable(trouble)}", style="red", markup=False, soft_wrap=True)


def _watching(console: Console, watching: Mapping[str, float]) -> None:
    """Silent without open sessions, open incidents and watcher lag."""
    parts = [
        plural(int(watching[name]), word)
        for name, word in (("sessions", "open session"), ("incidents", "open incident"))
        if watching[name]
    ]
    if kept := int(watching["kept_back"]):
        parts.append(f"{plural(kept, 'finding')} kept back by the alarm budget since the beginning")
    late = watching["age_s"] > LATE_S
    if late:
        waits = plural(int(watching["observations"]), "stored batch")
        parts.append(f"nobody has looked at them for {watching['age_s']:,.0f} s, {waits} wait")
    if parts:
        text = f"watching  {', '.join(parts)}"
        console.print(text, style="red" if late else None, markup=False, soft_wrap=True)


def _left_out(console: Console, left_out: Mapping[str, LeftOutLines]) -> None:
    """Lines that rates and numbers could not use as they are."""
    shown = [f"{printable(name)}: {'; '.join(one.sentences)}" for name, one in left_out.items()]
    if len(shown) > SHOWN_LEFT_OUT:
        more = len(shown) - SHOWN_LEFT_OUT
        shown[SHOWN_LEFT_OUT:] = [f"and lines of {plural(more, 'more workload')}"]
    for text in shown:
        console.print(f"left out  {text}", style="yellow", markup=False, soft_wrap=True)


def _models(console: Console, status: StackStatus) -> None:
    if not status.models:
        count = status.versions_stored
        hint = (
            f"; {count} in the store, `logweir models promote VERSION` takes one"
            if count
            else "; `logweir train` learns one"
        )
        console.print(f"model     none yet: lines are warming{hint}", markup=False, soft_wrap=True)
    for model in status.models:
        name = "model" if model.model == SHARED else f"model of {printable(model.model)}"
        since = _moment(model.published_ms) if model.published_ms else model.published
        how = "" if model.how == "published" else f", {model.how}"
        console.print(f"{name:<9} {model.version} since {since} UTC{how}", markup=False, soft_wrap=True)
    models = {model.version: model.model for model in status.models}
    for version, machines in status.model_faults.items():
        another = any(models.get(version) in worker.serves for worker in status.workers)
        so = "so another version serves there" if another else "and no other version serves"
        for machine, why in machines.items():
            text = f"fault     {version} cannot be read on {printable(machine)}, {so}: {printable(why)}"
            console.print(text, style="red", markup=False, soft_wrap=True)


def _trainings(console: Console, status: StackStatus) -> None:
    console.print(f"training  {_training(status.training)}", markup=False, soft_wrap=True)
    for text in status.training.not_judged:
        console.print(f"          {printable(text)}", style="yellow", markup=False, soft_wrap=True)
    if status.trainings_waiting > 1:
        console.print(f"          {status.trainings_waiting} trainings wait", markup=False)
    for model, entry in status.retrained.items():
        whose = "" if model == SHARED else f"{printable(model)}: "
        why = f"{whose}trained because {printable(entry['reason'])}, {_iso(entry['at'])} UTC"
        console.print(f"decided   {why}", markup=False, soft_wrap=True)
    for model, decision in status.decisions.items():
        whose = "" if model == SHARED else f"{printable(model)}: "
        text = decision.get("why") or f"trains, because {decision.get('reason')}"
        until = decision.get("until")
        then = f"; looks again at {_iso(until)} UTC at the latest" if until else ""
        console.print(f"next      {whose}{printable(text)}{then}", markup=False, soft_wrap=True)


def _training(training: Status) -> str:
    state = training.state
    if state is TrainingState.NONE:
        return "none yet"
    whose = "" if training.model == SHARED else f" of {printable(training.model)}"
    if state is TrainingState.QUEUED:
        later = f" since {_moment(training.created_ms)} UTC"
        retry = f", try {training.attempt}" if training.attempt > 1 else ""
        return f"queued{whose}{later}{retry}: {printable(training.why)}".rstrip(": ")
    if training.ended_ms:
        at = _moment(training.ended_ms)
        fate = " but not published" if state is TrainingState.COMPLETED and not training.published else ""
        records = f", {plural(training.lines, 'record')}" if training.lines else ""
        why = f": {printable(training.reason)}" if training.reason else ""
        return f"{state}{fate}{whose} at {at} UTC{records}{why}"
    remaining = f", {training.remaining_s:.0f} s left" if training.remaining_s else ""
    return (
        f"{state}{whose} {training.percent:.0f} % after {training.elapsed_s:.0f} s{remaining}, "
        f"{plural(training.lines, 'record')}, asked by {training.asked_by}: {printable(training.why)}"
    )


def _workers(console: Console, status: StackStatus) -> None:
    if not status.workers:
        console.print("no worker is running; start them with `logweir up`", style="red", markup=False)
        return
    table = Table("worker", "role", "pid", "queues", "serves", box=None, pad_edge=False)
    shared = "" if status.model is None else status.model.version
    for worker in status.workers:
        serves = worker.serves.get(SHARED, "")
        others = len(worker.serves) - (SHARED in worker.serves)
        text = f"{serves}{f' and {others} own' if others else ''}"
        row = (worker.name, worker.role, worker.pid, " ".join(worker.queues), text)
        table.add_row(*map(cell, row), style="yellow" if serves and serves != shared else None)
    console.print(table)


def _workloads(console: Console, status: StackStatus) -> None:
    # The columns that are rarely above 0 appear only when one is.
    rare = [n for n in ("discarded", "skipped") if any(getattr(w, n) for w in status.workloads.values())]
    names = ["accepted", "stored", "in_flight", "dead", *rare, "anomalous", "warming"]
    table = Table("workload", *(n.replace("_", " ") for n in names), "watched", box=None, pad_edge=False)
    for name, lines in status.workloads.items():
        numbers = (f"{getattr(lines, column):,}" for column in names)
        table.add_row(cell(name), *numbers, "yes" if lines.watched else "")
    if status.workloads:
        console.print()
        console.print("lines by workload", markup=False)  # of files and senders; a record may have several
        console.print(table)
    if status.unwatched == "skip" and not status.watchlist["patterns"]:
        console.print(
            "nothing is watched and unwatched = skip, so every line is only counted; "
            "`logweir watch add NAME` changes that",
            style="red", markup=False, soft_wrap=True,
        )  # fmt: skip


def _moment(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _iso(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
