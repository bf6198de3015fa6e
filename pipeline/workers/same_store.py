"""All processes of a pipeline work with one store. Redis keeps the identity of the store that came first.

Two stacks with stores on different disks would miss each other's models and lines. The second one is refused.
"""

import json
import subprocess
import sys
from typing import Any, Final

import redis

from pipeline.controller.recovery import enter
from pipeline.errors import BadInput, LogweirError, StoreUnavailable
from pipeline.models.registry import machine_of
from pipeline.redis.connection import answering, connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sinks.manifest import begin_manifest
from pipeline.store.choose import open_store
from pipeline.store.identity import identity
from pipeline.store.objects import probe

_REFUSED: Final = 2  # exit code of `compare`


def join(client: "redis.Redis", settings: Settings, *, first: bool = True) -> None:
    """Enters this process's store as the pipeline's, or compares both.

    `first`: the store is probed, and named if it is new, and a Redis that came up empty gets back what the
    store has of it; else the store is only compared. Raises BadInput for another store than the pipeline's
    and for one that cannot be used, StoreUnavailable, RedisUnavailable.
    """
    objects = open_store(settings.data.store)
    if first:
        probe(objects)
    local = identity(objects, make=first)
    if first and local is not None:
        enter(client, settings, objects, local.id)
    recorded = entered(client, settings)
    if recorded and recorded.get("id") != (local.id if local else ""):
        place = f"the store {recorded.get('url')} of {recorded.get('machine')}"
        if recorded.get("url") == objects.url:
            what = f"{place}, and what is there on {machine_of(settings)} is another one, or empty; mount or restore it"
        else:
            what = (
                f"{place}, and {objects.url} of {machine_of(settings)} is another one; give both the same "
                "store_url (a folder that both mount, or s3://bucket/prefix), or this one a Redis or key_prefix "
                "of its own"
            )
        raise BadInput(
            f"this pipeline works with {what}; after a loss of the first store `logweir store adopt` takes this one"
        )


def join_beside() -> None:
    """`join`, in a process of its own, under the settings of the environment. Raises as `join` does.

    The client of a bucket has threads, and they do not survive a fork: a pool child would wait
    for them for ever.
    """
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; from {__name__} import compare; sys.exit(compare())"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        reason = ended.stderr.strip() or f"the comparison of the store ended with {ended.returncode}"
        raise BadInput(reason) if ended.returncode == _REFUSED else StoreUnavailable(reason)


def adopt(client: "redis.Redis", settings: Settings) -> str:
    """Makes this process's store the pipeline's; returns its identity. Raises BadInput, StoreUnavailable."""
    objects = open_store(settings.data.store)
    probe(objects)
    local = identity(objects)
    assert local is not None  # noqa: S101 - it was made
    if "parquet" in settings.data.sinks:
        begin_manifest(open_store(settings.data.results_url))
    with answering():
        client.delete(Keys(settings.redis.key_prefix).store)
    enter(client, settings, objects, local.id)
    return local.id


def entered(client: "redis.Redis", settings: Settings) -> dict[str, Any]:
    """The pipeline's store as Redis knows it: id, url, machine; {} before the first process."""
    with answering():
        return _entry(client.get(Keys(settings.redis.key_prefix).store))


def _entry(raw: object) -> dict[str, Any]:
    try:
        found = json.loads(raw or b"{}")  # type: ignore[arg-type] # of redis-py
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def compare() -> int:
    """`join` under the settings of the environment; returns an exit code and says why it is not 0."""
    try:
        settings = Settings.load()
        join(connect(settings), settings)
    except LogweirError as exc:
        sys.stderr.write(f"{exc}\n")
        return _REFUSED if isinstance(exc, BadInput) else 1
    return 0
