"""OTLP over gRPC: LogsService/Export.

A full door is UNAVAILABLE with RetryInfo, after which clients send again. A request that can never be taken
is answered with a code that they do not repeat, and a sentence; handlers take bytes, so that holds for
unreadable ones too.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, ClassVar, Final, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from pipeline.errors import RedisUnavailable
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.records.delivery import Full
from pipeline.service.access.keys import SenderKey
from pipeline.service.senders import SentBy
from pipeline.sources.protocols.answers.otlp_answers import PROTOBUF, otlp_success
from pipeline.sources.protocols.contract import Hints, Undecodable
from pipeline.sources.protocols.otlp import decode_protobuf
from pipeline.workers.bounds.connection_budget import ConnectionBudget
from pipeline.workers.intake.bodies import SLOW_S, Room, Share
from pipeline.workers.intake.connections import STOP_S
from pipeline.workers.intake.door import Door, IdentityConflict
from pipeline.workers.intake.identity import of_body
from pipeline.workers.intake.otlp_grpc.grpc_front import GrpcFront
from pipeline.workers.intake.refusals import AGAIN, RETRY_AFTER_S, Refusal, RequestRefused
from pipeline.workers.intake.rule_book import RuleBook
from pipeline.workers.sockets import TlsFiles

# Decompressed: the default of gRPC and of OpenTelemetry's collector.
MOST_BYTES: Final = 4 << 20
# Requests of this process that are decoded or wait for the door; each has a body of up to MOST_BYTES.
MOST_REQUESTS: Final = 64
MOST_CONNECTIONS: Final = 1_000  # each takes several files, so they are set apart from those of all listeners
_IN_A_THREAD: Final = 256 * 1024
_SERVICE: Final = "opentelemetry.proto.collector.{0}.v1.{1}Service"
EXPORT: Final = f"/{_SERVICE.format('logs', 'Logs')}/Export"
_OTHERS: Final = (("trace", "Trace"), ("metrics", "Metrics"))
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 16),  # of one connection
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),  # without a request; clients connect again when they need to
    # A request without a key can make us hold one window, which this keeps at 64 KiB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", 120_000),  # a machine that lost its power says no goodbye
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # collectors ping every 10 s
)
CODES: Final = {
    Refusal.FULL: grpc.StatusCode.UNAVAILABLE,
    Refusal.AWAY: grpc.StatusCode.UNAVAILABLE,
    Refusal.FAILED: grpc.StatusCode.UNAVAILABLE,
    Refusal.SLOW: grpc.StatusCode.DEADLINE_EXCEEDED,
    Refusal.UNDECODABLE: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.KEY_MISSING: grpc.StatusCode.UNAUTHENTICATED,
    Refusal.KEY_WRONG: grpc.StatusCode.UNAUTHENTICATED,
    Refusal.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Refusal.CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
}

# The key of a sender by the metadata of its request, names in lower case; None where none is asked for.
# Raises RequestRefused.
Authorize = Callable[[Mapping[str, str]], Awaitable[SenderKey | None]]


class GrpcServer:
    """A listener of its own, because HTTP/2 with trailers is no ASGI."""

    protocol: ClassVar[str] = "otlp"

    def __init__(
        self,
        door: Door,
        authorize: Authorize,
        rules: RuleBook | None = None,
        *,
        room: Room | None = None,
        budget: ConnectionBudget | None = None,
    ) -> None:
        """`room`: the memory of bodies that all listeners of the process share. `budget`: of connections."""
        self.door = door
        self._room = room or Room()
        self._budget = budget or ConnectionBudget(self._room, most=MOST_CONNECTIONS)
        self._rules = rules or RuleBook()
        self.address = ("", 0)  # where it listens
        self._authorize = authorize
        self._requests = 0
        self._server: grpc.aio.Server | None = None
        self._front: GrpcFront | None = None

    async def start(self, host: str, port: int, *, tls: TlsFiles | None = None, share: bool = False) -> None:
        """Listens from now on. `share`: beside other processes of this pipeline that say so too. Raises
        OSError, BadInput."""
        server = grpc.aio.server(options=_OPTIONS)
        service = _SERVICE.format("logs", "Logs")
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    # For a handler of a stream, gRPC reads no message before the handler asks for one.
                    service,
                    {"Export": grpc.stream_unary_rpc_method_handler(self._export)},
                ),
                *(
                    grpc.method_handlers_generic_handler(
                        _SERVICE.format(*names), {"Export": grpc.stream_unary_rpc_method_handler(_logs_only)}
                    )
                    for names in _OTHERS
                ),
            ]
        )
        front = self._front = GrpcFront(self._budget)
        try:
            if tls is None:
                server.add_insecure_port(front.inner)
            else:
                server.add_secure_port(front.inner, _credentials(tls))
        except RuntimeError as exc:
            raise OSError(f"gRPC cannot listen on {front.inner}: {exc}") from exc
        await server.start()
        self._server = server
        self.address = (host, await front.start(host, port, share=share))

    async def stop(self) -> None:
        """Takes no request any more; answers those that have come, within STOP_S."""
        if self._front is not None and self._server is not None:
            self._front.stop_listening()
            await self._server.stop(STOP_S)
            self._front.close()

    def _peer(self, context: Any) -> str:
        """The address of the client."""
        return "" if self._front is None else self._front.peers.get(context.peer(), "")

    async def _export(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        self._requests += 1
        try:
            if self._requests > MOST_REQUESTS:
                raise RequestRefused(Refusal.FULL, "too many requests are under way; send again in a moment")
            with self._room.shared() as share:
                return await self._answer(messages, context, share)
        except RequestRefused as exc:
            await self._refuse(context, exc.kind, str(exc))
        except Undecodable as exc:
            await self._refuse(context, Refusal.UNDECODABLE, str(exc))
        except IdentityConflict as exc:
            await self._refuse(context, Refusal.CONFLICT, str(exc))
        except RedisUnavailable as exc:
            await self._refuse(context, Refusal.AWAY, str(exc))
        except Exception:  # noqa: BLE001 - clients drop what is answered with UNKNOWN
            logger().exception("intake_request_failed", protocol=self.protocol)
            await self._refuse(context, Refusal.FAILED, "the intake failed; its log has the reason")
        finally:
            self._requests -= 1

    async def _message(self, messages: AsyncIterator[bytes], share: Share) -> bytes:
        """The one message of a request, within a time, in the memory that all listeners share."""
        share.take(MOST_BYTES)
        try:
            async with asyncio.timeout(SLOW_S):
                body = await anext(messages)
        except TimeoutError:
            raise RequestRefused(
                Refusal.SLOW, f"the message did not arrive within {SLOW_S:g} s; send smaller requests"
            ) from None
        except StopAsyncIteration:
            raise RequestRefused(Refusal.UNDECODABLE, "the request has no message") from None
        share.give(MOST_BYTES - len(body))
        return body

    async def _answer(self, messages: AsyncIterator[bytes], context: Any, share: Share) -> bytes:
        headers = {
            name.lower(): value
            for name, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        key = await self._authorize(headers)
        body = await self._message(messages, share)
        hints = Hints(
            path=EXPORT,
            headers=headers,
            workload=key.workload if key else "",
            peer=self._peer(context),
            protocol=self.protocol,
            key=key.name if key else "",
            rules=self._rules.rules,
        )
        if len(body) > _IN_A_THREAD:
            decoded = await asyncio.to_thread(decode_protobuf, body, hints)
        else:
            decoded = decode_protobuf(body, hints)
        if key is not None and (name := key.forbids(set(decoded.records.workloads or ()))) is not None:
            raise RequestRefused(Refusal.FORBIDDEN, f"this key may not send for the workload {name!r}")
        owner = key.name if key else ""
        answer = await self.door.take(
            decoded,
            identity=of_body(body, distinct=decoded.distinct, key=owner, path=EXPORT),
            sender=SentBy(protocol=self.protocol, key=owner, peer=hints.peer),
        )
        if isinstance(answer, Full):
            raise RequestRefused(Refusal.FULL, str(answer))
        return otlp_success(PROTOBUF)

    async def _refuse(self, context: Any, kind: Refusal, sentence: str) -> NoReturn:
        code = CODES.get(kind, grpc.StatusCode.INVALID_ARGUMENT)
        trailers: tuple[tuple[str, bytes], ...] = ()
        if kind in AGAIN:
            retry_info = RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S))
            detail = AnyMessage()
            detail.Pack(retry_info)
            status = Status(code=code.value[0], message=sentence, details=[detail])
            trailers = (
                ("grpc-status-details-bin", status.SerializeToString()),
                # Where the SDK of Python looks for it.
                ("google.rpc.retryinfo-bin", retry_info.SerializeToString()),
            )
        elif kind is not Refusal.CONFLICT:  # the door has counted that
            metrics.request_refused(self.protocol)
            sender = SentBy(protocol=self.protocol, key="", peer=self._peer(context))
            self.door.senders.heard(sender, refused=True)
        await context.abort(code, sentence, trailers)
        raise AssertionError("abort raises")


async def _logs_only(_messages: AsyncIterator[bytes], context: Any) -> bytes:
    await context.abort(
        grpc.StatusCode.UNIMPLEMENTED, "Logweir takes logs; send traces and metrics elsewhere"
    )
    return b""


def _credentials(tls: TlsFiles) -> Any:
    tls.context()  # says in a sentence what gRPC would say in a log of its own
    client_ca = tls.client_ca.read_bytes() if tls.client_ca else None
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.cert.read_bytes())],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )
