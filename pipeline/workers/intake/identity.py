"""The identity of a request: a retry has that of its first try, whatever else a window holds.

A declared key is bound to the digest of its body. Without one, the body tells requests apart only if each of
its records carries a time finer than a second: `GET /health 200` is written many times a day. rsyslog and
systemd-journal-upload repeat records with other companions, so each of theirs has an identity.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from pipeline.records.batch import digest, prefixed
from pipeline.records.delivery import RequestIdentity
from pipeline.sources.protocols.contract import Decoded

_SIZE: Final = 16  # bytes of a digest
_MOST_PATH: Final = 200  # characters of one whose digest is remembered
# More identities in one script hold up Redis: 60,000 took half a second on a busy machine.
MOST_APART: Final = 5_000
# Of a request, "" for none; or of each of its records.
Identity = str | Sequence[str]


def declared(name: str, body: bytes, *, key: str = "", path: str = "") -> str:
    """The identity by a name that the sender gave: an Idempotency-Key, the chunk of a forwarder.

    `key`: the name of the sender's key. Two senders may use the same names."""
    return f"{digest('declared', key, path, name, size=_SIZE)}={digest(body, size=_SIZE)}"


def of_body(body: bytes, *, distinct: bool, key: str = "", path: str = "") -> str:
    """The identity by a decompressed body, "" unless its records tell it from an equal one (`distinct`)."""
    if not distinct:
        return ""
    prefix_hash = _prefix_hash if len(path) <= _MOST_PATH else _prefix_hash.__wrapped__
    hashed = prefix_hash("body", key, path).copy()
    for piece in prefixed(body):
        hashed.update(piece)
    return hashed.hexdigest()


@lru_cache(maxsize=256)
def _prefix_hash(*parts: str) -> "hashlib.blake2b":
    """A `digest` with these parts, which senders repeat, to be copied and gone on with."""
    hashed = hashlib.blake2b(digest_size=_SIZE)
    for part in parts:
        for piece in prefixed(part):
            hashed.update(piece)
    return hashed


def of_request(decoded: Decoded, body: bytes, *, key: str = "", path: str = "") -> Identity:
    """The best identity of a request whose sender gave none."""
    if 0 < len(decoded.apart) <= MOST_APART:
        return of_records(decoded.apart, key=key, path=path)
    return of_body(body, distinct=decoded.distinct, key=key, path=path)


def of_records(texts: Sequence[bytes], *, key: str = "", path: str = "") -> list[str]:
    """The identities of records that come again with others. Equal ones are told apart by their order."""
    seen: Counter[bytes] = Counter()
    names = []
    for text in texts:
        names.append(digest("record", key, path, str(seen[text]), text, size=_SIZE))
        seen[text] += 1
    return names


def told_apart(identity: Identity) -> tuple[RequestIdentity, ...]:
    """Identities of this module as the gate compares them."""
    return tuple(map(_told_apart, (identity,) if isinstance(identity, str) else identity))


def _told_apart(identity: str) -> RequestIdentity:
    name, _, body = identity.partition("=")
    return RequestIdentity(name=name, body=body)
