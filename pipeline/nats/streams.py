"""Streams of JetStream: made where they are absent, read by sequence, written with ids.

A stream is read without acks, by a consumer that the server forgets. After any fault a new consumer begins at
the sequence that the ledger holds. nats-py's own subscription does not survive a killed server
(nats-io/nats.py#504), so the requests for messages are sent here.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError
from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError, NotFoundError

from pipeline.errors import SourceUnavailable
from pipeline.nats.connection import ASK_S, NatsConnection
from pipeline.nats.subjects import EVENTS_PREFIX, OUT_PREFIX
from pipeline.settings.nats import NatsSource

_API: Final = "$JS.API"
INACTIVE_S: Final = 60.0  # after so long without a request the server forgets the consumer
DUPLICATE_WINDOW_S: Final = 600.0  # in which the server knows a repeated Nats-Msg-Id
OUT_HOURS: Final = 24
EVENTS_DAYS, EVENTS_MIB = 7, 256  # of the stream of events
GRACE_S: Final = 3.0  # for the end of a request, after the server's own limit
_ENDS: Final = ("Batch Completed", "Message Size Exceeds MaxBytes")
MSG_ID: Final = "Nats-Msg-Id"


class StreamMessage(NamedTuple):
    """A message of a stream. `nanos`: when the server took it, ns since 1970. `pending`: behind it."""

    subject: str
    data: bytes
    sequence: int
    nanos: int
    pending: int
    headers: Mapping[str, str]


class StreamFacts(NamedTuple):
    """A stream at one moment. `id` tells it from a later one of its name."""

    id: str
    first: int
    last: int
    last_at: datetime | None


def ensure_in(connection: NatsConnection, source: NatsSource) -> StreamFacts:
    """The stream that keeps logs until they are read. A stream of the user stays as it is.

    It lists log subjects alone: a stream that covers the subject of a request would answer it."""
    config = api.StreamConfig(
        name=source.stream,
        description="Logs that Opni's services publish, until Logweir has read them.",
        subjects=[name for subject in source.subjects for name in (subject, f"{subject}.*")],
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD,
        max_age=source.keep_hours * 3600.0,
        max_bytes=source.size_gib << 30,
        num_replicas=source.replicas,
    )
    return _ensure(connection, config)


def ensure_out(connection: NatsConnection, source: NatsSource) -> StreamFacts:
    """The stream of results. The server publishes what it stored under the subjects of Opni."""
    config = api.StreamConfig(
        name=source.out,
        description="What Logweir publishes. The server repeats it under Opni's subjects, each message once.",
        subjects=[f"{OUT_PREFIX}*"],
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD,
        max_age=OUT_HOURS * 3600.0,
        max_bytes=source.size_gib << 30,
        num_replicas=source.replicas,
        duplicate_window=DUPLICATE_WINDOW_S,
        republish=api.RePublish(src=f"{OUT_PREFIX}*", dest="{{wildcard(1)}}"),
    )
    return _ensure(connection, config)


def ensure_events(connection: NatsConnection, source: NatsSource) -> str:
    """The name of the stream of events. The server publishes what it stored under `logweir.events.`."""
    name = f"{source.out}-events"
    config = api.StreamConfig(
        name=name,
        description="What has happened in Logweir, as CloudEvents. The server repeats it, each event once.",
        subjects=[f"{OUT_PREFIX}*.*"],
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD,
        max_age=EVENTS_DAYS * 86_400.0,
        max_bytes=EVENTS_MIB << 20,
        num_replicas=source.replicas,
        duplicate_window=DUPLICATE_WINDOW_S,
        republish=api.RePublish(
            src=f"{OUT_PREFIX}*.*", dest=EVENTS_PREFIX + "{{wildcard(1)}}.{{wildcard(2)}}"
        ),
    )
    _ensure(connection, config)
    return name


def newest_message_id(connection: NatsConnection, stream: str) -> str:
    """The Nats-Msg-Id of the last message of a stream, "" without one. Raises SourceUnavailable."""
    last, js = facts_of(connection, stream).last, connection.jetstream

    async def newest() -> str:
        try:
            message = await js.get_msg(stream, last)
        except NotFoundError:  # it was removed by its age
            return ""
        return str((message.headers or {}).get(MSG_ID, ""))

    return connection.call(newest()) if last else ""


def facts_of(connection: NatsConnection, stream: str) -> StreamFacts:
    """Raises SourceUnavailable."""
    return _facts(connection.call(_info(connection.client, stream)))


def _ensure(connection: NatsConnection, config: api.StreamConfig) -> StreamFacts:
    js, client = connection.jetstream, connection.client

    async def ensured() -> dict[str, Any]:
        try:
            return await _info(client, config.name or "")
        except NotFoundError:
            pass
        try:
            await js.add_stream(config)
        except BadRequestError as exc:
            # Another process was quicker, or the server refuses what the address asks for.
            try:
                return await _info(client, config.name or "")
            except NotFoundError:
                raise exc from None
        return await _info(client, config.name or "")

    try:
        return _facts(connection.call(ensured(), 3 * ASK_S))
    except SourceUnavailable as exc:
        if isinstance(exc.__cause__, BadRequestError):
            raise SourceUnavailable(
                f"the stream {config.name} cannot be made at {connection.source}: {exc.__cause__.description}; "
                "make it by hand, or name another one (stream=, out=)"
            ) from exc
        if isinstance(exc.__cause__, NoRespondersError):
            raise SourceUnavailable(
                f"{connection.source} has no JetStream; switch it on, or write mode=core (at most once)"
            ) from exc
        raise


async def _info(client: Client, stream: str) -> dict[str, Any]:
    # nats-py drops the nanoseconds of times.
    answer = await client.request(f"{_API}.STREAM.INFO.{stream}", b"", timeout=ASK_S)
    found: dict[str, Any] = json.loads(answer.data)
    if "error" in found:
        raise JetStreamFault.of(found["error"])
    return found


class JetStreamFault:
    """Errors of JetStream as nats-py raises them."""

    @staticmethod
    def of(error: Mapping[str, Any]) -> Exception:
        from nats.js.errors import APIError

        try:
            APIError.from_error(dict(error))
        except APIError as exc:
            return exc
        return ValueError(f"JetStream answered {error!r}")


def _facts(info: Mapping[str, Any]) -> StreamFacts:
    state = info["state"]
    last = int(state["last_seq"])
    first = int(state["first_seq"]) if state["messages"] else last + 1
    at = str(state.get("last_ts", ""))[:19]
    moment = datetime.fromisoformat(at).replace(tzinfo=UTC) if last and at else None
    return StreamFacts(str(info["created"]), first, last, moment)


class StreamReader:
    """A consumer of one stream. All methods run in the thread of the connection."""

    def __init__(self, client: Client, js: JetStreamContext, stream: str) -> None:
        self._client, self._js, self._stream = client, js, stream
        self._consumer = ""
        self._inbox: Subscription | None = None
        self._found: list[StreamMessage] = []
        self._wanted = 0
        self._done = asyncio.Event()
        self._fault = ""
        self._place = ""  # the subject of answers, without the number of the request
        self._request = 0

    async def open(
        self, *, sequence: int = 0, since: datetime | None = None, headers_only: bool = False
    ) -> None:
        """Begins at a sequence, or at a moment."""
        moment = None if since is None else since.isoformat().replace("+00:00", "Z")
        config = api.ConsumerConfig(
            ack_policy=api.AckPolicy.NONE,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE
            if since is None
            else api.DeliverPolicy.BY_START_TIME,
            opt_start_seq=sequence if since is None else None,
            opt_start_time=moment,  # type: ignore[arg-type] # it goes into JSON as it is
            inactive_threshold=INACTIVE_S,
            mem_storage=True,
            num_replicas=1,
            headers_only=headers_only or None,
        )
        info = await self._js.add_consumer(self._stream, config)
        self._consumer = info.name
        self._place = self._client.new_inbox()
        # Bounded by the requests: each asks for so many messages and bytes.
        self._inbox = await self._client.subscribe(
            f"{self._place}.*", cb=self._on_message, pending_bytes_limit=-1
        )

    async def close(self) -> None:
        """The server drops the consumer too."""
        if self._inbox is not None:
            await self._inbox.unsubscribe()
        if self._consumer:
            await self._js.delete_consumer(self._stream, self._consumer)

    async def fetch(self, count: int, most_bytes: int, wait_s: float) -> Sequence[StreamMessage]:
        """The next messages, after `wait_s` those that came.

        Raises TimeoutError, ConnectionError or NatsError where the consumer has gone: make a new one."""
        self._found, self._wanted, self._fault = [], count, ""
        self._request += 1
        self._done.clear()
        request = {"batch": count, "max_bytes": most_bytes, "expires": int(wait_s * 1e9)}
        await self._client.publish(
            f"{_API}.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
            json.dumps(request).encode(),
            reply=f"{self._place}.{self._request}",
        )
        await asyncio.wait_for(self._done.wait(), wait_s + GRACE_S)
        if self._fault:
            raise ConnectionResetError(f"the consumer has gone: {self._fault}")
        return self._found

    def _is_end(self, status: str, why: str) -> bool:
        """Whether the request has all that it asked for, or nothing more is there."""
        return status in ("404", "408") or (status == "409" and why in _ENDS)

    async def _on_message(self, message: Msg) -> None:
        headers = message.headers or {}
        if (status := headers.get("Status")) is not None and not message.data:
            # The end of an earlier request says nothing of this one.
            if status == "100" or message.subject != f"{self._place}.{self._request}":
                return
            if not self._is_end(status, headers.get("Description", "")):
                self._fault = f"{status} {headers.get('Description', '')}".strip()
            self._done.set()
            return
        parts = message.reply.split(".")
        at = 5 if len(parts) == 9 else 7  # of newer servers: a domain and an account stand before them
        self._found.append(
            StreamMessage(
                message.subject, message.data, int(parts[at]), int(parts[at + 2]), int(parts[at + 3]), headers
            )
        )
        if len(self._found) >= self._wanted:
            self._done.set()


async def publish_all(
    js: JetStreamContext, messages: Sequence[tuple[str, bytes, str, Mapping[str, str]]], *, at_once: int = 64
) -> int:
    """Stores (subject, data, id, headers) in the stream of results; how many it had already.

    Raises NatsError, TimeoutError: some of them may be stored, and their ids make a repetition harmless."""
    limit = asyncio.Semaphore(at_once)

    async def one(subject: str, data: bytes, msg_id: str, headers: Mapping[str, str]) -> bool:
        async with limit:
            ack = await js.publish(f"{OUT_PREFIX}{subject}", data, headers={MSG_ID: msg_id, **headers})
            return bool(ack.duplicate)

    return sum(await asyncio.gather(*(one(*message) for message in messages)))


async def publish_once(client: Client, messages: Sequence[tuple[str, bytes, str, Mapping[str, str]]]) -> None:
    """Publishes (subject, data, id, headers) without a stream: nobody keeps them, and ids say nothing."""
    for subject, data, _, headers in messages:
        await client.publish(subject, data, headers=dict(headers) or None)
    await client.flush(timeout=5)


def described(source: NatsSource) -> str:
    """The server, and the stream where there is one, in a sentence. Raises SourceUnavailable."""
    connection = NatsConnection(source, name="logweir doctor")
    try:
        client = connection.client
        server = (
            f"nats-server {client.connected_server_version}, messages of at most {client.max_payload:,} bytes"
        )
        if not source.is_durable:
            return f"{server}; mode=core takes a message at most once"
        try:
            facts = facts_of(connection, source.stream)
        except SourceUnavailable as exc:
            if not isinstance(exc.__cause__, NotFoundError):
                raise
            return f"{server}; the stream {source.stream} will be made"
        return f"{server}; the stream {source.stream} ends at {facts.last:,}"
    finally:
        connection.close()
