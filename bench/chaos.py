"""Breaks everything, continuously, by seed, while lines flow; then counts what is stored: nothing lost,
nothing doubled."""

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import redis

from bench._chaos import schedule
from bench._chaos.check import Report, check
from bench._chaos.disk import become_root
from bench._chaos.faults import Faults
from bench._chaos.flow import Flow
from bench._chaos.history import History
from bench._chaos.probe import Probe
from bench._chaos.producers import Poisoner, Push, Sender, known
from bench._chaos.schedule import Deck, Fault, kinds_of
from bench._chaos.servers import client_of
from bench._chaos.shippers import SHIPPERS, Shipper
from bench._chaos.stores import FILE, LOCAL, S3
from bench._chaos.world import Shape, World, clean_environment
from bench._chaos.writers import FileWriter, KafkaWriter, NatsWriter, Writer
from bench._rotation import STYLES, RotatedLog
from pipeline.producer import Producer

# (workload, s between batches, age of its lines in s): what is old waits behind what is fresh.
PUSHES: Final = (("shop", 1.0, 0.0), ("pay", 1.5, 0.0), ("mail", 2.0, 0.0), ("history", 3.0, 86_400.0))
SHIP_S: Final = 2.0  # between requests of a shipper
BASE_BATCHES: Final = 5
BASE_LINES: Final = 200
TRAIN_S: Final = 120.0
FLOW_S: Final = 60.0  # how long lines may take to flow again after the last fault
HEAL_S: Final = 40.0
APART_S: Final = 3.0
APART_MOST_S: Final = 120.0
# How soon lines must flow again after a single fault (issue 6), and where a time-out has to pass first.
FLOWS_P99_S: Final = 15.0
WAITING_P99_S: Final = 45.0


def options(parser: Any) -> None:
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="how long faults come; settling comes on top"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of all lines")
    parser.add_argument(
        "--replay", type=Path, metavar="HISTORY", help="machines and faults of an earlier run's history.jsonl"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="the next fault only when lines flow again after the last: shows how soon they do after any single one",
    )
    parser.add_argument("--machines", type=int, default=1, help="stacks with a data directory each")
    parser.add_argument(
        "--store",
        choices=(FILE, S3),
        help="a folder that all machines share, or a bucket of SeaweedFS; without it one machine has its own",
    )
    parser.add_argument(
        "--sentinel", action="store_true", help="three Redis servers and three sentinels, which fail over"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave history, logs and results there")


def failed(values: dict[str, Any]) -> bool:
    """Times are judged only where every fault was the only one."""
    found = values["recovery"]
    late = values["apart"] and not (
        found["n"] and found["p99"] <= FLOWS_P99_S and found["waiting"]["p99"] <= WAITING_P99_S
    )
    return bool(values["lost"] or values["doubled"] or values["violations"] or found["never"] or late)


def measure(_: Path, args: argparse.Namespace) -> dict[str, Any]:
    become_root()
    clean_environment()
    store = args.store or (FILE if args.machines > 1 else LOCAL)
    shape = Shape(machines=args.machines, store=store, sentinel=args.sentinel, brokers=True)
    seed, minutes = args.seed, args.minutes
    kinds = kinds_of(machines=shape.machines, store=shape.store, sentinel=shape.sentinel)
    deal = schedule.one_by_one if args.apart else schedule.schedule
    faults = deal(seed, minutes, deck=Deck(kinds=kinds, machines=shape.machines))
    if args.replay is not None:
        seed, minutes, faults = schedule.replay(args.replay)
        shape = Shape.replayed(args.replay)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="logweir-chaos-"))
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    try:
        return Run(folder=folder, shape=shape, seed=seed, minutes=minutes, faults=faults, apart=args.apart)()
    finally:
        if args.keep is not None:
            for part in ("history.jsonl", "redis", "data/logs", *(f.name for f in folder.glob("*.log"))):
                _copy(folder / part, args.keep / Path(part).name)
            for logs in folder.glob("machine-*/logs"):
                _copy(logs, args.keep / logs.parent.name)
            _copy(folder / "kept", args.keep / "results")
        shutil.rmtree(folder, ignore_errors=True)


