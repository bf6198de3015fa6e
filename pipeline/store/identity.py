"""The name of a store: random, made with its first use, and carried along when its objects are moved."""

from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

import msgspec

from pipeline.errors import BadPayload
from pipeline.store.objects import Objects

KEY: Final = "store.json"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Of one store. `made`: ISO."""

    id: str
    made: str


def identity(objects: Objects, *, make: bool = True) -> Identity | None:
    """The identity of a store. `make`: gives one to a store that has none; else such a store answers None.

    Raises StoreUnavailable, BadPayload.
    """
    raw = objects.get(KEY)
    if raw is None:
        if not make:
            return None
        fresh = Identity(id=uuid4().hex, made=datetime.now(UTC).isoformat(timespec="seconds"))
        objects.create(KEY, msgspec.json.encode(fresh))
        raw = objects.get(KEY) or b""  # of several that begin, one has named it
    try:
        return msgspec.json.decode(raw, type=Identity)
    except (ValueError, RecursionError) as exc:
        raise BadPayload(
            f"{KEY} of the store {objects.url} cannot be read ({exc}); restore it from a backup"
        ) from exc
