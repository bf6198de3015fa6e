"""The Celery app and its settings, each with its reason.

Celery only carries wake-ups. The sweeper sends a lost message again; a repeated one finds its batch done or
claimed. So messages are acknowledged late and never carry payload, and no result backend exists.
"""

import functools
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, urlsplit

from celery import Celery
from kombu import Exchange, Queue

from pipeline.errors import BadSetting
from pipeline.messages.routing import (
    ALL_QUEUES,
    QUEUE_PERIODIC,
    TASK_COMPACT,
    TASK_SWEEP,
    TASK_TICK,
    TASK_WATCH,
)
from pipeline.redis.sentinels import sentinel_options
from pipeline.redis.tls import tls_arguments
from pipeline.settings import Settings
from pipeline.settings.values import TLS_OPTIONS, SentinelAddress, is_sentinel


def broker_url(redis_url: str) -> str:
    """The URL that kombu wants for the Redis that redis-py calls `redis_url`.

    redis-py takes the database from `?db=`, kombu from the path, and for unix sockets from `virtual_host`.
    Messages must lie in the ledger's database, or the sweeper would never see them. Each sentinel has a URL
    of its own there, with the login of Redis: after a switch kombu reads that one alone.
    """
    if is_sentinel(redis_url):
        address = SentinelAddress.parse(redis_url)
        login = ""
        if address.username or address.password:
            login = f"{quote(address.username or '', safe='')}:{quote(address.password or '', safe='')}@"
        return ";".join(
            f"sentinel://{login}{f'[{host}]' if ':' in host else host}:{port}/{address.database}"
            for host, port in address.sentinels
        )
    parts = urlsplit(redis_url)
    query = parse_qs(parts.query)
    database = query.get("db", [""])[0]
    if parts.scheme != "unix":
        # TLS options go another way: see broker_tls().
        options = "&".join(p for p in parts.query.split("&") if not p.startswith("ssl_"))
        path = f"/{database}" if database else parts.path
        return parts._replace(path=path, query=options).geturl()
    # Password and user are quoted in the URL already, and kombu unquotes them again.
    login = parts.netloc.rpartition("@")[0]
    return f"redis+socket://{login + '@' if login else ''}{parts.path}?virtual_host={database or '0'}"


def broker_options(redis_url: str) -> dict[str, Any]:
    """The transport options by which kombu finds the master; none without sentinels."""
    if not is_sentinel(redis_url):
        return {}
    address = SentinelAddress.parse(redis_url)
    return {"master_name": address.master, "sentinel_kwargs": sentinel_options(address)}


def broker_tls(redis_url: str) -> dict[str, Any] | None:
    """TLS options for kombu and Flower; None without TLS.

    From a rediss:// URL without options kombu would make a plain connection and send the password over it."""
    if is_sentinel(redis_url):
        options = SentinelAddress.parse(redis_url).tls
    else:
        parts = urlsplit(redis_url)
        named = {name: value for name, value in parse_qsl(parts.query) if name in TLS_OPTIONS}
        options = named if parts.scheme == "rediss" else None
    return None if options is None else tls_arguments(options)


def make_app(settings: Settings) -> Celery:
    """A new app; nothing is registered or connected yet. Raises BadSetting without a Redis."""
    if settings.redis.url is None:
        raise BadSetting("no Redis is known; set REDIS_URL, or start the embedded stack with `logweir up`")
    app = Celery("logweir", broker=broker_url(settings.redis.url), set_as_current=False)
    app.conf.broker_use_ssl = broker_tls(settings.redis.url)
    app.conf.update(configuration(settings))
    return app


def configuration(settings: Settings) -> dict[str, Any]:
    """Celery's settings, each with its reason."""
    exchange = Exchange("", type="direct")
    return {
        # JSON only: nothing executable is read from the wire.
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        # Results go through the ledger, never through a backend.
        "task_ignore_result": True,
        "result_backend": None,
        # A message is acknowledged when its step is over; a lost worker's message comes back.
        "task_acks_late": True,
        "task_reject_on_worker_lost": False,  # the ledger does; requeueing here would loop on poison
        "worker_prefetch_multiplier": settings.internal.prefetch,
        # The default exchange only: restoring a message then needs no binding keys.
        "task_queues": [Queue(name, exchange, routing_key=name) for name in ALL_QUEUES],
        "task_default_queue": QUEUE_PERIODIC,
        "task_create_missing_queues": False,
        "broker_transport_options": {
            "global_keyprefix": settings.redis.key_prefix + ":",
            # By name, so that fresh batches come before backfill (messages/routing.py). kombu's default,
            # "round_robin", takes queues in turn; "priority" had another order in every process before kombu
            # 5.7.
            "queue_order_strategy": "sorted",
            # Longer than any step but a training, which holds a lease of its own.
            "visibility_timeout": 3600,
            # A worker killed inside a restore leaves this mutex behind; kombu's default blocks for 300 s.
            "unacked_mutex_expire": 15,
            # A connection without answers is dropped after so long; leaving meets it two or three times in a
            # row.
            "socket_timeout": 3,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 3,
            **broker_options(settings.redis.url or ""),
        },
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # wait for Redis as long as it takes
        "broker_channel_error_retry": True,  # a full Redis must not end the worker
        "worker_cancel_long_running_tasks_on_connection_loss": False,  # the claim is renewed elsewhere
        "worker_send_task_events": True,  # Flower
        "task_send_sent_event": True,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_enable_remote_control": True,
        "worker_soft_shutdown_timeout": 8.0,
        "timezone": "UTC",
        "enable_utc": True,
        "beat_schedule": _schedule(settings),
        # In memory: the stock scheduler keeps a pickle file, and a sweep needs no memory of the last one.
        "beat_scheduler": "celery.beat:Scheduler",
        "beat_max_loop_interval": 1,
    }


def declare(app: Celery, queue: str) -> None:
    """Makes a queue known that is not of the configuration, to send to it or to serve it."""
    if queue not in app.amqp.queues:
        app.amqp.queues.add(Queue(queue, Exchange("", type="direct"), routing_key=queue))


@functools.lru_cache(maxsize=2)
def app_of(settings: Settings) -> Celery:
    """The app by which a process wakes workers now and then: one, so that its connections are few."""
    return make_app(settings)


def _schedule(settings: Settings) -> dict[str, Any]:
    """What beat sends, and how often."""
    return {
        "sweep": {
            "task": TASK_SWEEP,
            "schedule": settings.internal.sweep_s,
            # A sweep older than the next one is useless; a stopped consumer piles nothing up.
            "options": {"queue": QUEUE_PERIODIC, "expires": max(2.0, settings.internal.sweep_s * 2)},
        },
        "tick": {
            # Which tick acts is told by the slot ledger (controller/schedule.py), not by who sends it.
            "task": TASK_TICK,
            "schedule": settings.internal.tick_s,
            "options": {"queue": QUEUE_PERIODIC, "expires": max(2.0, settings.internal.tick_s * 2)},
        },
        "watch": {
            # One watches at a time, by a lease (tasks/watch.py).
            "task": TASK_WATCH,
            "schedule": settings.internal.watch_s,
            "options": {"queue": QUEUE_PERIODIC, "expires": max(2.0, settings.internal.watch_s * 2)},
        },
        "compact": {
            # One compacts at a time, by a lease (tasks/compact.py).
            "task": TASK_COMPACT,
            "schedule": settings.internal.sweep_s * 5,
            "options": {"queue": QUEUE_PERIODIC, "expires": max(2.0, settings.internal.sweep_s * 10)},
        },
    }
