"""Who may send: the key of a request, or this machine alone while there is no key."""

import base64
import binascii
from collections.abc import Iterator, Mapping

from pipeline.service.keys import KeyRing, SenderKey
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.sockets import is_own_host

_SCHEMES = frozenset({"bearer", "splunk", "apikey", "basic"})
_REMEDY = "; `logweir keys add NAME` makes one"


def check_access(headers: Mapping[str, str], ring: KeyRing, *, host: str, loopback: bool) -> SenderKey | None:
    """The sender's key, None where none is needed. `headers`: with names in lower case. `host`: of the
    listener; `loopback`: only this machine reaches it. Raises RequestRefused."""
    if not ring.by_digest:
        if not loopback:
            raise RequestRefused(Refusal.KEY_MISSING, f"off loopback every request needs a key{_REMEDY}")
        # Any page in a browser on this machine can send here.
        if "origin" in headers or not is_own_host(headers.get("host"), host):
            raise RequestRefused(Refusal.FORBIDDEN, f"web pages send with a key{_REMEDY}")
        return None
    texts = list(_texts(headers.get("authorization", "")))
    if not texts:
        raise RequestRefused(
            Refusal.KEY_MISSING, f"this needs a key, in the header `Authorization: Bearer KEY`{_REMEDY}"
        )
    if (found := ring.find(texts)) is None:
        raise RequestRefused(
            Refusal.KEY_WRONG, "the key is not known here; `logweir keys list` shows those that are"
        )
    return found


def _texts(authorization: str) -> Iterator[str]:
    """The texts that may be the key: of Basic the password, or the user beside an empty one."""
    scheme, _, value = authorization.strip().partition(" ")
    value = value.strip()
    if scheme.lower() not in _SCHEMES or not value:
        return
    yield value
    if scheme.lower() in ("basic", "apikey"):
        try:
            user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return
        yield password or user
