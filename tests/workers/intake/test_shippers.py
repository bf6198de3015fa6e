"""Programs that ship logs send while the intake is full, and while it is killed and started again: each line
is in once (tests/receiver.py)."""

import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
from intake_process import TIMEOUT_S
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from polling import wait_until
from receiver import LINES, ROUND, Receiver, Send, after_a_kill, through_a_full_pipeline, through_trouble
from shippers import Syslog, installed, rotel, rsyslog, syslog_ng, wrote_journal

from pipeline.redis.connection import connect
from pipeline.service.access.keys import SenderKeys
from pipeline.service.access.snippets import snippet_text
from pipeline.workers.intake.bodies import MAX_BODY

pytestmark = pytest.mark.long  # starts processes


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
