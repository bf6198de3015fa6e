"""The identity of a request: a retry has that of its first try, whatever else a window holds.

A declared key is bound to the digest of its body. Without one, the body tells requests apart only if each of
its records carries a time finer than a second: `GET /health 200` is written many times a day.
"""

from typing import Final

from pipeline.records.batch import digest
from pipeline.records.delivery import RequestIdentity

_SIZE: Final = 16  # bytes of a digest


def declared(name: str, body: bytes, *, key: str = "", path: str = "") -> str:
    """The identity by a name that the sender gave: an Idempotency-Key, the chunk of a forwarder.

    `key`: the name of the sender's key. Two senders may use the same names."""
    return f"{digest('declared', key, path, name, size=_SIZE)}={digest(body, size=_SIZE)}"


def of_body(body: bytes, *, distinct: bool, key: str = "", path: str = "") -> str:
    """The identity by a decompressed body, "" unless its records tell it from an equal one (`distinct`)."""
    return digest("body", key, path, body, size=_SIZE) if distinct else ""


def told_apart(identity: str) -> RequestIdentity:
    """An identity of this module as the gate compares it."""
    name, _, body = identity.partition("=")
    return RequestIdentity(name=name, body=body)
