"""Why a request is not taken. Each protocol says it in its own words (dialects.py)."""

from enum import StrEnum
from typing import Final

from pipeline.errors import BadInput


class Refusal(StrEnum):
    """The kinds of refusal. A sender repeats the first two, and gives the others up."""

    FULL = "full"
    AWAY = "away"  # Redis does not answer
    FAILED = "failed"  # a fault of ours
    UNDECODABLE = "undecodable"
    TOO_LARGE = "too-large"
    ENCODING = "encoding"  # an unknown Content-Encoding
    SLOW = "slow"
    KEY_MISSING = "key-missing"
    KEY_WRONG = "key-wrong"
    FORBIDDEN = "forbidden"
    CONFLICT = "conflict"  # a declared key that was used for another body


# The usual status of HTTP. Protocols that know another one say so.
STATUS: Final = {
    Refusal.FULL: 503,
    Refusal.AWAY: 503,
    Refusal.FAILED: 503,  # OTLP's clients drop what is answered with 500
    Refusal.UNDECODABLE: 400,
    Refusal.TOO_LARGE: 413,
    Refusal.ENCODING: 415,
    Refusal.SLOW: 408,
    Refusal.KEY_MISSING: 401,
    Refusal.KEY_WRONG: 401,
    Refusal.FORBIDDEN: 403,
    Refusal.CONFLICT: 409,
}
AGAIN: Final = frozenset({Refusal.FULL, Refusal.AWAY, Refusal.FAILED})
# An integer: clients read 0 and 0.5 as "at once", and give up what should come after their deadline.
RETRY_AFTER_S: Final = 1


class RequestRefused(BadInput):
    """A request that is not taken; `kind` says how a protocol answers it."""

    def __init__(self, kind: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.body = b""  # of the request, where it was read: some answers name each document
