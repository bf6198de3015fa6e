"""Wake-ups in the form in which Celery and kombu read them, written without either.

Celery takes 0.7 ms of processor time to send one, most of it for a client that kombu makes for each message.
messages/filter.py hands Celery the same form.
"""

import json
import os
import socket
import uuid
from collections.abc import Sequence
from typing import Any, Final

_NOTHING: Final = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))


def wake_up_message(task: str, queue: str, batch_id: str, shown: str) -> bytes:
    """The wake-up of a batch as it lies in a queue of kombu on Redis. `shown`: its arguments for people."""
    task_id = str(uuid.uuid4())
    return json.dumps(
        celery_message(
            body_of([batch_id]),
            queue,
            # The sweeper looks for the batch in waiting messages.
            {**task_headers(task, task_id), "argsrepr": shown, "origin": _origin(), "batch": batch_id},
            tag=task_id,
        )
    ).encode()


def task_headers(task: str, task_id: str) -> dict[str, Any]:
    """The headers of a task that is to run once, now."""
    return {
        "lang": "py",
        "task": task,
        "id": task_id,
        "root_id": task_id,
        "parent_id": None,
        "group": None,
        "retries": 0,
        "timelimit": [None, None],
        "eta": None,
        "expires": None,
        "kwargsrepr": "{}",
        "ignore_result": True,
    }


def celery_message(body: str, queue: str, headers: dict[str, Any], *, tag: str) -> dict[str, Any]:
    """A message of kombu. `tag` tells it from all others that are taken and not acknowledged yet."""
    return {
        "body": body,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers,
        "properties": {
            "correlation_id": headers["id"],
            "delivery_mode": 2,
            # Where it goes when it is restored: to where it came from.
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "delivery_tag": tag,
        },
    }


def body_of(ids: Sequence[str]) -> str:
    """The ids of a wake-up, and nothing else."""
    return json.dumps([ids, {}, _NOTHING])


def _origin() -> str:
    return f"gen{os.getpid()}@{socket.gethostname()}"
