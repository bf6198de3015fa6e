"""Opni's payloads over a real NATS server: answers a second, and what kills lose or double.

Server, sender, subscriber and a whole stack share the machine. A payload counts when its answer has come to a
plain subscriber of `inferenced_logs`. Both streams are on the disk, and --sync lets the server sync every
message. In the last part the gateway, a store worker and Redis are killed with SIGKILL while payloads
come; `lost` and `doubled` are counted in the stream of results.

Where Opni's original services are here (../shared/opni, and OPNI_PEERS_PYTHON of its `setup`), their drain
stage is measured beside it. Then their preprocessing, drain and training controller run with our gateway in
place of their inference, and the same is killed (`opni`)."""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench import _opni
from pipeline.nats.payloads import Payload, read_payloads
from pipeline.nats.streams import StreamReader
from pipeline.settings import Settings
from pipeline.settings.nats import NatsSource
from pipeline.workers.stack.stack import Stack

PAYLOADS: Final = 50_000
LINES: Final = 200_000
KILLED: Final = 10_000
LEARNT: Final = 3_000
LIST: Final = 128  # as Opni's preprocessing makes them
MOST_S: Final = 300.0
SHAPES: Final = (
    "2026-11-20T10:00:{0:02d}.123Z INFO request {1} of user {2} done in {3} ms, 200 OK, cache hit",
    "2026-11-20T10:00:{0:02d}.123Z INFO user {2} logged in from 10.1.0.{3} after {0} tries",
    "2026-11-20T10:00:{0:02d}.123Z DEBUG pool of shard {0} has {3} idle connections, {2} in use",
    "2026-11-20T10:00:{0:02d}.123Z WARN order {1} waits for payment since {3} s, reminder {0} sent",
    "2026-11-20T10:00:{0:02d}.123Z INFO parcel {1} left warehouse {0} with {2} items, weight {3} g",
)
WORKLOADS: Final = {"c1": {"shop": ["web", "cart", "pay"]}}


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--payloads", type=int, default=PAYLOADS, help=f"of one line (default {PAYLOADS:,})")
    parser.add_argument("--lines", type=int, default=LINES, help=f"in lists (default {LINES:,})")
    parser.add_argument("--killed", type=int, default=KILLED, help=f"while we kill (default {KILLED:,})")
    parser.add_argument(
        "--sync", action="store_true", help="let the server sync each message, not once in 2 minutes"
    )
    parser.add_argument("--no-opni", action="store_true", help="without Opni's original drain stage")


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from nats_server import NatsServer, listed, single

    folder = Path(tempfile.mkdtemp(prefix="logweir-bench-"))
    found: dict[str, Any] = {}
    try:
        with NatsServer.running("max_payload: 8388608", sync=args.sync) as server:
            url = server.url("raw_logs,preprocessed_logs_workload", serve="controller")
            settings = Settings(data_dir=folder, nats_source=url, flower=False, metrics=False, api="", intake="",
                                redis_max_mib=2_048)  # fmt: skip
            with Stack(settings) as stack, tended(stack):
                world = World(server, stack)
                world.train()
                payloads = [document(n) for n in range(args.payloads)]
                found["payloads_per_s"] = world.rate(single(payloads), args.payloads)
                lines = [document(n) for n in range(args.payloads, args.payloads + args.lines)]
                messages = listed(lines, LIST, "preprocessed_logs_workload")
                found["lines_per_s"] = world.rate(messages, args.lines)
                first = args.payloads + args.lines
                world.killed([document(n) for n in range(first, first + args.killed)])
                expected = LEARNT + first + args.killed
                found |= world.counted(expected)
        if not args.no_opni and _opni.are_here():
            found["opni_drain_lines_per_s"] = _opni.drain_rate(folder / "drain")
            found["opni"] = _opni.through(folder / "through", args.killed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def document(number: int) -> Payload:
    # Every shape has an own workload's share; numbers make each line another one.
    text = SHAPES[number % len(SHAPES)].format(number % 60, number, number % 977, number % 311)
    deployment = WORKLOADS["c1"]["shop"][number % 3]
    return Payload(
        id=f"id{number}",
        cluster_id="c1",
        namespace_name="shop",
        deployment=deployment,
        pod_name=f"{deployment}-1",
        log_type="workload",
        log=text,
    )


@contextlib.contextmanager
def tended(stack: Stack) -> Iterator[None]:
    """Restarts what dies, as `logweir up` does."""
    done = threading.Event()

    def tend() -> None:
        while not done.wait(0.2):
            stack.check()

    thread = threading.Thread(target=tend, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class World:
    """A stack that answers, and a plain client."""

    def __init__(self, server: Any, stack: Stack) -> None:
        self.server = server
        self.stack = stack
        self.source = NatsSource.parse(stack.settings.nats.source or "")

    def train(self) -> None:
        """A live model, from the first lines."""
        from nats_server import single

        until(lambda: self._ask("gpu_service_running", b"check-up") == b"running", "the gateway answers")
        learnt = [document(n) for n in range(10_000_000, 10_000_000 + LEARNT)]
        self.server.send(single(learnt))
        totals = self.stack.producer().ledger.backlog.totals
        until(lambda: sum(int(t["accepted"]) for t in totals().values()) >= LEARNT, "the first lines are in")
        asked = {"uuid": "bench", "workloads": WORKLOADS}
        self._ask("train_model", json.dumps(asked).encode())
        until(lambda: self._ask("model_status") == b"completed", "a model is live")
        until(lambda: self.stored() >= LEARNT, "the first lines are answered")

    def _ask(self, subject: str, data: bytes = b"") -> bytes:
        try:
            return self.server.ask(subject, data)  # type: ignore[no-any-return]
        except Exception:  # noqa: BLE001 - nobody answers yet
            return b""

    def rate(self, messages: Sequence[tuple[str, bytes]], count: int) -> int:
        """Answers a second, from the first message sent to the last answer."""
        from nats_server import Heard

        heard = Heard(self.server, "inferenced_logs")
        try:
            began = time.monotonic()
            sender = threading.Thread(target=self.server.send, args=(messages,))
            sender.start()
            seen, parsed = 0, 0
            while seen < count:
                time.sleep(0.05)
                new = heard.messages[parsed:]
                parsed += len(new)
                seen += sum(len(read_payloads(data)) for _, data in new)
                if time.monotonic() - began > MOST_S:
                    raise RuntimeError(f"only {seen} of {count} payloads were answered in {MOST_S:g} s")
            took = time.monotonic() - began
            sender.join()
        finally:
            heard.close()
        return round(count / took)

    def killed(self, documents: Sequence[Payload]) -> None:
        """Sends while the gateway, a store worker and Redis are killed in turn."""
        from nats_server import single

        some = single(documents)

        def send() -> None:
            for at in range(0, len(some), 500):
                self.server.send(some[at : at + 500])
                time.sleep(0.5)

        self.kill_beside(send)

    def kill_beside(self, work: Callable[[], None]) -> None:
        """Kills one after another, with pauses by chance, as long as the work goes on."""
        chance = random.Random(7)
        thread = threading.Thread(target=work)
        thread.start()
        for victim in itertools.cycle(("nats", "redis", "store", "ingest-1")):
            thread.join(chance.uniform(0.5, 1.5))
            if not thread.is_alive():
                return
            self._kill(victim)

    def _kill(self, name: str) -> None:
        process = (
            self.stack.redis_process
            if name == "redis"
            else next(child.process for child in self.stack.children if child.name == name)
        )
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def counted(self, expected: int) -> dict[str, int]:
        """Payloads that the stream of results lacks, and those that it has more than once."""
        with contextlib.suppress(RuntimeError):
            until(lambda: self.stored() >= expected, "every payload is answered")
        time.sleep(2.0)
        found = self._ids()
        return {"lost": expected - len(found), "doubled": sum(n - 1 for n in found.values())}

    def stored(self) -> int:
        return len(self._ids())

    def _ids(self) -> Counter[str]:
        async def read() -> Counter[str]:
            client = await self.server.client()
            js = client.jetstream()
            reader = StreamReader(client, js, self.source.out)
            await reader.open(sequence=1)
            ids: Counter[str] = Counter()
            while True:
                messages = await reader.fetch(1_000, 16 << 20, 0.5)
                for message in messages:
                    if message.subject.endswith(".inferenced_logs"):
                        ids.update(one.id for one in read_payloads(message.data))
                if not messages or not messages[-1].pending:
                    break
            await reader.close()
            await client.close()
            return ids

        return asyncio.run(read())


def until(ask: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + MOST_S
    while not ask():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {MOST_S:g} s: {what}")
        time.sleep(0.2)
