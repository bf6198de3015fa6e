"""One process of the intake serves all its listeners."""

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgpack
import pytest
from intake_process import TIMEOUT_S, Intake, free_port, running_intake
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from polling import wait_until
from tls_redis import Certificates

from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.workers.intake.otlp_grpc.grpc_server import EXPORT
from pipeline.workers.stack.intake_sockets import IntakeSockets

SYSLOG = b"<13>1 2026-11-20T10:00:00.003Z web-1 %s - - - order 1 failed"
SCHEMES = ("grpc", "syslog+udp", "syslog+tcp", "syslog+tls", "relp", "forward")


@pytest.fixture(scope="module")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Listener]:
    made = Certificates.make(tmp_path_factory.mktemp("certificates"))
    files = f"?cert={made.server}&key={made.folder}/server.key"
    urls = {
        scheme: f"{scheme}://127.0.0.1:{free_port()}{files if scheme == 'syslog+tls' else ''}"
        for scheme in SCHEMES
    }
    return {scheme: Listener.parse(url) for scheme, url in urls.items()}


@pytest.fixture(scope="module")
def process(
    listeners: dict[str, Listener], redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Intake]:
    settings = Settings(
        redis_url=redis_url, key_prefix=f"t{free_port()}", data_dir=tmp_path_factory.mktemp("data")
    )
    with running_intake(settings, start=False) as intake:
        intake.start(LOGWEIR_INTAKE=",".join(map(str, listeners.values())))
        yield intake


@contextlib.contextmanager
def connected(listener: Listener) -> Iterator[socket.socket]:
    with socket.create_connection((listener.host, listener.port), timeout=TIMEOUT_S) as client:
        yield client


@pytest.mark.long
def test_syslog_comes_in_over_tcp_udp_and_tls(process: Intake, listeners: dict[str, Listener]) -> None:
    with connected(listeners["syslog+tcp"]) as client:
        client.sendall(SYSLOG % b"tcp" + b"\n")
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.sendto(SYSLOG % b"udp", ("127.0.0.1", listeners["syslog+udp"].port))
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with connected(listeners["syslog+tls"]) as plain, trusting.wrap_socket(plain) as client:
        client.sendall(SYSLOG % b"tls" + b"\n")
    for name in ("tcp", "udp", "tls"):
        workload = f"web-1/{name}"
        assert wait_until(lambda workload=workload: process.accepted(workload) == 1, timeout_s=TIMEOUT_S), (
            name
        )


@pytest.mark.long
def test_relp_forward_and_grpc_answer_when_lines_are_in(
    process: Intake, listeners: dict[str, Listener]
) -> None:
    with connected(listeners["relp"]) as client:
        message = SYSLOG % b"relp"
        client.sendall(
            b"1 open 30 relp_version=0\ncommands=syslog\n2 syslog %d %s\n" % (len(message), message)
        )
        answers = b""
        while not answers.endswith(b"2 rsp 6 200 OK\n"):
            answers += client.recv(4_096)
    assert process.accepted("web-1/relp") == 1
    with connected(listeners["forward"]) as client:
        client.sendall(msgpack.packb(["shop.till", [[1_795_168_800, {"log": "x"}]], {"chunk": "abc"}]))
        assert msgpack.unpackb(client.recv(4_096)) == {"ack": "abc"}
    assert process.accepted("shop.till") == 1
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add()
    logs.resource.attributes.add(key="service.name").value.string_value = "over-grpc"
    logs.scope_logs.add().log_records.add().body.string_value = "x"
    with grpc.insecure_channel(f"127.0.0.1:{listeners['grpc'].port}") as channel:
        channel.unary_unary(EXPORT)(request.SerializeToString(), timeout=TIMEOUT_S)
    assert process.accepted("over-grpc") == 1


def test_a_supervisor_opens_the_sockets_of_all_listeners_but_those_of_grpc() -> None:
    sockets = IntakeSockets()
    try:
        urls = sockets.open(("grpc://127.0.0.1:4317", "syslog+udp://127.0.0.1:0", "relp://127.0.0.1:0"))
        grpc_fd, datagrams, streams = sockets.fds
        assert grpc_fd == -1
        kinds = [socket.socket(fileno=os.dup(fd)) for fd in (datagrams, streams)]
        for one, kind, url in zip(kinds, (socket.SOCK_DGRAM, socket.SOCK_STREAM), urls[1:], strict=True):
            with one:
                assert (one.type, one.getsockname()[1]) == (kind, Listener.parse(url).port)
    finally:
        sockets.close()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("relp://127.0.0.1?ca=a.pem", "takes no certificate"),
        ("relps://127.0.0.1?cert=a.pem", "needs"),
        ("relp://127.0.0.1?secret=a", "no shared secret"),
        ("https://127.0.0.1?cert=a.pem&key=a.key&ca=a.pem", "certificate of clients"),
    ],
)
def test_a_listener_takes_only_the_files_of_its_scheme(url: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Listener.parse(url)


def test_a_listener_is_its_url_again(tmp_path: Path) -> None:
    url = f"forwards://127.0.0.1:24225?ca={tmp_path}/c&cert={tmp_path}/a&key={tmp_path}/b&secret={tmp_path}/d"
    listener = Listener.parse(url)
    assert str(listener.absolute()) == url
    assert listener.ca == tmp_path / "c"
    assert listener.secret == tmp_path / "d"
