"""OTLP over gRPC: LogsService/Export.

A full door is UNAVAILABLE with RetryInfo, after which clients send again. A request that can never be taken
is answered with a code that they do not repeat, and a sentence; handlers take bytes, so that holds for
unreadable ones too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
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
from pipeline.sources.protocols.answers.otlp_answers import otlp_response
from pipeline.sources.protocols.contract import Hints, Undecodable
from pipeline.sources.protocols.otlp import decode_protobuf
from pipeline.workers.intake.connections import STOP_S
from pipeline.workers.intake.door import Door, IdentityConflict
from pipeline.workers.intake.identity import of_body
from pipeline.workers.intake.refusals import AGAIN, RETRY_AFTER_S, Refusal, RequestRefused
from pipeline.workers.intake.rule_book import RuleBook
from pipeline.workers.sockets import TlsFiles

MOST_BYTES: Final = 20 * 1024 * 1024  # decompressed, as over HTTP
# Requests of this process that are decoded or wait for the door; each has a body of up to MOST_BYTES.
MOST_REQUESTS: Final = 64
_IN_A_THREAD: Final = 256 * 1024
_SERVICE: Final = "opentelemetry.proto.collector.{0}.v1.{1}Service"
EXPORT: Final = f"/{_SERVICE.format('logs', 'Logs')}/Export"
_OTHERS: Final = (("trace", "Trace"), ("metrics", "Metrics"))
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 100),  # of one connection
    ("grpc.keepalive_time_ms", 120_000),  # a machine that lost its power says no goodbye
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # collectors ping every 10 s
)
CODES: Final = {
    Refusal.FULL: grpc.StatusCode.UNAVAILABLE,
    Refusal.AWAY: grpc.StatusCode.UNAVAILABLE,
    Refusal.FAILED: grpc.StatusCode.UNAVAILABLE,
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

    def __init__(self, door: Door, authorize: Authorize, rules: RuleBook | None = None) -> None:
        self.door = door
        self._rules = rules or RuleBook()
        self.address = ("", 0)  # where it listens
        self._authorize = authorize
        self._requests = 0
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, *, tls: TlsFiles | None = None, share: bool = False) -> None:
        """Listens from now on: gRPC takes no socket that is open. `share`: beside other processes of this
        pipeline that say so too. Raises OSError, BadInput."""
        server = grpc.aio.server(options=(*_OPTIONS, ("grpc.so_reuseport", int(share))))
        service = _SERVICE.format("logs", "Logs")
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    service, {"Export": grpc.unary_unary_rpc_method_handler(self._export)}
                ),
                *(
                    grpc.method_handlers_generic_handler(
                        _SERVICE.format(*names), {"Export": grpc.unary_unary_rpc_method_handler(_logs_only)}
                    )
                    for names in _OTHERS
                ),
            ]
        )
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                bound = server.add_insecure_port(where)
            else:
                bound = server.add_secure_port(where, _credentials(tls))
        except RuntimeError as exc:
            raise OSError(f"gRPC cannot listen on {where}: {exc}") from exc
        await server.start()
        self._server = server
        self.address = (host, bound)

    async def stop(self) -> None:
        """Takes no request any more; answers those that have come, within STOP_S."""
        if self._server is not None:
            await self._server.stop(STOP_S)

    async def _export(self, body: bytes, context: Any) -> bytes:
        self._requests += 1
        try:
            if self._requests > MOST_REQUESTS:
                raise RequestRefused(Refusal.FULL, "too many requests are under way; send again in a moment")
            return await self._answer(body, context)
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

    async def _answer(self, body: bytes, context: Any) -> bytes:
        headers = {
            name.lower(): value
            for name, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        key = await self._authorize(headers)
        hints = Hints(
            path=EXPORT,
            headers=headers,
            workload=key.workload if key else "",
            peer=_address(context.peer()),
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
        response: bytes = otlp_response(rejected=decoded.rejected, why=decoded.why).SerializeToString()
        return response

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
            sender = SentBy(protocol=self.protocol, key="", peer=_address(context.peer()))
            self.door.senders.heard(sender, refused=True)
        await context.abort(code, sentence, trailers)
        raise AssertionError("abort raises")


async def _logs_only(_body: bytes, context: Any) -> bytes:
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


def _address(peer: str) -> str:
    """Of `ipv4:192.0.2.7:40000` and `ipv6:%5B::1%5D:40000`."""
    host = peer.partition(":")[2].rpartition(":")[0]
    return host.replace("%5B", "").replace("%5D", "").strip("[]")
