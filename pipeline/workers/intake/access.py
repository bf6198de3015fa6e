"""Who may send: the key of a request, or this machine alone while there is no key."""

from collections.abc import Mapping

from pipeline.service.access.keys import SEND, KeyRing, SenderKey, authorization_texts
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.sockets import is_own_host

_REMEDY = "; `logweir keys add NAME` makes one"


def check_access(headers: Mapping[str, str], ring: KeyRing, *, host: str, loopback: bool) -> SenderKey | None:
    """The sender's key, None where none is needed. `headers`: with names in lower case. `host`: of the
    listener; `loopback`: only this machine reaches it. Raises RequestRefused."""
    if not ring.sending:
        if not loopback:
            raise RequestRefused(Refusal.KEY_MISSING, f"off loopback every request needs a key{_REMEDY}")
        # Any page in a browser on this machine can send here.
        if "origin" in headers or not is_own_host(headers.get("host"), host):
            raise RequestRefused(Refusal.FORBIDDEN, f"web pages send with a key{_REMEDY}")
        return None
    texts = list(authorization_texts(headers.get("authorization", "")))
    if not texts:
        raise RequestRefused(
            Refusal.KEY_MISSING, f"this needs a key, in the header `Authorization: Bearer KEY`{_REMEDY}"
        )
    if (found := ring.find(texts)) is None:
        raise RequestRefused(
            Refusal.KEY_WRONG,
            "the key is not known here or has expired; `logweir keys list` shows the others",
        )
    if not found.may(SEND):
        raise RequestRefused(
            Refusal.FORBIDDEN, f"the key {found.name!r} may not send, only {', '.join(found.scopes)}{_REMEDY}"
        )
    return found
