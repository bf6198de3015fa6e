"""Real shippers as processes of a test. Each is skipped where it is not installed."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import pytest
from intake_process import free_port
from polling import wait_until

TIMEOUT_S = 30.0
_SBIN = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin:/lib/systemd:/usr/lib/systemd"
# syslog-ng and rsyslog exclude each other as packages, so .ci/run unpacks one of them here.
UNPACKED = Path(os.environ.get("SYSLOG_NG_ROOT", "/opt/syslog-ng"))
# A forwarder of OTLP in a wheel of PyPI. It is no dependency, so .ci/run installs it here.
ROTEL = Path(os.environ.get("ROTEL_ROOT", "/opt/rotel"))
PACKAGES = {
    "rotel-agent": "rotel of PyPI",
    "rsyslogd": "rsyslog, rsyslog-relp, rsyslog-elasticsearch and rsyslog-gnutls",
    "systemd-journal-upload": "systemd-journal-remote",
    "systemd-journal-remote": "systemd-journal-remote",
    "syslog-ng": "syslog-ng-core",
    "logger": "bsdutils",
}


def installed(program: str) -> str:
    """The path of a program, or a skip that says what to install."""
    here = f"{_SBIN}:{UNPACKED}/usr/sbin:{ROTEL}/rotel"
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:{here}")
    if found is None:
        pytest.skip(f"needs {program}, of the packages {PACKAGES[program]}")
    return found


@contextlib.contextmanager
def daemon(*command: str | Path, log: Path, environ: dict[str, str] | None = None) -> Iterator[None]:
    """A process until the block ends; it gets two seconds to stop by itself."""
    with log.open("ab") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **(environ or {})})
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def program_at(path: Path) -> Iterator[socket.socket]:
    """A socket of a program that logs to a daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as program:
        assert wait_until(path.exists, timeout_s=TIMEOUT_S, poll_s=0.01)
        program.connect(str(path))
        yield program


@contextlib.contextmanager
def rsyslog(folder: Path, config: str) -> Iterator[socket.socket]:
    """A socket whose datagrams rsyslog sends on by this configuration."""
    command = installed("rsyslogd")
    (folder / "conf").write_text(
        f"""
        global(workDirectory="{folder}" maxMessageSize="64k")
        module(load="imuxsock" SysSock.Use="off")
        input(type="imuxsock" Socket="{folder}/in" RateLimit.Interval="0" UsePIDFromSystem="off")
        {config}
        """
    )
    arguments = ("-n", "-f", folder / "conf", "-i", folder / "pid")
    with daemon(command, *arguments, log=folder / "rsyslog.log"), program_at(folder / "in") as program:
        yield program


@contextlib.contextmanager
def syslog_ng(folder: Path, destination: str) -> Iterator[socket.socket]:
    """A socket whose datagrams syslog-ng sends to this destination."""
    command = Path(installed("syslog-ng"))
    (folder / "conf").write_text(
        f"""@version: 3.35
        options {{ time-reopen(1); stats-freq(0); }};
        source in {{ unix-dgram("{folder}/in"); }};
        destination out {{ {destination} }};
        log {{ source(in); destination(out); flags(flow-control); }};
        """
    )
    environ = {}
    if command.is_relative_to(UNPACKED):
        environ = {"SYSLOGNG_PREFIX": f"{UNPACKED}/usr", "LD_LIBRARY_PATH": f"{UNPACKED}/usr/lib/syslog-ng"}
    files = {"-f": "conf", "-R": "persist", "-p": "pid", "-c": "control"}
    arguments = [word for flag, name in files.items() for word in (flag, folder / name)]
    with (
        daemon(command, "-F", "--no-caps", *arguments, log=folder / "syslog-ng.log", environ=environ),
        program_at(folder / "in") as program,
    ):
        yield program


@contextlib.contextmanager
def rotel(folder: Path, url: str) -> Iterator[str]:
    """The address of a forwarder of OTLP that sends to this one."""
    http, grpc = free_port(), free_port()
    command = [
        installed("rotel-agent"), "start",
        "--otlp-http-endpoint", f"127.0.0.1:{http}",
        "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}",
        "--otlp-exporter-endpoint", url,
        "--otlp-exporter-protocol", "http",
        "--otlp-exporter-retry-initial-backoff", "200ms",
        "--otlp-exporter-retry-max-backoff", "1s",
        "--logs-batch-timeout", "100ms",
    ]  # fmt: skip
    with daemon(*command, log=folder / "rotel.log"):

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", http), timeout=1):
                return True
            return False

        assert wait_until(listens, timeout_s=TIMEOUT_S), (folder / "rotel.log").read_text()
        yield f"http://127.0.0.1:{http}"


class Syslog(Enum):
    """How `logger` sends, by its flags."""

    UDP = ("--udp",)
    TCP = ("--tcp",)
    COUNTED = ("--tcp", "--rfc5424", "--octet-count")


def wrote_journal(path: Path, messages: Sequence[str], *, begin: int = 0) -> None:
    """A journal with these messages, a millisecond apart. `begin`: the number of the first one."""
    entries = []
    for n, message in enumerate(messages, start=begin):
        micros = 1_795_608_000_250_000 + n * 1_000
        entries.append(
            f"__REALTIME_TIMESTAMP={micros}\n__MONOTONIC_TIMESTAMP={n + 1}\n"
            "_BOOT_ID=7c0a1f1d1e94a6f88d0b1cf1b7a8c0aa\nPRIORITY=6\nSYSLOG_IDENTIFIER=shop\n_PID=7\n"
            f"_HOSTNAME=h1\nMESSAGE={message}\n\n"
        )
    command = [installed("systemd-journal-remote"), "-o", path, "-"]
    subprocess.run(command, input="".join(entries).encode(), check=True, capture_output=True)
