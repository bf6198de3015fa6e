"""An intake that is full, that is killed between accept and answer, and is started again.

The process dies once its script has taken lines in, before it answers. The program then sends these lines
again, which tells whether they are stored twice.
"""

import contextlib
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from intake_process import DIES, TIMEOUT_S, Intake, free_port, running_intake
from polling import wait_until
from tls_redis import Certificates

from pipeline.records.pushed import PushedRecords
from pipeline.settings import Settings

LINES = 20  # of a round
ROUND = range(LINES)
Send = Callable[[range], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """No worker takes its lines away."""

    intake: Intake
    mark: Path
    urls: dict[str, str]
    certificates: Certificates

    def port(self, scheme: str) -> int:
        return int(re.findall(r":([0-9]+)", self.urls[scheme])[0])

    def start(self) -> None:
        self.intake.start(LOGWEIR_INTAKE=",".join([self.intake.url, *self.urls.values()]))

    def answers(self, kind: str) -> int:
        """How many requests of a window the script answered so."""
        path = self.mark.with_suffix(".answers")
        return path.read_text().split().count(kind) if path.exists() else 0

    def orders(self, program: str) -> Counter[int]:
        """The orders in lines of a program, each with the number of lines that name it."""
        ledger = self.intake.ledger()
        ids = [name.decode() for name in ledger.client.zrange(ledger.keys.due, 0, -1)]
        found: Counter[int] = Counter()
        for batch_id in ids:
            records = ledger.payload(batch_id)
            assert isinstance(records, PushedRecords)
            for text in records.texts:
                found.update(map(int, re.findall(rf"{program} order ([0-9]+)", text)))
        return found

    def has(self, program: str, until: int) -> None:
        """All orders before this one are in, each once."""
        expected = Counter(range(until))
        wait_until(lambda: self.orders(program).keys() >= expected.keys(), timeout_s=TIMEOUT_S)
        assert self.orders(program) == expected, self.intake.log.read_text()[-2_000:]

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """The pipeline takes nothing in. The block ends when a program has been refused."""
        gate, before = self.intake.ledger().intake, self.answers("Full")
        gate.pause("maintenance")
        try:
            yield
            assert wait_until(lambda: self.answers("Full") > before, timeout_s=TIMEOUT_S)
        finally:
            gate.resume()

    def dies(self) -> "subprocess.Popen[bytes]":
        """The process, which ends as soon as it has taken lines in."""
        self.mark.touch()
        return self.intake.processes[-1]

    def restart(self, killed: "subprocess.Popen[bytes]") -> None:
        assert killed.wait(TIMEOUT_S) == -signal.SIGKILL
        self.start()


@contextlib.contextmanager
def running_receiver(redis_url: str, folder: Path) -> Iterator[Receiver]:
    """With a listener for each protocol."""
    made = Certificates.make(folder)
    files = f"?cert={made.server}&key={folder}/server.key"
    urls = {
        scheme: f"{scheme}://127.0.0.1:{free_port()}{files if scheme.endswith('tls') else ''}"
        for scheme in ("syslog+tcp", "syslog+tls", "syslog+udp", "relp", "grpc")
    }
    settings = Settings(redis_url=redis_url, key_prefix=f"t{free_port()}", data_dir=folder / "data")
    arguments = ("intake", str(folder / "mark"))
    with running_intake(settings, start=False, command=["-c", DIES], arguments=arguments) as intake:
        made_receiver = Receiver(intake=intake, mark=folder / "mark", urls=urls, certificates=made)
        made_receiver.start()
        yield made_receiver


def through_trouble(receiver: Receiver, program: str, send: Send) -> None:
    """Orders before, while and after the intake is full and is killed between accept and answer."""
    through_a_full_pipeline(receiver, program, send)
    killed = receiver.dies()
    send(range(2 * LINES, 3 * LINES))
    receiver.restart(killed)
    # The program sends in order, so the repetition is decided when these are in.
    send(range(3 * LINES, 4 * LINES))
    receiver.has(program, 4 * LINES)


def through_a_full_pipeline(receiver: Receiver, program: str, send: Send) -> None:
    """For senders that a kill may cost lines."""
    send(ROUND)
    receiver.has(program, LINES)
    with receiver.closed():
        send(range(LINES, 2 * LINES))
    receiver.has(program, 2 * LINES)


def after_a_kill(receiver: Receiver, program: str, send: Send) -> None:
    """It connects again. A line that lay in a socket is lost, so it sends until one comes through."""
    process = receiver.intake.processes[-1]
    process.kill()
    receiver.restart(process)
    orders = iter(range(2 * LINES, 100 * LINES))

    def through() -> bool:
        n = next(orders)
        send(range(n, n + 1))
        return max(receiver.orders(program)) >= 2 * LINES

    assert wait_until(through, timeout_s=TIMEOUT_S, poll_s=0.2)
    assert set(receiver.orders(program).values()) == {1}
