"""Opni's original services, run from ../shared/opni and never copied: their drain stage alone, and three of
them with our gateway."""

import contextlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipeline.nats.payloads import Payload

FOLDER: Final = Path(__file__).resolve().parents[2] / "shared" / "opni"
LIST: Final = 128
DRAINED: Final = 50 * LIST
LEARNT: Final = 2_000
MOST_S: Final = 300.0
ASIDE: Final = 200  # payloads that the training controller passes on


def are_here() -> bool:
    """`eval "$(../shared/opni/setup DIR)"` names their Python."""
    return (FOLDER / "run").exists() and bool(os.environ.get("OPNI_PEERS_PYTHON"))


@contextlib.contextmanager
def _services(folder: Path, servers: str, *words: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    command = [str(FOLDER / "run"), *words, "--nats", f"nats://{servers}", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not any(line.strip() == "ready" for line in process.stdout):
            raise RuntimeError(f"Opni's services did not get ready; see {folder}")
        yield
    finally:
        process.terminate()
        process.wait(30)


def distinct(number: int) -> Payload:
    """A payload with a word of its own, which no cache of masked lines knows."""
    from bench.nats import document

    one = document(number)
    one.log += f" by {''.join(chr(97 + int(digit)) for digit in str(number))}"
    return one


def drain_rate(folder: Path) -> int:
    """Lines a second of their drain stage, each of which goes to a model, whose answers come at once."""
    from nats_server import Heard, NatsServer, list_bytes, listed, read_payloads

    from bench.nats import document

    documents = [document(n) for n in range(20_000_000, 20_000_000 + DRAINED)]
    for one in documents:
        one.masked_log = one.log
    with (
        NatsServer.running("max_payload: 8388608", sync=False) as server,
        _services(folder, server.servers, "drain"),
    ):
        heard = Heard(server, "opnilog_workload_logs", "inferenced_logs")
        answered, done = 0, 0
        began = time.monotonic()
        try:
            server.send(listed(documents, LIST, "preprocessed_logs_workload"))
            while done < DRAINED and time.monotonic() - began < MOST_S:
                new = heard.of("opnilog_workload_logs")[answered:]
                answered += len(new)
                answers = []
                for data in new:
                    items = read_payloads(data)
                    for item in items:
                        item.anomaly_level, item.opnilog_confidence = "Normal", 0.9
                        item.inference_model = "opnilog"
                    answers.append(("model_inferenced_workload_logs", list_bytes(items)))
                server.send(answers)
                done = sum(heard.ids("inferenced_logs").values())
                time.sleep(0.02)
            took = time.monotonic() - began
        finally:
            heard.close()
    return round(done / took)


def through(folder: Path, count: int) -> dict[str, Any]:
    """Raw payloads through their preprocessing and drain and our gateway, which is killed with its Redis."""
    from nats_server import Heard, NatsServer, list_bytes, single

    from bench.nats import World, document, tended, until
    from pipeline.service.trainings import TrainingAsked, request_training
    from pipeline.settings import Settings
    from pipeline.workers.stack.stack import Stack

    with NatsServer.running("max_payload: 8388608", sync=False) as server:
        settings = Settings(
            data_dir=folder / "data",
            nats_source=server.url("opnilog_workload_logs", serve="gpu"),
            flower=False,
            metrics=False,
            api="",
            intake="",
        )
        workloads = '{"c1":{"shop":["web","cart","pay"]}}'
        peers = ("all", "--no-inference", "--gpu", "--workloads", workloads)
        heard = Heard(server, "inferenced_logs")
        try:
            with _services(folder, server.servers, *peers), Stack(settings) as stack, tended(stack):
                producer = stack.producer()
                client = producer.ledger.client

                def send(first: int, number: int) -> None:
                    some = single(distinct(n) for n in range(first, first + number))
                    for at in range(0, number, 64):
                        server.send(some[at : at + 64])
                        time.sleep(0.05)
                    for n in range(4):  # a waiting batch goes out with the next message after a second
                        time.sleep(1.1)
                        server.send(single([distinct(90_000_000 + first + n)]))

                send(10_000_000, LEARNT)
                totals = producer.ledger.backlog.totals
                until(
                    lambda: sum(int(t["accepted"]) for t in totals().values()) >= 100, "lines come from Opni"
                )
                request_training(client, stack.settings, TrainingAsked(), by="bench")
                until(lambda: len(heard.ids("inferenced_logs")) >= LEARNT, "the first lines are answered")
                world = World(server, stack)
                world.kill_beside(lambda: send(0, count))
                aside = [document(n) for n in range(30_000_000, 30_000_000 + ASIDE)]
                for one in aside:
                    one.masked_log = one.log
                wanted = {document(n).id for n in range(count)}
                # NO: their inference would score these lines itself.
                until(
                    lambda: server.ask("gpu_service_inference", list_bytes(aside[:1])) == b"YES",
                    "a GPU is free",
                )
                wanted |= {one.id for one in aside[:1]}
                if server.ask("gpu_service_inference", list_bytes(aside[1:])) == b"YES":
                    wanted |= {one.id for one in aside[1:]}
                with contextlib.suppress(RuntimeError):
                    until(lambda: wanted <= set(heard.ids("inferenced_logs")), "every payload is answered")
                time.sleep(3.0)
                found = heard.payloads("inferenced_logs")
        finally:
            heard.close()
    ours = [one for one in found if one.id in wanted]
    ids = Counter(one.id for one in ours)
    return {
        "lost": len(wanted) - len(ids),
        "doubled": sum(n - 1 for n in ids.values()),
        "scored_by_model": sum(
            one.inference_model == "opnilog" and one.opnilog_confidence > 0 for one in ours
        ),
        "answered_by_drain": sum(one.inference_model == "drain" for one in ours),
        "taken_by_request": len(wanted) - count,
    }
