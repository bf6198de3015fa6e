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
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench._chaos import schedule
from bench._chaos.check import Report, check
from bench._chaos.disk import become_root
from bench._chaos.faults import Faults
from bench._chaos.flow import Flow
from bench._chaos.history import History
from bench._chaos.probe import Probe
from bench._chaos.producers import FileWriter, Poisoner, Push, Sender, known
from bench._chaos.schedule import Fault
from bench._chaos.world import World, clean_environment
from pipeline.producer import Producer

# (workload, s between batches, age of its lines in s): what is old waits behind what is fresh.
PUSHES: Final = (("shop", 1.0, 0.0), ("pay", 1.5, 0.0), ("mail", 2.0, 0.0), ("history", 3.0, 86_400.0))
FILE_EVERY_S: Final = 1.0
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
        "--replay", type=Path, metavar="HISTORY", help="the faults of an earlier run's history.jsonl"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="the next fault only when lines flow again after the last: shows how soon they do after any single one",
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
    seed, minutes = args.seed, args.minutes
    faults = (schedule.one_by_one if args.apart else schedule.schedule)(seed, minutes)
    if args.replay is not None:
        seed, minutes, faults = schedule.replay(args.replay)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="logweir-chaos-"))
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    try:
        return _run(folder, seed, minutes, faults, apart=args.apart)
    finally:
        if args.keep is not None:
            for part in ("history.jsonl", "up.log", "follow.log", "redis/redis.log", "data/logs"):
                _copy(folder / part, args.keep / Path(part).name)
            _copy(folder / "kept", args.keep / "results")
        shutil.rmtree(folder, ignore_errors=True)


def _interrupt(*_: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # whoever asks twice must not cut the cleaning up
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(
    folder: Path, seed: int, minutes: float, faults: tuple[Fault, ...], *, apart: bool
) -> dict[str, Any]:
    with History(folder / "history.jsonl") as history, World(folder, history, minutes=minutes) as world:
        _say(f"the stack is ready; results on {world.disk.kind}")
        history.note("begin", seed=seed, minutes=minutes, settings=_shown(world), disk=world.disk.kind)
        _train(world, history, seed)
        began = time.monotonic()
        probe = Probe(history, world.direct, world.pids)
        probe.start()
        flow = Flow(history, _quick(world), world.direct.redis.key_prefix, alone=apart)
        flow.start()
        poisoner = Poisoner(history, world.settings, world.direct)
        hurt = Faults(world, history, flow, poisoner, seed)

        def accepted(sent: Any) -> None:
            hurt.recent.append(sent.batch_id)
            flow.accepted(sent)

        producers: list[Push | FileWriter] = [
            Push(
                Sender(f"push-{name}", name, history, Producer.connect(world.settings), accepted),
                every_s=every_s,
                seed=seed,
                age_s=age_s,
            )
            for name, every_s, age_s in PUSHES
        ]
        log = folder / "app.log"
        log.touch()
        producers.append(FileWriter(history, log, "followed", every_s=FILE_EVERY_S, seed=seed))
        for one in producers:
            one.start()
        world.follow(log, "followed")
        for fault in faults:
            if apart:
                _until(lambda: not hurt.busy() and not flow.open(), APART_MOST_S)
                time.sleep(APART_S)
            time.sleep(max(0.0, began + fault.at_s - time.monotonic()))
            at_s = time.monotonic() - began
            if at_s > minutes * 60:
                break
            hurt.begin(replace(fault, at_s=round(at_s, 3)) if apart else fault)
            _say(f"{at_s:7.1f} s  {fault.n:4d} {fault.kind} {fault.target}")
        time.sleep(max(0.0, began + minutes * 60 - time.monotonic()))
        hurt.heal(HEAL_S)
        _say("all is healed; waiting until lines flow")
        _until(lambda: not flow.open(), FLOW_S)
        for one in producers:
            one.finish()
        for one in producers:
            one.join(FLOW_S)
        took_s, settled = _settle(world, producers, minutes)
        history.note("settled" if settled else "unsettled", after_s=took_s)
        _say(f"{'settled' if settled else 'did not settle'} within {took_s:.1f} s")
        flow.end()
        poisoner.end()
        probe.stop()
        history.note("end")
        report = check(history.path, world.direct)
        with contextlib.suppress(OSError):
            shutil.copytree(folder / "results", folder / "kept")
        return _values(report, minutes, world, took_s, apart=apart)


def _train(world: World, history: History, seed: int) -> None:
    """A model of normal lines, so that known and unknown lines both flow."""
    rng = random.Random(f"{seed} base")
    sender = Sender("base", "base", history, Producer.connect(world.settings))
    for _ in range(BASE_BATCHES):
        sender.send([known(rng) for _ in range(BASE_LINES)])
    wanted = str(BASE_BATCHES * BASE_LINES).encode()
    _until(lambda: world.client.hget("{chaos}:totals:base", "stored") == wanted, TRAIN_S)
    done = world.logweir("train", timeout_s=TRAIN_S)
    if done.returncode != 0:
        raise RuntimeError(f"no model was trained: {done.stderr[-500:]}")
    _say("a model is trained")


def _settle(world: World, producers: list[Push | FileWriter], minutes: float) -> tuple[float, bool]:
    """Until nothing is in flight: how long it took, in s, and whether it came to that.

    The longer the run, the more may wait; a line that hangs takes two minutes to be buried whenever it came.
    """
    began = time.monotonic()
    written = next(one.written for one in producers if isinstance(one, FileWriter))

    def done() -> bool:
        with contextlib.suppress(redis.RedisError):
            waiting = int(world.client.hget("{chaos}:counts", "batches") or 0)
            read = int(world.client.hget("{chaos}:totals:followed", "accepted") or 0)
            return waiting == 0 and world.client.zcard("{chaos}:warming") == 0 and read >= written
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


def _quick(world: World) -> "redis.Redis":
    """A client that does not wait for a Redis that is away."""
    return redis.Redis.from_url(
        world.direct.redis.url or "", socket_timeout=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0)
    )


def _shown(world: World) -> dict[str, str]:
    return {k: v for k, v in world.direct.to_environ().items() if k != "REDIS_URL"}


def _values(report: Report, minutes: float, world: World, settle_s: float, *, apart: bool) -> dict[str, Any]:
    if report.violations:
        print(f"violated: {report.first()}", file=sys.stderr)
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
        "stack_starts": world.services["up"].starts,
        "redis_starts": world.services["redis"].starts,
        "disk": world.disk.kind,
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
