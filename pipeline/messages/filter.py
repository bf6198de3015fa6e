"""Keeps what is no message of ours from being executed, and from ending a worker.

kombu decodes messages unguarded, and Celery runs anything that a message asks for: callbacks, chains, expiry,
compressed bodies. A wake-up is only a task's name and ids. So the filter reads only these, from at most
MAX_MESSAGE bytes of JSON, and hands Celery a new message made of them. It drops, counts and logs everything
else without its content; the sweeper sends lost wake-ups again."""

import base64
import json
from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime
from queue import Empty
from typing import Any, Final

from kombu.exceptions import OperationalError
from kombu.transport import redis as transport

from pipeline.logs import logger
from pipeline.messages.spent import spent
from pipeline.messages.wake_ups import body_of, celery_message, task_headers
from pipeline.observe import counters as metrics

# A wake-up has about 1.5 KiB; one with the longest id, in characters that JSON writes as \uXXXX, has 30.
MAX_MESSAGE: Final = 32 * 1024
MAX_ID: Final = 512  # characters; the ledger takes none that is longer
MAX_IDS: Final = 3
MAX_SHOWN: Final = 1024  # characters of a task's arguments as Flower shows them
YEARS: Final = range(2000, 2200)  # Of an expiry. Times far outside cannot be put into every zone.
# These must be empty: each makes Celery do more than run one task once, now.
NOTHING_ELSE: Final = ("eta", "group", "chord", "compression", "retries", "stamps", "stamped_headers")
HUGE: Final = b'"too large"'

dropped: Counter[str] = Counter()  # messages of this process that were dropped, by reason


class QoS(transport.QoS):  # type: ignore[misc] # kombu publishes no types
    """kombu's store of unacknowledged messages."""

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        """Put back a dead worker's message; an unreadable one would block all others for ever."""
        try:
            super().restore_by_tag(tag, client, leftmost)
        except (ValueError, TypeError, RecursionError) as exc:
            drop(f"it cannot be restored: {type(exc).__name__}")
            with self.channel.conn_or_acquire(client) as connection, connection.pipeline() as pipe:
                self._remove_from_indices(tag, pipe).execute()


class Channel(transport.Channel):  # type: ignore[misc] # kombu publishes no types
    """The Redis channel of kombu that drops what is no message of ours."""

    QoS = QoS
    tasks: frozenset[str] = frozenset()  # names that may run here; set by install()
    _delivered = False

    def _create_client(self, asynchronous: bool = False) -> Any:
        client = super()._create_client(asynchronous=asynchronous)
        client.response_callbacks["BRPOP"] = bounded
        return client

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        deliver = self.connection._callbacks[queue]
        # Celery's own mailboxes and events: their form alone is checked here.
        foreign = queue in self._fanout_queues or queue.endswith(".pidbox")

        def checked(raw: Any) -> None:
            self._delivered = True
            why = fault(raw) if foreign else fault(raw) or unwanted(raw, self.tasks)
            if why:
                drop(why, queue=queue)
            elif foreign or not _is_spent(raw, queue):
                deliver(raw if foreign else wake_up(raw, queue))

        self.connection._callbacks[queue] = checked

    def _brpop_read(self, **options: Any) -> Any:
        return self._read(super()._brpop_read, **options)

    def _receive(self) -> Any:
        return self._read(super()._receive)

    def _read(self, read: Callable[..., Any], **options: Any) -> Any:
        self._delivered = False
        try:
            return read(**options)
        except (
            Empty,
            OSError,
            OperationalError,
            *self.connection.connection_errors,
            *self.connection.channel_errors,
        ):
            raise
        except Exception as exc:
            if self._delivered:
                raise
            drop(f"it cannot be decoded: {type(exc).__name__}")
            raise Empty from exc


def bounded(answer: Any) -> Any:
    """BRPOP's answer; a value over MAX_MESSAGE is let go before anybody decodes it."""
    if not answer:
        return None
    name, value = answer
    return name, HUGE if len(value) > MAX_MESSAGE else value


def fault(raw: object) -> str:
    """Why this has not everything that kombu reads without asking; "" when it has."""
    if raw == "too large":
        return "it is too large"
    return "" if is_message(raw) else "it has not the form of a message"


