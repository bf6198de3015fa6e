"""What each kind of fault does to the world. None of them breaks the promise itself: the ledger's keys are
left alone.

A fault is noted when it is done, healed when its time is over; `missed` when there was nothing to do it to,
because another fault had taken it away."""

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import psutil  # type: ignore[import-untyped] # it publishes no types
import redis

from bench._chaos.acts import Act, Heal, Missed, healed_by, signalled, stopped
from bench._chaos.flow import Flow
from bench._chaos.history import History
from bench._chaos.machine import Machine
from bench._chaos.producers import PAUSE_S, Poisoner, Sender, known
from bench._chaos.redis_faults import RedisFaults
from bench._chaos.schedule import KINDS, Fault, Kind
from bench._chaos.store_faults import acts_of
from bench._chaos.world import FOLLOW, World
from pipeline.errors import LogweirError
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.records.delivery import Stage
from pipeline.redis.keys import Keys
from pipeline.redis.leases import DRAIN

AT_ONCE: Final = 20  # messages that one fault doubles or drops in a queue
FILL_LINES: Final = 3
BURIED_S: Final = 60.0  # a line that hangs takes longer; the next fault does not wait for that
PATIENCE_S: Final = 15.0  # a stack that is started again has workers by then
# Why a fault cannot be done now: another one is at it.
TRANSIENT: Final = (Missed, LogweirError, redis.RedisError, psutil.Error, ProcessLookupError)


