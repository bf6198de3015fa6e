"""Processes that take, hold and give back made-up GPUs while they are killed, stopped and cut off from Redis.

`run` is the torturer, `python -m bench._torture FOLDER NUMBER` is one of the tortured; what happened is
judged by the evidence that they leave (_evidence.py)."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench._evidence import MIB, Evidence, judge, report
from pipeline.errors import LeaseRefused, LogweirError, RedisUnavailable
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode, Need, PoolLease
from pipeline.redis.connection import connect
from pipeline.settings import Settings

BEAT_S: Final = 0.1
SLACK_S: Final = 1.5  # threads of a busy machine; nothing of the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Torture:
    """How much of it. An operation is a call that changed the pool, or one with a stale token, which must
    not.

    A need that was refused, a lease that was lost and a call while Redis was away are none.
    """

    operations: int = 10_000
    processes: int = 6
    devices: int = 3
    ttl_ms: int = 2_000
    kills: int = 20
    stops: int = 3
    restarts: int = 2
    most_s: float = 300.0
    seed: int = 0


# ---- the tortured ----------------------------------------------------------------------------------


def _any_need(rng: random.Random, n_devices: int) -> Need:
    if rng.random() < 0.35:
        return Need(
            mode=LeaseMode.EXCLUSIVE,
            devices=rng.choice((1, 1, min(2, n_devices))),
            max_duration_s=rng.choice((None, 1.0)),
        )
    return Need(
        memory_mib=rng.choice((2_000, 5_333, 8_000, MIB)),
        compute_percent=rng.choice((0, 10, 34, 50)),
        devices=rng.choice((1, 1, 1, min(2, n_devices))),
    )


def tortured(folder: Path, number: int) -> None:
    """Take and give back until told to stop. Its own clock is wrong by hours: only that of Redis may
    count."""
    told = json.loads((folder / "torture.json").read_text(encoding="utf-8"))
    url, plan = told.pop("url"), Torture(**told)
    wrong = (number % 3 - 1) * 7_200.0
    true_time = time.time
    time.time = lambda: true_time() + wrong
    settings = Settings(
        data_dir=folder / "data",
        redis_url=url,
        key_prefix="torture",
        lease_ttl_ms=plan.ttl_ms,
    )
    pool, evidence = Pool(connect(settings), settings), Evidence(folder)
    rng = random.Random(f"{plan.seed} {number} {os.getpid()}")
    evidence.say("born")
    while not (folder / "stop").exists():
        try:
            _cycle(pool, evidence, rng, plan)
        except LeaseRefused:
            evidence.say("vain", name="refused")
        except RedisUnavailable:
            evidence.say("vain", name="away")
            time.sleep(0.05)


def _cycle(pool: Pool, evidence: Evidence, rng: random.Random, plan: Torture) -> None:
    need, holder, request_id = _any_need(rng, plan.devices), f"h{os.getpid()}", uuid.uuid4().hex
    wait_s = rng.choice((0.0, 0.2, 3.0))
    lease = pool.request(need, holder=holder, request_id=request_id, timeout_s=wait_s)
    evidence.say("op", name="request")
    if rng.random() < 0.1:
        again = pool.request(need, holder=holder, request_id=request_id)
        # A process that was stopped between the two asks after its first lease has ended.
        wrong = again.parts != lease.parts and pool.snapshot().now_ms <= lease.deadline_ms
        evidence.say("op", name="again", wrong=int(wrong))
    if not pool.activate(lease, pids=[os.getpid()]):
        evidence.say("vain", name="too_late")
        return
    evidence.say("op", name="activate")
    long = rng.random() < 0.05
    with pool.holding(lease) as held:
        evidence.say("op", name="renew")
        if evidence.begin(lease, held.lost.is_set):
            held.lost.wait(rng.uniform(0.2, 1.0) if long else rng.uniform(0, 0.02))
            evidence.end(lease)
    if held.lost.is_set():
        evidence.say("vain", name="lost")
    else:
        evidence.say("op", name="release")
    if rng.random() < 0.2:
        _try_stale(pool, evidence, lease)


def _try_stale(pool: Pool, evidence: Evidence, lease: PoolLease) -> None:
    """A lease that has ended must be good for nothing."""
    for name, accepted in (
        ("renew", lambda: not pool.renew(lease).lost),
        ("activate", lambda: pool.activate(lease, pids=[os.getpid()])),
        ("release", lambda: pool.release(lease)),
    ):
        evidence.say("op", name=f"stale_{name}", wrong=int(bool(accepted())))


# ---- the torturer ----------------------------------------------------------------------------------


class _Torturer:
    def __init__(self, folder: Path, plan: Torture) -> None:
        from pipeline.workers.stack.private_redis import PrivateRedis  # heavy; the tortured do without

        self.folder, self.plan = folder, plan
        settings = Settings(data_dir=folder / "data", lease_ttl_ms=plan.ttl_ms, key_prefix="torture")
        self.server = PrivateRedis(settings)
        self.redis = self.server.start()
        self.settings = settings.replace(redis_url=self.server.url)
        told = {**asdict(plan), "url": self.server.url}
        (folder / "torture.json").write_text(json.dumps(told), encoding="utf-8")
        self.evidence = Evidence(folder)
        self.pool = Pool(connect(self.settings), self.settings)
        self.rng = random.Random(plan.seed)
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.ended = threading.Event()
        self.back_s: list[float] = []
        self.facts: Counter[str] = Counter()

    def run(self) -> None:
        self.pool.ledger.clear_quarantine()
        self.pool.report(report(self.plan.devices))
        agent = threading.Thread(target=self._agent, daemon=True)
        agent.start()
        try:
            for number in range(self.plan.processes):
                self._start(number)
            self._torture()
        finally:
            (self.folder / "stop").touch()
            for worker in self.workers.values():
                try:
                    worker.wait(15)
                except subprocess.TimeoutExpired:
                    self._kill_now(worker)
            self._all_back()
            self.ended.set()
            agent.join(5)
            self.redis.kill()
            self.redis.wait(20)

    def _torture(self) -> None:
        """Trouble at even steps of the operations done, in random order, until all are done."""
        plan, end = self.plan, time.monotonic() + self.plan.most_s
        trouble = ["kill"] * plan.kills + ["stop"] * plan.stops + ["restart"] * plan.restarts
        self.rng.shuffle(trouble)
        total = len(trouble)
        while time.monotonic() < end and (trouble or self._operations() < plan.operations):
            done = self._operations()
            due = total - len(trouble)
            if trouble and done >= plan.operations * (due + 1) / (total + 2):
                getattr(self, f"_{trouble.pop()}")()
            time.sleep(0.02)

    def _operations(self) -> int:
        with (self.folder / "evidence.jsonl").open("rb") as file:
            return sum(b'"what": "op"' in line for line in file)

    def _start(self, number: int) -> None:
        command = [sys.executable, "-m", "bench._torture", str(self.folder), str(number)]
        with (self.folder / f"worker{number}.log").open("ab") as said:
            self.workers[number] = subprocess.Popen(command, stdout=said, stderr=said)

    def _kill_now(self, worker: "subprocess.Popen[bytes]") -> int:
        at = time.monotonic_ns()
        worker.kill()
        worker.wait()
        self.evidence.say("killed", victim=worker.pid, at=at)
        return at

    def _kill(self) -> None:
        """SIGKILL, if it can be while it holds something; then what it held must come back in time."""
        number = self.rng.choice(sorted(self.workers))
        worker = self.workers[number]
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            if self._holds(worker.pid):
                os.kill(worker.pid, signal.SIGSTOP)  # what it holds now it holds when it is killed
                if self._holds(worker.pid):
                    break
                os.kill(worker.pid, signal.SIGCONT)
            time.sleep(0.001)
        at = self._kill_now(worker)
        self._start(number)
        self.facts["kills"] += 1
        held = [lease for lease in self.pool.snapshot().leases if lease.holder == f"h{worker.pid}"]
        if held:
            self.facts["killed_while_holding"] += 1
            threading.Thread(target=self._measure_back, args=(held, at), daemon=True).start()

    def _holds(self, pid: int) -> bool:
        return any(self.evidence.marks.glob(f"{pid}.*"))

    def _measure_back(self, held: list[PoolLease], at: int) -> None:
        ids = {lease.lease_id for lease in held}
        restarts = self.facts["restarts"]
        while not self.ended.is_set():
            try:
                now = self.pool.snapshot()
            except RedisUnavailable:
                return
            if self.facts["restarts"] != restarts:
                return  # nothing ends while Redis is away
            if not ids & {one.lease_id for one in (*now.leases, *now.orphans)}:
                self.back_s.append((time.monotonic_ns() - at) / 1e9)
                break
            time.sleep(0.02)
        else:
            return
        try:
            for lease in held:
                _try_stale(self.pool, self.evidence, lease)
        except RedisUnavailable:
            return

    def _stop(self) -> None:
        """Out of time for longer than a lease lives, as in a long pause of the machine; then it goes on as if
        nothing was."""
        worker = self.workers[self.rng.choice(sorted(self.workers))]
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(self.plan.ttl_ms * 1.25 / 1000)
        os.kill(worker.pid, signal.SIGCONT)
        self.facts["stops"] += 1

    def _restart(self) -> None:
        self.facts["restarts"] += 1
        self.redis.kill()
        self.redis.wait(20)
        time.sleep(self.rng.uniform(0.05, 0.5))
        self.redis = self.server.start()

    def _agent(self) -> None:
        """What a node agent does: tell which processes are on which device, and sweep."""
        while not self.ended.wait(BEAT_S):
            try:
                self.pool.report(report(self.plan.devices, self.evidence.on_devices()))
                self.pool.sweep()
            except RedisUnavailable:
                continue
            except Exception:  # noqa: BLE001 - the fault is shown, and counted by the judge
                self.facts["agent_faults"] += 1

    def _all_back(self) -> None:
        """With everybody gone the whole pool must be free within two TTLs: a dead need that waits is granted
        at most once."""
        end = time.monotonic() + 2 * self.plan.ttl_ms / 1000 + SLACK_S
        whole = Need(mode=LeaseMode.EXCLUSIVE, devices=self.plan.devices)
        while time.monotonic() < end:
            try:
                with self.pool.lease(whole, holder="judge", timeout_s=0.0):
                    self.facts["all_back"] = 1
                    return
            except LogweirError:
                time.sleep(0.05)


# ---- all of it -------------------------------------------------------------------------------------


def run(folder: Path, plan: Torture) -> dict[str, Any]:
    """Torture a pool on a Redis of its own in `folder`; the counts of what happened and of what must not."""
    began = time.monotonic()
    torturer = _Torturer(folder, plan)
    torturer.run()
    seconds = time.monotonic() - began
    lines = [json.loads(line) for line in (folder / "evidence.jsonl").read_bytes().splitlines()]
    names = Counter(line["name"] for line in lines if line["what"] == "op")
    vain = Counter(line["name"] for line in lines if line["what"] == "vain")
    late = [s for s in torturer.back_s if s > plan.ttl_ms / 1000 + 2 * BEAT_S + SLACK_S]
    return {
        **judge(lines, plan.devices),
        "capacity_late": len(late),
        "capacity_lost": 1 - torturer.facts["all_back"],
        "capacity_back_max_s": round(max(torturer.back_s, default=0.0), 2),
        "operations": names.total(),
        "operations_by_name": dict(names.most_common()),
        "in_vain": dict(vain.most_common()),
        "uses": sum(line["what"] == "begin" for line in lines),
        **{
            k: torturer.facts[k]
            for k in ("kills", "killed_while_holding", "stops", "restarts", "agent_faults")
        },
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    tortured(Path(sys.argv[1]), int(sys.argv[2]))
