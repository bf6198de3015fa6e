"""The identity of a request: a retry has that of its first try, whatever else a window holds.

A declared key is bound to the digest of its body. Without one, the body tells requests apart only if the
times of its records do (`client_times.are_fine`): `GET /health 200` is written many times a day. rsyslog and
systemd-journal-upload repeat records with other companions, so each of theirs has an identity.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Final

from pipeline.records.batch import PREFIX_BYTES, digest, prefixed
from pipeline.records.delivery import IDENTITY_BYTES, NO_IDENTITY, RequestIdentity
from pipeline.records.remembered import remembered
from pipeline.sources.protocols.contract import Decoded

_MOST_REPEATED: Final = 300  # characters of parts whose digest is remembered
# 10,000 in one script, as a window has them, take Redis 12 ms of processor time.
MOST_APART: Final = 5_000


def declared(name: str, body: bytes, *, key: str = "", path: str = "") -> RequestIdentity:
    """The identity by a name that the sender gave: an Idempotency-Key, the chunk of a forwarder.

    `key`: the name of the sender's key. Two senders may use the same names."""
    return RequestIdentity(
        name=digest("declared", key, path, name, size=IDENTITY_BYTES), body=digest(body, size=IDENTITY_BYTES)
    )


def of_body(body: bytes, *, distinct: bool, key: str = "", path: str = "") -> RequestIdentity:
    """The identity by a decompressed body, none unless its records tell it from an equal one (`distinct`)."""
    if not distinct:
        return NO_IDENTITY
    hashed = _prefix_hash("body", key, path).copy()
    for piece in prefixed(body):
        hashed.update(piece)
    return RequestIdentity(name=hashed.hexdigest())


@remembered(256, _MOST_REPEATED)
def _prefix_hash(*parts: str) -> "hashlib.blake2b":
    """A `digest` with these parts, which senders repeat, to be copied and gone on with."""
    hashed = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for part in parts:
        for piece in prefixed(part):
            hashed.update(piece)
    return hashed


def of_request(decoded: Decoded, body: bytes, *, key: str = "", path: str = "") -> RequestIdentity:
    """The best identity of a request whose sender gave none."""
    if 0 < len(decoded.apart) <= MOST_APART:
        return of_records(decoded.apart, key=key, path=path)
    return of_body(body, distinct=decoded.distinct, key=key, path=path)


def of_records(texts: Sequence[bytes], *, key: str = "", path: str = "") -> RequestIdentity:
    """The identities of records that come again with others. Equal ones are told apart by their order."""
    # As `prefixed`, by hand: its call and tuple would make 0.57 us a record of 0.43.
    copy_prefix = _prefix_hash("record", key, path, "0").copy
    names = []
    for text in texts:
        hashed = copy_prefix()
        hashed.update(len(text).to_bytes(PREFIX_BYTES, "little"))
        hashed.update(text)
        names.append(hashed.digest())
    if len(set(names)) < len(names):
        names = _by_order(names, texts, key, path)
    return RequestIdentity(records=tuple(names))


def _by_order(names: Sequence[bytes], texts: Sequence[bytes], key: str, path: str) -> list[bytes]:
    """The first of equal records keeps its name; those behind it have their number in it."""
    seen: Counter[bytes] = Counter()
    names_in_order = []
    for name, text in zip(names, texts, strict=True):
        order = seen[name]
        seen[name] += 1
        if order:
            parts = ("record", key, path, str(order), text)
            names_in_order.append(bytes.fromhex(digest(*parts, size=IDENTITY_BYTES)))
        else:
            names_in_order.append(name)
    return names_in_order