class Faults:
    """Carries faults out, each in a thread of its own, so that they overlap."""

    def __init__(
        self,
        world: World,
        history: History,
        flow: Flow,
        poisoner: Poisoner,
        seed: int,
        *,
        kinds: Mapping[str, Kind] = KINDS,
    ) -> None:
        self.world = world
        self.history = history
        self.flow = flow
        self.poisoner = poisoner
        self.seed = seed
        self.kinds = kinds
        self.recent: list[str] = []  # ids of batches, for wake-ups that come twice
        self._healing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._keys = Keys(world.direct.redis.key_prefix)
        producer = Producer.connect(world.direct)
        self._submit: Submit = producer.submit
        self._ledger = producer.ledger
        self._fillings = 0
        self._acts: dict[str, Act] = {
            "kill": self._kill,
            "kill_beat": self._kill,
            "kill_writer": lambda *_: (signalled(self._writer(), signal.SIGKILL), None),
            "kill_supervisor": self._kill_supervisor,
            "kill_stack": self._kill_stack,
            "kill_follower": self._kill_follower,
            "kill_source": self._kill,
            "stop_source": self._stop,
            "break_intake": self._break_intake,
            "stop": self._stop,
            "stop_writer": lambda *_: stopped(self._writer()),
            "stop_role": self._stop,
            "stop_machine": self._stop_machine,
            "twice": self._twice,
            "drop": self._drop,
            "unacked": self._unacked,
            "garbage": self._garbage,
            "fill": self._fill,
            "pause": self._pause,
            "poison": self._poison,
            **RedisFaults(world, self._healing).acts,
            **acts_of(world.store, world.services, self._healing),
        }

    def begin(self, fault: Fault) -> None:
        thread = threading.Thread(target=self._do, args=(fault,), name=f"fault-{fault.n}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def busy(self) -> bool:
        """True while a fault is not over."""
        return any(thread.is_alive() for thread in self._threads)

    def heal(self, timeout_s: float) -> None:
        """End every fault now."""
        self._healing.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))

    def _do(self, fault: Fault) -> None:
        kind = self.kinds[fault.kind]
        # Whoever of the role holds the template tree takes its lease along.
        waits_for = kind.waits_for or ("lease" if fault.target.startswith("drain") else "")
        facts = {
            "n": fault.n,
            "kind": fault.kind,
            "target": fault.target,
            "at_s": fault.at_s,
            "for_s": fault.for_s,
            "waits_for": waits_for,
            "machine": fault.machine,
        }
        try:
            detail, heal = self._hurt(fault)
        except TRANSIENT as exc:
            self.history.note("missed", **facts, why=f"{type(exc).__name__} {exc}".strip())
            return
        self.history.note("fault", **facts, detail=detail)
        if waits_for:
            self.flow.waits()
        if not kind.sole:
            self.flow.watch(fault.n)
        if heal is not None:
            self._healing.wait(fault.for_s)
            with contextlib.suppress(redis.RedisError, psutil.Error, ProcessLookupError):
                heal()
        self.history.note("healed", n=fault.n)
        if kind.sole:
            self.flow.watch(fault.n)

    def _hurt(self, fault: Fault) -> tuple[Any, Heal | None]:
        """Do it, as soon as there is somebody to do it to: what another fault ended is being started
        again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._acts[fault.kind](fault, random.Random(f"{self.seed} {fault.n}"))
            except TRANSIENT:
                if time.monotonic() > deadline or self._healing.wait(PAUSE_S):
                    raise

    # ---- processes -------------------------------------------------------------------------------

    def _machine(self, fault: Fault) -> Machine:
        return self.world.machines[fault.machine % len(self.world.machines)]

    def _pids(self, fault: Fault) -> dict[str, int]:
        """`role`: all of its workers on the machine; `role/1`: one of them; `role/1:child`: a process of its
        pool."""
        place, _, child = fault.target.partition(":")
        role, _, number = place.partition("/")
        found = self._machine(fault).workers(role)
        if not found:
            raise Missed(f"no worker of {role} runs")
        if number:
            name = sorted(found)[int(number) % len(found)]
            found = {name: found[name]}
        if child:
            children = {
                f"{n}:child": c.pid for n, pid in found.items() for c in psutil.Process(pid).children()
            }
            if not children:
                raise Missed(f"{place} has no process in its pool")
            return children
        return found

    def _kill(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        return signalled(self._pids(fault), signal.SIGKILL), None

    def _stop(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        return stopped(self._pids(fault))

    def _writer(self) -> dict[str, int]:
        """The worker that holds the lease of the template tree."""
        raw: Any = self.world.client.hget(self._keys.lease(DRAIN), "holder")
        holder = (raw or b"").decode().split(":")  # host:pid:chance (tasks/context.py)
        for name, pid in self.world.workers("drain").items():
            if str(pid) in holder:
                return {name: pid}
        raise Missed("nobody holds the template tree")

    def _kill_supervisor(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        if not self.world.services.kill(self._machine(fault).name):
            raise Missed("no stack runs")
        return {}, None

    def _tree(self, fault: Fault) -> list[Any]:
        tree = self._machine(fault).tree()
        if not tree:
            raise Missed("no stack runs")
        return tree

    def _kill_stack(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        """All of it at once, as a machine does that loses its power; Redis is another machine."""
        tree = self._tree(fault)
        for one in tree:
            with contextlib.suppress(psutil.Error):
                one.kill()
        return {"processes": len(tree)}, None

    def _stop_machine(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        """All of a stack stands still at once, as a virtual machine does that is moved."""
        return stopped({str(one.pid): one.pid for one in self._tree(fault)})

    def _kill_follower(self, _: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
        names = sorted(name for name in self.world.services.all if name.startswith(FOLLOW))
        if not names or not self.world.services.kill(name := rng.choice(names)):
            raise Missed("nobody follows")
        return {"name": name}, None

    def _break_intake(self, fault: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
        way = self._machine(fault).intake
        match fault.target:
            case "cut":
                return {"connections": way.cut()}, None
            case "half_open":
                return {"connections": way.half_open(1.0, rng)}, None
            case _:
                return {"connections": way.refuse(True)}, healed_by(lambda: way.refuse(False))

    def _pause(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        """The pipeline is full: it takes nothing in, and sources wait."""
        intake = self._ledger.intake
        intake.pause("a fault of the chaos run", for_s=fault.for_s + PATIENCE_S)
        return {}, lambda: (intake.resume(), None)[1]

    # ---- messages --------------------------------------------------------------------------------

    def _queues(self) -> list[bytes]:
        """The lists of the broker; the ledger's keys begin with a brace."""
        pattern = f"{self.world.direct.redis.key_prefix}:*"
        return sorted(self.world.client.scan_iter(match=pattern, count=1_000, _type="list"))

    def _twice(self, _: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
        """Copies of what waits, of what workers have in hand, and wake-ups for recent batches, finished or
        not."""
        client, copies = self.world.client, 0
        for queue in self._queues():
            for message in client.lrange(queue, 0, AT_ONCE - 1):
                client.lpush(queue, message)
                copies += 1
        for raw in list(client.hvals(f"{self.world.direct.redis.key_prefix}:unacked"))[:AT_ONCE]:
            message, _, routing_key = json.loads(raw)
            client.lpush(f"{self.world.direct.redis.key_prefix}:{routing_key}", json.dumps(message))
            copies += 1
        ids = self.recent[-50:]
        for batch_id in rng.sample(ids, min(10, len(ids))):
            copies += self._submit.wake(rng.choice(list(Stage)), batch_id)
        return {"messages": copies}, None

    def _drop(self, *_: Any) -> tuple[Any, Heal | None]:
        dropped = {}
        for queue in self._queues():
            gone = self.world.client.rpop(queue, AT_ONCE)
            dropped[queue.decode()] = len(gone or ())
        return dropped, None

    def _unacked(self, *_: Any) -> tuple[Any, Heal | None]:
        """What workers have in hand is forgotten, and a restore that died in the midst left its mutex
        behind."""
        prefix = self.world.direct.redis.key_prefix
        gone = self.world.client.delete(f"{prefix}:unacked", f"{prefix}:unacked_index")
        self.world.client.set(f"{prefix}:unacked_mutex", "left behind", ex=15)
        return {"keys": gone}, None

    def _garbage(self, _: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
        queues = [
            f"{self.world.direct.redis.key_prefix}:{q}"
            for q in ("ingest", "infer.cpu", "drain", "store", "periodic")
        ]
        junk = _junk(rng)
        for queue in queues:
            for raw in rng.sample(junk, 4):
                self.world.client.rpush(queue, raw)
        return {"messages": 4 * len(queues)}, None

    # ---- load ------------------------------------------------------------------------------------

    def _fill(self, fault: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
        """A burst of small batches until nothing is taken any more, or the time is over."""
        with self._lock:
            self._fillings += 1
            name = f"burst-{self._fillings}"
        sender = Sender(name, name, self.history, Producer.connect(self.world.settings))
        end = time.monotonic() + fault.for_s
        while time.monotonic() < end and not self._healing.is_set() and not sender.refusals:
            sender.send([known(rng) for _ in range(FILL_LINES)])
        return {"batches": sender.batches, "full": sender.refusals}, None

    def _poison(self, fault: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
        batch_id = self.poisoner.send(fault.target, rng)
        deadline = time.monotonic() + BURIED_S

        def buried() -> None:
            while not (self._healing.is_set() or self.poisoner.buried() or time.monotonic() > deadline):
                time.sleep(PAUSE_S)

        return {"id": batch_id}, buried


def _junk(rng: random.Random) -> list[bytes]:
    """What is no message, or one that nobody should obey."""

    def message(body: str, **changed: Any) -> bytes:
        return json.dumps(
            {
                "body": body,
                "content-type": "application/json",
                "content-encoding": "utf-8",
                "headers": {"task": "logweir.ingest", "id": "junk", "lang": "py"},
                "properties": {
                    "delivery_tag": rng.randbytes(8).hex(),
                    "delivery_info": {"exchange": "", "routing_key": "ingest"},
                    "body_encoding": None,
                    "correlation_id": "junk",
                },
                **changed,
            }
        ).encode()

    nothing = '{"callbacks":null,"errbacks":null,"chain":null,"chord":null}'
    return [
        b"\xff\xfe\x00",
        b"",
        b"{}",
        b"[1,2,3]",
        b'"text"',
        message("not json"),
        message("[]"),
        message(f"[[{json.dumps('x' * 100_000)}],{{}},{nothing}]"),
        message(f"[[],{{}},{nothing}]"),
        message(f'[[null,7,"a"],{{"b":1}},{nothing}]'),
        message(f'[["no such batch"],{{}},{nothing}]'),
        message(
            "gASVAAAA", **{"content-type": "application/x-python-serialize", "content-encoding": "binary"}
        ),
        message(f'[["a"],{{}},{nothing}]', headers={"task": "os.system", "id": "junk", "lang": "py"}),
        message(f'[["a"],{{}},{nothing}]', headers={}),
        rng.randbytes(200),
    ]
