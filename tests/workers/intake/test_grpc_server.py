"""OTLP over gRPC, sent by the SDK of OpenTelemetry and by a bare channel."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from intake_servers import TIMEOUT_S, MemoryDoor, serving
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from polling import wait_until
from tls_redis import Certificates

from pipeline.service.access.keys import SenderKey, key_digest
from pipeline.workers.bounds.connection_budget import ConnectionBudget
from pipeline.workers.intake.bodies import Room
from pipeline.workers.intake.otlp_grpc import grpc_server
from pipeline.workers.intake.otlp_grpc.grpc_server import EXPORT, GrpcServer
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.sockets import TlsFiles

KEY = SenderKey(
    name="edge",
    digest=key_digest("lw_secret"),
    created=datetime(2026, 11, 20, tzinfo=UTC),
    patterns=("shop/*",),
)


async def anyone(headers: Mapping[str, str]) -> SenderKey | None:
    return None


async def with_key(headers: Mapping[str, str]) -> SenderKey | None:
    match headers.get("authorization", ""):
        case "":
            raise RequestRefused(Refusal.KEY_MISSING, "send a key")
        case "Bearer lw_secret":
            return KEY
        case _:
            raise RequestRefused(Refusal.KEY_WRONG, "this key is not known")


@pytest.fixture
def door() -> MemoryDoor:
    return MemoryDoor()


@pytest.fixture
def server(door: MemoryDoor) -> Iterator[GrpcServer]:
    server = GrpcServer(door, anyone)
    with serving(server, server.start("127.0.0.1", 0)):
        yield server


def target(server: GrpcServer) -> str:
    return f"{server.address[0]}:{server.address[1]}"


def emit(server: GrpcServer, text: str, **exporter: Any) -> None:
    """One record by the SDK, sent before this returns."""
    provider = LoggerProvider(
        resource=Resource({"service.name": "till", "service.namespace": "shop"}), shutdown_on_exit=False
    )
    options = {"insecure": True, **exporter}
    provider.add_log_record_processor(
        SimpleLogRecordProcessor(OTLPLogExporter(endpoint=target(server), timeout=15, **options))
    )
    provider.get_logger("test").emit(
        LogRecord(timestamp=time.time_ns(), body=text, severity_number=SeverityNumber.ERROR)
    )
    provider.shutdown()


def request(text: str) -> bytes:
    message = ExportLogsServiceRequest()
    scope = message.resource_logs.add().scope_logs.add()
    scope.log_records.add(time_unix_nano=1_795_168_800_123_456_789).body.string_value = text
    return bytes(message.SerializeToString())


def call(server: GrpcServer, body: bytes, method: str = EXPORT, **options: Any) -> bytes:
    """One request of a bare channel."""
    with grpc.insecure_channel(target(server)) as channel:
        answer: bytes = channel.unary_unary(method)(body, timeout=15, **options)
    return answer


def refused(server: GrpcServer, body: bytes, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(server, body, **options)
    return caught.value


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_the_sdk_of_opentelemetry_sends(
    door: MemoryDoor, server: GrpcServer, compression: grpc.Compression
) -> None:
    emit(server, "payment failed", compression=compression)
    (records,) = door.records
    assert (records.messages, records.workloads) == (["payment failed"], ["shop/till"])
    _, identity, sender = door.requests[0]
    assert identity.name
    assert (sender.protocol, sender.key, sender.peer) == ("otlp", "", "127.0.0.1")


def test_the_sdk_sends_again_while_the_door_is_full(door: MemoryDoor, server: GrpcServer) -> None:
    door.full = 1
    emit(server, "payment failed")
    assert door.tries == 2
    assert len(door.raws) == 1


def test_a_full_door_names_the_second_after_which_to_send_again(
    door: MemoryDoor, server: GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.full = 1
    errors = [refused(server, request("x"))]
    monkeypatch.setattr(grpc_server, "MOST_REQUESTS", 0)
    errors.append(refused(server, request("x")))
    monkeypatch.undo()
    door.away = 1
    errors.append(refused(server, request("x")))
    for error in errors:
        trailers = dict(error.trailing_metadata())
        status = Status.FromString(trailers["grpc-status-details-bin"])
        again = RetryInfo()
        assert status.details[0].Unpack(again)
        assert (error.code(), again.retry_delay.seconds) == (grpc.StatusCode.UNAVAILABLE, 1)
        assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert call(server, b"") == b""


def test_an_equal_request_is_a_duplicate(door: MemoryDoor, server: GrpcServer) -> None:
    for _ in range(2):
        answer = ExportLogsServiceResponse.FromString(call(server, request("x")))
        assert not answer.HasField("partial_success")
    assert len(door.raws) == 1


def test_an_unreadable_request_is_an_invalid_argument(door: MemoryDoor, server: GrpcServer) -> None:
    error = refused(server, b"\xff\xff\xff")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "OTLP" in error.details()
    assert "google.rpc.retryinfo-bin" not in dict(error.trailing_metadata())


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_a_request_beyond_the_limit_is_refused_before_it_is_decoded(
    door: MemoryDoor, server: GrpcServer, compression: grpc.Compression
) -> None:
    error = refused(server, bytes(grpc_server.MOST_BYTES + 1), compression=compression)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert door.tries == 0


def test_a_failure_is_logged_and_sent_again(
    door: MemoryDoor, server: GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(grpc_server, "decode_protobuf", broken)
    with structlog.testing.capture_logs() as logs:
        error = refused(server, b"")
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert [line["event"] for line in logs] == ["intake_request_failed"]


def test_traces_are_refused_in_a_sentence(server: GrpcServer) -> None:
    method = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
    error = refused(server, b"", method=method)
    assert (error.code(), error.details()[:18]) == (grpc.StatusCode.UNIMPLEMENTED, "Logweir takes logs")


def test_a_key_is_asked_for_in_the_metadata(door: MemoryDoor) -> None:
    server = GrpcServer(door, with_key)
    with serving(server, server.start("127.0.0.1", 0)):
        assert refused(server, request("x")).code() is grpc.StatusCode.UNAUTHENTICATED
        wrong = refused(server, request("x"), metadata=[("authorization", "Bearer guess")])
        assert wrong.code() is grpc.StatusCode.UNAUTHENTICATED
        foreign = refused(server, request("x"), metadata=[("authorization", "Bearer lw_secret")])
        assert foreign.code() is grpc.StatusCode.PERMISSION_DENIED
        assert door.tries == 0
        emit(server, "payment failed", headers={"authorization": "Bearer lw_secret"})
    assert [sender.key for *_, sender in door.requests] == ["edge"]


def unsent(server: GrpcServer) -> grpc.StatusCode:
    """How a request ends whose message never comes."""
    ended = threading.Event()

    def messages() -> Iterator[bytes]:
        ended.wait(TIMEOUT_S)
        yield from ()

    with grpc.insecure_channel(target(server)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(EXPORT)(messages(), timeout=TIMEOUT_S)
        ended.set()
    return caught.value.code()


def test_the_key_is_looked_at_before_the_message_comes(door: MemoryDoor) -> None:
    server = GrpcServer(door, with_key)
    with serving(server, server.start("127.0.0.1", 0)):
        assert unsent(server) is grpc.StatusCode.UNAUTHENTICATED


def test_a_message_that_does_not_come_is_given_up_and_its_memory_is_free_again(
    door: MemoryDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "SLOW_S", 0.2)
    room = Room()
    server = GrpcServer(door, anyone, room=room)
    with serving(server, server.start("127.0.0.1", 0)), structlog.testing.capture_logs():
        began = time.monotonic()
        assert unsent(server) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began < TIMEOUT_S / 2  # the server's deadline and not the client's
        assert wait_until(lambda: room.held == 0, timeout_s=TIMEOUT_S)


def test_a_message_is_refused_while_other_listeners_hold_all_memory(door: MemoryDoor) -> None:
    server = GrpcServer(door, anyone, room=Room(limit=grpc_server.MOST_BYTES - 1))
    with serving(server, server.start("127.0.0.1", 0)):
        assert refused(server, request("x")).code() is grpc.StatusCode.UNAVAILABLE
    assert door.tries == 0


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty settings


@pytest.mark.parametrize("said", [b"", PREFACE], ids=["silent", "idle"])
def test_connections_without_requests_keep_no_sender_out(door: MemoryDoor, said: bytes) -> None:
    budget = ConnectionBudget(most=8)
    server = GrpcServer(door, anyone, budget=budget)
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(server, server.start("127.0.0.1", 0)))
        kept = stack.enter_context(grpc.insecure_channel(target(server))).unary_unary(EXPORT)
        kept(request("first"), timeout=TIMEOUT_S)
        for _ in range(20):
            one = stack.enter_context(socket.create_connection(server.address, TIMEOUT_S))
            one.sendall(said)
            if said:
                with contextlib.suppress(ConnectionError):
                    one.recv(9)  # the settings of HTTP/2, so that it has begun
        emit(server, "of a new sender")
        kept(request("last"), timeout=TIMEOUT_S)
    assert len(door.requests) == 3
    assert {sender.peer for *_, sender in door.requests} == {"127.0.0.1"}


def test_the_folder_of_a_listener_goes_with_it(door: MemoryDoor) -> None:
    server = GrpcServer(door, anyone)
    with serving(server, server.start("127.0.0.1", 0)):
        assert server._front is not None
        folder = Path(server._front.inner.removeprefix("unix:")).parent
        emit(server, "one")
        assert [path.name for path in folder.iterdir()] == ["s"]
    assert not folder.exists()


def test_tls_asks_for_a_certificate_where_a_client_ca_is_named(door: MemoryDoor, tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    files = TlsFiles(cert=made.server, key=made.folder / "server.key", client_ca=made.ca)
    server = GrpcServer(door, anyone)
    with serving(server, server.start("127.0.0.1", 0, tls=files)):
        credentials = grpc.ssl_channel_credentials(
            made.ca.read_bytes(), (made.folder / "client.key").read_bytes(), made.client.read_bytes()
        )
        emit(server, "secret", insecure=False, credentials=credentials)
        stranger = grpc.ssl_channel_credentials(made.ca.read_bytes())
        with grpc.secure_channel(target(server), stranger) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(EXPORT)(request("x"), timeout=5)
    assert [records.messages for records in door.records] == [["secret"]]


def test_a_port_that_is_taken_is_an_error(door: MemoryDoor) -> None:
    server = GrpcServer(door, anyone)
    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.closing(taken):
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=str(port)), serving(server, server.start("127.0.0.1", port)):
            pass