def is_message(raw: object) -> bool:
    """Whether this has everything that kombu reads without asking."""
    if not isinstance(raw, dict) or not isinstance(raw.get("body"), str):
        return False
    properties, headers = raw.get("properties"), raw.get("headers")
    if not isinstance(properties, dict) or not isinstance(headers, dict):
        return False
    info = properties.get("delivery_info")
    texts = (raw.get("content-type"), raw.get("content-encoding"), properties.get("delivery_tag"))
    return (
        isinstance(info, dict)
        and all(isinstance(info.get(name), str) for name in ("exchange", "routing_key"))
        and all(isinstance(text, str) for text in texts)
        and properties.get("body_encoding") in (None, "utf-8", "base64")
    )


def unwanted(raw: dict[str, Any], tasks: Collection[str]) -> str:
    """Why a message asks for more than to run one of these tasks with ids; "" when it does not."""
    headers = raw["headers"]
    task = headers.get("task")
    if not isinstance(task, str) or task not in tasks:
        return "its task does not run here"
    if raw["content-type"] != "application/json" or raw["content-encoding"] != "utf-8":
        return "its content is not JSON"
    if not _id(headers.get("id")) or not _id(raw["properties"]["delivery_tag"]):
        return "its id is no id"
    if any(headers.get(name) for name in NOTHING_ELSE) or headers.get("timelimit") not in (
        None,
        [None, None],
    ):
        return "it asks for more than one task"
    if not _expiry(headers.get("expires")):
        return "its expiry is no time"
    return "" if message_ids(raw) is not None else "its body is not a list of ids alone"


def message_ids(raw: dict[str, Any]) -> list[str] | None:
    """The ids in a message's body; None when it is anything but `[[id, ...], {}, {nothing}]`."""
    try:
        body = raw["body"]
        if raw["properties"].get("body_encoding") == "base64":
            body = base64.b64decode(body, validate=True)
        args, kwargs, embed = json.loads(body)
    except (ValueError, TypeError, RecursionError):
        return None
    alone = kwargs == {} and (embed is None or (isinstance(embed, dict) and not any(embed.values())))
    if not alone or not isinstance(args, list) or len(args) > MAX_IDS:
        return None
    return args if all(_id(arg, empty=True) for arg in args) else None


def wake_up(raw: dict[str, Any], queue: str) -> dict[str, Any]:
    """The message that Celery sees for one that is not unwanted()."""
    sent = raw["headers"]
    headers = {
        **task_headers(sent["task"], sent["id"]),
        "expires": sent.get("expires"),
        "argsrepr": _shown(sent.get("argsrepr")),
        "origin": _shown(sent.get("origin")),
        # The sweeper looks for these in waiting messages.
        **{name: sent[name] for name in ("batch", "request") if _id(sent.get(name), empty=True)},
    }
    body = body_of(message_ids(raw) or [])
    return celery_message(body, queue, headers, tag=raw["properties"]["delivery_tag"])


def drop(why: str, **context: object) -> None:
    """Count it; log the first of its kind and every thousandth, so that a flood does not fill the log."""
    dropped[why] += 1
    metrics.dropped()
    if dropped[why] % 1000 == 1:
        logger(**context).warning("message.dropped", why=why, count=dropped[why])


def _is_spent(raw: dict[str, Any], queue: str) -> bool:
    batch_id = raw["headers"].get("batch")
    return isinstance(batch_id, str) and spent.take(queue, batch_id)


def _id(value: object, *, empty: bool = False) -> bool:
    return isinstance(value, str) and (empty or value != "") and len(value) <= MAX_ID and value.isprintable()


def _shown(value: object) -> str:
    return value[:MAX_SHOWN] if isinstance(value, str) and value.isprintable() else ""


def _expiry(value: object) -> bool:
    if value is None:
        return True
    try:
        return isinstance(value, str) and len(value) <= 40 and datetime.fromisoformat(value).year in YEARS
    except ValueError:
        return False


def install(tasks: Collection[str] = ()) -> None:
    """For a process that consumes, with the names of the tasks that run in it; senders need none of it."""
    Channel.tasks = frozenset(tasks)
    transport.Transport.Channel = Channel
