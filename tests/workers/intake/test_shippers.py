"""Programs that ship logs send while the intake is full, and while it is killed and started again: each line
is in once.

The process of the intake dies once its script has taken lines in, before it answers. The program then sends
these lines again, which tells whether they are stored twice.
"""

import contextlib
import re
import signal
import socket
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from intake_process import DIES, TIMEOUT_S, Intake, free_port, running_intake
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from polling import wait_until
from shippers import Syslog, installed, rotel, rsyslog, syslog_ng, wrote_journal
from tls_redis import Certificates

from pipeline.records.pushed import PushedRecords
from pipeline.redis.connection import connect
from pipeline.service.access.keys import SenderKeys
from pipeline.service.access.snippets import snippet_text
from pipeline.settings import Settings
from pipeline.workers.intake.bodies import MAX_BODY

pytestmark = pytest.mark.long  # starts processes

LINES = 20  # of a round
ROUND = range(LINES)
Send = Callable[[range], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """The intake of this file: no worker takes its lines away."""

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


@pytest.fixture(scope="module")
def receiver(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    folder = tmp_path_factory.mktemp("receiver")
    made = Certificates.make(folder)
    files = f"?cert={made.server}&key={folder}/server.key"
    urls = {
        scheme: f"{scheme}://127.0.0.1:{free_port()}{files if scheme.endswith('tls') else ''}"
        for scheme in ("syslog+tcp", "syslog+tls", "syslog+udp", "relp")
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


def logs_to(program: socket.socket, name: str) -> Send:
    def send(orders: range) -> None:
        for n in orders:
            program.send(f"<14>Nov 20 10:00:00 {name}[7]: {name} order {n} was paid".encode())

    return send


def rsyslog_snippet(url: str) -> str:
    text = snippet_text("rsyslog", [url], keyed=False)
    return text.replace('resumeRetryCount="-1"', 'resumeRetryCount="-1" action.resumeInterval="1"')


@pytest.mark.parametrize("listener", ["http", "relp"])
def test_rsyslog_with_the_configuration_that_the_command_prints(
    receiver: Receiver, tmp_path: Path, listener: str
) -> None:
    """omelasticsearch takes any answer for a success; omrelp waits for the answer to a line."""
    url = receiver.intake.url if listener == "http" else receiver.urls["relp"]
    with rsyslog(tmp_path, rsyslog_snippet(url)) as program:
        through_trouble(receiver, f"by{listener}", logs_to(program, f"by{listener}"))
    if listener == "http":
        assert receiver.intake.accepted("byhttp") == 4 * LINES, "each message is a record of its own"


def test_rsyslog_keeps_lines_until_its_key_is_right(receiver: Receiver, tmp_path: Path) -> None:
    keys = SenderKeys(connect(receiver.intake.settings), receiver.intake.settings)

    def needs_key(wanted: bool) -> bool:
        return (receiver.intake.ask("/lines", b"").status == 401) is wanted

    with rsyslog(tmp_path, rsyslog_snippet(receiver.intake.url)) as program:
        keys.add("web")
        try:
            assert wait_until(lambda: needs_key(True), timeout_s=TIMEOUT_S)
            logs_to(program, "keyless")(ROUND)
            log = tmp_path / "rsyslog.log"
            assert wait_until(lambda: "omelasticsearch" in log.read_text(), timeout_s=TIMEOUT_S)
        finally:
            keys.revoke("web")
        assert wait_until(lambda: needs_key(False), timeout_s=TIMEOUT_S)
        receiver.has("keyless", LINES)


@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
def test_rsyslog_forwards_syslog(receiver: Receiver, tmp_path: Path, tls: bool) -> None:
    scheme = "syslog+tls" if tls else "syslog+tcp"
    action = f'type="omfwd" target="127.0.0.1" port="{receiver.port(scheme)}" protocol="tcp" action.resumeInterval="1"'
    before = ""
    if tls:
        before = (
            f'global(defaultNetstreamDriverCAFile="{receiver.certificates.ca}" defaultNetstreamDriver="gtls")'
        )
        action += ' StreamDriver="gtls" StreamDriverMode="1" StreamDriverAuthMode="anon"'
    config = (
        f'{before}\naction({action} template="RSYSLOG_SyslogProtocol23Format" action.resumeRetryCount="-1")'
    )
    name = f"fwd{'tls' if tls else 'tcp'}"
    with rsyslog(tmp_path, config) as program:
        through_a_full_pipeline(receiver, name, logs_to(program, name))
        after_a_kill(receiver, name, logs_to(program, name))


@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
def test_syslog_ng_forwards_syslog(receiver: Receiver, tmp_path: Path, tls: bool) -> None:
    port = receiver.port("syslog+tls" if tls else "syslog+tcp")
    how = f'transport("tls") tls(ca-file("{receiver.certificates.ca}"))' if tls else 'transport("tcp")'
    name = f"ng{'tls' if tls else 'tcp'}"
    with syslog_ng(tmp_path, f'syslog("127.0.0.1" port({port}) {how});') as program:
        through_a_full_pipeline(receiver, name, logs_to(program, name))
        after_a_kill(receiver, name, logs_to(program, name))


@pytest.mark.parametrize("framing", Syslog)
def test_logger_sends_its_input(receiver: Receiver, tmp_path: Path, framing: Syslog) -> None:
    name = f"logger{framing.name.lower()}"
    port = receiver.port("syslog+udp" if framing is Syslog.UDP else "syslog+tcp")

    def send(orders: range) -> None:
        path = tmp_path / f"{orders.start}.txt"
        path.write_text("".join(f"{name} order {n} was paid\n" for n in orders))
        command = [
            installed("logger"),
            "-n",
            "127.0.0.1",
            "-P",
            str(port),
            "-t",
            name,
            *framing.value,
            "-f",
            path,
        ]
        subprocess.run(command, check=True, capture_output=True)

    through_a_full_pipeline(receiver, name, send)
    process = receiver.intake.processes[-1]
    process.kill()
    receiver.restart(process)
    send(range(2 * LINES, 3 * LINES))  # over a connection of its own
    receiver.has(name, 3 * LINES)


def otlp(orders: range) -> bytes:
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add()
    logs.resource.attributes.add(key="service.name").value.string_value = "rotel"
    records = logs.scope_logs.add().log_records
    for n in orders:
        record = records.add(time_unix_nano=1_795_168_800_123_456_000 + n * 1_000)
        record.body.string_value = f"rotel order {n} was paid"
    return bytes(request.SerializeToString())


def test_rotel_forwards_otlp(receiver: Receiver, tmp_path: Path) -> None:
    """It drops a request whose connection breaks, so the process is killed between two."""
    with rotel(tmp_path, receiver.intake.url) as url:

        def send(orders: range) -> None:
            headers = {"Content-Type": "application/x-protobuf"}
            request = urllib.request.Request(f"{url}/v1/logs", data=otlp(orders), headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                assert answer.status == 200

        through_a_full_pipeline(receiver, "rotel", send)
        process = receiver.intake.processes[-1]
        process.kill()
        receiver.restart(process)
        send(range(2 * LINES, 3 * LINES))
        receiver.has("rotel", 3 * LINES)


def test_a_journal_of_any_size_is_taken_in(receiver: Receiver, tmp_path: Path) -> None:
    """It comes in one request, of more than any other one may have."""
    count, filler = 11_000, "x" * 2_000
    upload = installed("systemd-journal-upload")
    (tmp_path / "journal").mkdir()
    wrote_journal(
        tmp_path / "journal" / "all.journal",
        [f"whole order {n} was paid {filler}" for n in range(count)],
        begin=0,
    )
    assert count * len(filler) > MAX_BODY
    command = [
        upload, f"--directory={tmp_path / 'journal'}", f"--url={receiver.intake.url}",
        f"--save-state={tmp_path / 'state'}", "--follow=no",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    receiver.has("whole", count)


def test_systemd_journal_upload(receiver: Receiver, tmp_path: Path) -> None:
    """Each failure ends it, and its unit starts it again."""
    command = [
        installed("systemd-journal-upload"),
        f"--directory={tmp_path / 'journal'}",
        f"--url={receiver.intake.url}",
        f"--save-state={tmp_path / 'state'}",
        "--follow=no",
    ]
    (tmp_path / "journal").mkdir()

    def upload() -> int:
        return subprocess.run(command, check=False, capture_output=True, timeout=TIMEOUT_S).returncode

    def send(orders: range) -> None:
        messages = [f"upload order {n} was paid" for n in orders]
        wrote_journal(tmp_path / "journal" / f"{orders.start}.journal", messages, begin=orders.start)

    send(ROUND)
    assert upload() == 0
    receiver.has("upload", LINES)
    send(range(LINES, 2 * LINES))
    with receiver.closed():
        assert upload() != 0
    killed = receiver.dies()
    assert upload() != 0
    receiver.restart(killed)
    send(range(2 * LINES, 3 * LINES))
    assert upload() == 0
    receiver.has("upload", 3 * LINES)