def _interrupt(*_: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # whoever asks twice must not cut the cleaning up
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: it is called once."""

    folder: Path
    shape: Shape
    seed: int
    minutes: float
    faults: tuple[Fault, ...]
    apart: bool

    def __call__(self) -> dict[str, Any]:
        with (
            History(self.folder / "history.jsonl") as history,
            World(self.folder, history, minutes=self.minutes, shape=self.shape) as world,
        ):
            _say(f"the stack is ready; results on {world.store.kind}")
            history.note(
                "begin",
                seed=self.seed,
                minutes=self.minutes,
                settings=_shown(world),
                disk=world.store.kind,
                **asdict(self.shape),
            )
            _train(world, history, self.seed)
            return self._broken(world, history)

    def _broken(self, world: World, history: History) -> dict[str, Any]:
        """Lines flow while everything breaks; then they are counted."""
        began = time.monotonic()
        probe = Probe(history, world.direct, world.pids, intact=world.store.intact)
        probe.start()
        quick = client_of(world.servers.direct, timeout_s=1)
        flow = Flow(history, quick, world.direct.redis.key_prefix, alone=self.apart)
        flow.start()
        poisoner = Poisoner(history, world.settings, world.direct)
        kinds = kinds_of(machines=self.shape.machines, store=self.shape.store, sentinel=self.shape.sentinel)
        hurt = Faults(world, history, flow, poisoner, self.seed, kinds=kinds)
        producers = _producers(world, history, hurt, flow, self.seed)
        self._strike(hurt, flow, began)
        hurt.heal(HEAL_S)
        _say("all is healed; waiting until lines flow")
        _until(lambda: not flow.open(), FLOW_S)
        for one in producers:
            one.finish()
        for one in producers:
            one.join(FLOW_S)
        took_s, settled = _settle(world, producers, self.minutes)
        history.note("settled" if settled else "unsettled", after_s=took_s)
        _say(f"{'settled' if settled else 'did not settle'} within {took_s:.1f} s")
        flow.end()
        poisoner.end()
        probe.stop()
        history.note("end")
        report = check(history.path, world.direct, folders=world.folders())
        if self.shape.store != S3:
            with contextlib.suppress(OSError):
                shutil.copytree(Path(urlsplit(world.direct.data.results_url).path), self.folder / "kept")
        return _values(report, self.minutes, world, took_s, apart=self.apart)

    def _strike(self, hurt: Faults, flow: Flow, began: float) -> None:
        """Every fault at its time."""
        for fault in self.faults:
            if self.apart:
                _until(lambda: not hurt.busy() and not flow.open(), APART_MOST_S)
                time.sleep(APART_S)
            time.sleep(max(0.0, began + fault.at_s - time.monotonic()))
            at_s = time.monotonic() - began
            if at_s > self.minutes * 60:
                break
            hurt.begin(replace(fault, at_s=round(at_s, 3)) if self.apart else fault)
            _say(f"{at_s:7.1f} s  {fault.n:4d} {fault.kind} {fault.target}")
        time.sleep(max(0.0, began + self.minutes * 60 - time.monotonic()))


def _producers(world: World, history: History, hurt: Faults, flow: Flow, seed: int) -> list[Push | Writer]:
    """Services that push, shippers that send to the intake, some whose rotated logs are followed, one that
    writes to Kafka and one to NATS; all have begun."""

    def accepted(sent: Any) -> None:
        hurt.recent.append(sent.batch_id)
        flow.accepted(sent)

    producers: list[Push | Writer] = [
        Push(
            Sender(f"push-{name}", name, history, Producer.connect(world.settings), accepted),
            every_s=every_s,
            seed=seed,
            age_s=age_s,
        )
        for name, every_s, age_s in PUSHES
    ]
    ports = [machine.intake.port for machine in world.machines]
    for app in SHIPPERS:
        shipper = Shipper(app, ports)
        producers.append(
            Push(Sender(f"ship-{app}", shipper.workload, history, shipper), every_s=SHIP_S, seed=seed)
        )
    for style in STYLES:
        (folder := world.folder / style).mkdir()
        log = RotatedLog(folder, style, compress=style != "symlink")
        begun = partial(_accepted_some, world, style)
        producers.append(FileWriter(history, log, style, seed=seed, begun=begun))
        world.follow(log.path, style)
    if world.brokers is not None:
        producers.append(KafkaWriter(history, world.brokers.kafka, seed=seed))
        producers.append(NatsWriter(history, world.brokers.nats, seed=seed))
    for one in producers:
        one.start()
    return producers


def _accepted_some(world: World, workload: str) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(world.client.hget(f"{{chaos}}:totals:{workload}", "accepted"))
    return False


def _train(world: World, history: History, seed: int) -> None:
    """A model of normal lines, so that known and unknown lines both flow."""
    rng = random.Random(f"{seed} base")
    sender = Sender("base", "base", history, Producer.connect(world.settings))
    for _ in range(BASE_BATCHES):
        sender.send([known(rng) for _ in range(BASE_LINES)])
    wanted = str(BASE_BATCHES * BASE_LINES).encode()
    _until(lambda: world.client.hget("{chaos}:totals:base", "stored") == wanted, TRAIN_S)
    done = world.machines[0].logweir("train", timeout_s=TRAIN_S)
    if done.returncode != 0:
        raise RuntimeError(f"no model was trained: {done.stderr[-500:]}")
    _say("a model is trained")


def _settle(world: World, producers: list[Push | Writer], minutes: float) -> tuple[float, bool]:
    """Until nothing is in flight: how long it took, in s, and whether it came to that.

    The longer the run, the more may wait; a line that hangs takes two minutes to be buried whenever it came.
    """
    began = time.monotonic()
    written = {one.workload: one.written for one in producers if isinstance(one, Writer)}

    def done() -> bool:
        with contextlib.suppress(redis.RedisError):
            waiting = int(world.client.hget("{chaos}:counts", "batches") or 0)
            read = all(
                int(world.client.hget(f"{{chaos}}:totals:{name}", "accepted") or 0) >= lines
                for name, lines in written.items()
            )
            return waiting == 0 and world.client.zcard("{chaos}:warming") == 0 and read
        return False

    settled = _until(done, min(300.0, 180.0 + 30.0 * minutes))
    return round(time.monotonic() - began, 1), settled


def _until(done: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _shown(world: World) -> dict[str, str]:
    return world.direct.replace(redis_url=None).to_environ()


def _values(report: Report, minutes: float, world: World, settle_s: float, *, apart: bool) -> dict[str, Any]:
    if report.violations:
        print(f"violated: {report.first()}", file=sys.stderr)
        for violation in report.violations[1:]:
            print(f"also invariant {violation.invariant}: {violation.what}", file=sys.stderr)
    flows = report.recovery
    return {
        "faults": report.faults,
        "minutes": minutes,
        "accepted_lines": report.accepted_lines,
        "stored_lines": report.stored_lines,
        "lost": report.lost,
        "doubled": report.doubled,
        "dead": report.dead,
        "violations": len(report.violations),
        "recovery_p99_s": flows["p99"],
        "recovery_n": flows["n"],  # what the percentile is of; 0.0 of none
        # Where a lease has to run out first, or a socket's time-out.
        "recovery_waiting_p99_s": flows["waiting"]["p99"],
        "recovery_waiting_n": flows["waiting"]["n"],
        "apart": apart,
        "dead_poison": report.dead_poison,
        "settle_s": settle_s,
        "stack_starts": world.services.starts("up"),
        "redis_starts": world.services.starts("redis"),
        "disk": world.store.kind,
        "recovery": flows,
    }


def _copy(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
